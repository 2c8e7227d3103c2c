"""Fuzzed token trees on the CPU engine against the plainest reference: every row's path run from nothing as a chain.

Several slots bring trees of different shapes, chains or nothing to a step; a random path of each is committed, and the
next step goes on from there. A wrong mask, position, row or KV entry changes some row's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtspec.compile import CompileRequest, compile_engine
from trtspec.engines.base import SlotStep
from trtspec.engines.kv_cache import KvCache
from trtspec.engines.onnxruntime import OnnxRuntimeEngine

SLOTS, BRANCHES, VOCABULARY = 3, 3, 259


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a step's rows: row 0 is the last known token, all others hang below it."""
    parents: list[int] = [-1]
    for row in range(1, draw(st.integers(1, 9))):
        leaves = [r for r in range(row) if r not in parents]
        choices = list(range(row)) if len(leaves) < BRANCHES else leaves
        parents.append(draw(st.sampled_from(choices)))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(parents), max_size=len(parents)))
    return tokens, parents


@st.composite
def traffic(draw: st.DrawFn) -> list[list[tuple[list[int], list[int], int] | None]]:
    """For each step and slot: a tree and the row whose path is committed, or None where the slot takes no part."""
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        slots = []
        for _ in range(SLOTS):
            tree = draw(st.none() | trees())
            slots.append(None if tree is None else (*tree, draw(st.integers(0, len(tree[1]) - 1))))
        steps.append(slots)
    return steps


def compiled(model: Path, into: Path, **options: str) -> Path:
    request = CompileRequest(
        model, "tiny", {"method": "none"}, max_batch=SLOTS, max_branches=BRANCHES, **options
    )
    compile_engine(request, into)
    return into


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tiny_model("llama"), tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def exact(folder: Path) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(folder, threads=1)


@pytest.fixture(scope="module")
def masked(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    """The same model without exactness: a tree is one lane under an ancestor mask."""
    folder = compiled(tiny_model("llama"), tmp_path_factory.mktemp("masked"), numerics="fast")
    return OnnxRuntimeEngine(folder, threads=1)


class Reference:
    """Logits after a text, each computed from nothing in a slot of its own engine."""

    def __init__(self, folder: Path) -> None:
        self._engine = OnnxRuntimeEngine(folder, max_batch=1, threads=1)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, text: tuple[int, ...]) -> np.ndarray:
        if text not in self._known:
            step = SlotStep(0, 0, np.array(text, np.int64), logits_from=len(text) - 1)
            self._known[text] = self._engine.forward([step])[0].logits[0].copy()
        return self._known[text]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def path_to(parents: list[int], row: int) -> list[int]:
    rows: list[int] = []
    while row >= 0:
        rows.append(row)
        row = parents[row]
    return rows[::-1]


def play(engine: OnnxRuntimeEngine, reference: Reference, steps, same: Callable) -> None:
    texts = [(3 + slot, 7, 11 * slot) for slot in range(SLOTS)]
    engine.forward([SlotStep(s, 0, np.array(text, np.int64), logits_from=3) for s, text in enumerate(texts)])
    for step in steps:
        taking = [(slot, *move) for slot, move in enumerate(step) if move is not None]
        if not taking:
            continue
        outputs = engine.forward(
            [
                SlotStep(
                    slot,
                    len(texts[slot]),
                    np.array(tokens, np.int64),
                    None if parents == list(range(-1, len(parents) - 1)) else np.array(parents),
                )
                for slot, tokens, parents, _ in taking
            ]
        )
        for (slot, tokens, parents, kept), output in zip(taking, outputs, strict=True):
            for row in range(len(tokens)):
                path = path_to(parents, row)
                same(output.logits[row], reference((*texts[slot], *(tokens[r] for r in path))))
            path = path_to(parents, kept)
            engine.commit(slot, len(texts[slot]), path)
            texts[slot] = (*texts[slot], *(tokens[r] for r in path))


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(steps=traffic())
def test_an_exact_engine_gives_every_row_its_chains_logits_bit_for_bit(
    exact: OnnxRuntimeEngine, reference: Reference, steps
) -> None:
    play(exact, reference, steps, lambda a, b: np.testing.assert_array_equal(a, b))


@FUZZ
@given(steps=traffic())
def test_a_masked_engine_gives_them_to_rounding(
    masked: OnnxRuntimeEngine, reference: Reference, steps
) -> None:
    play(masked, reference, steps, lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4))


# -- the cache alone, against lists of rows


@st.composite
def cache_moves(draw: st.DrawFn) -> list[tuple]:
    """Trees by their branch lengths with the branch kept and how much of it, compactions, and copies between slots."""
    lengths = st.lists(st.integers(1, 4), min_size=1, max_size=BRANCHES)
    tree = st.tuples(st.just("tree"), st.integers(0, 1), lengths, st.integers(0, 9), st.integers(0, 9))
    rows = st.sets(st.integers(0, 5), min_size=1).map(sorted)
    compact = st.tuples(st.just("compact"), st.integers(0, 1), rows)
    copy = st.tuples(st.just("copy"), st.integers(0, 1), st.integers(0, 9))
    return draw(st.lists(st.one_of(tree, compact, copy), max_size=8))


@settings(max_examples=200, deadline=None)
@given(cache_moves())
def test_what_the_cache_holds_is_what_was_committed(moves: list[tuple]) -> None:
    cache = KvCache(layers=1, slots=2, branches=BRANCHES, kv_heads=1, capacity=64, head_dim=1)
    texts: list[list[float]] = [[], []]
    written = 0.0

    def write(lane: int, start: int, count: int) -> list[float]:
        """What the kernel does: rows from `start` on in one lane, keys and values."""
        nonlocal written
        values = [written + i + 1 for i in range(count)]
        written += count
        cache.data[0, :, lane, 0, start : start + count, 0] = values
        return values

    for kind, slot, *rest in moves:
        start = len(texts[slot])
        if kind == "tree":
            lengths, branch, kept = rest
            cache.write_from(slot, start)
            cache.spread(slot, len(lengths), start)
            lanes = []
            for number, count in enumerate(lengths):
                lane = cache.lane(slot, number)
                assert cache.data[0, 0, lane, 0, :start, 0].tolist() == texts[slot], "a branch sees the text"
                lanes.append(write(lane, start, count))
            branch %= len(lengths)
            kept = 1 + kept % lengths[branch]
            cache.adopt(slot, branch, start, kept)
            texts[slot] += lanes[branch][:kept]
        elif kind == "compact":
            (rows,) = rest
            cache.write_from(slot, start)
            values = write(cache.lane(slot), start, rows[-1] + 1)
            cache.compact(slot, start, rows)
            texts[slot] += [values[row] for row in rows]
        else:
            length = min(rest[0], start)
            cache.copy(slot, 1 - slot, length)
            texts[1 - slot] = texts[slot][:length]
        for number, text in enumerate(texts):
            for part in (0, 1):
                assert cache.data[0, part, cache.lane(number), 0, : len(text), 0].tolist() == text
