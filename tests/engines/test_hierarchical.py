"""QuantSpec's cache: a row reads what its position says, bit for bit, whatever drafts, chunks and company it came with.

The fault behind most of these: a cache that quantizes when a *step* has gone past a group lets the draft length
decide what a row reads, and speculative output is then no longer the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.compile import CompileRequest, compile_engine
from trtspec.engines import hierarchical_kv
from trtspec.engines.base import SlotStep
from trtspec.engines.hierarchical import HierarchicalEngine, open_cpu_engine
from trtspec.engines.hierarchical_kv import KEYS, VALUES, HierarchicalKv, quantize
from trtspec.engines.info import EngineInfo
from trtspec.engines.selftest import inexact_steps

GROUP = 32
LENGTH = 5 * GROUP + 7
SLOTS = 3
CLOSE = 2e-3  # of logits, where a cached element next to a rounding edge may fall on the other side


# -- the arithmetic, element by element


def byte_of(x: np.float32, smallest: np.float32, largest: np.float32) -> int:
    """The paper's two roundings of one element: to 4 bits from its group's minimum, then what is left in 16ths."""
    step = (largest - smallest) / np.float32(15)
    step = step if step > 0 else np.float32(1)
    upper = min(15, max(0, round(float((x - smallest) / step))))
    left = (x - (np.float32(upper) * step + smallest)) / (step / np.float32(16))
    return upper * 16 + 8 + min(7, max(-8, round(float(left))))


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 300.0])
def test_codes_are_those_of_the_paper_s_formula(axis: int, spread: float) -> None:
    rng = np.random.default_rng(3)
    rows = (spread * rng.standard_normal((2, 8, 16)) + 5).astype(np.float32)
    codes, scales, lows = quantize(rows, axis)
    for head, i, j in np.ndindex(rows.shape):
        alike = rows[head, :, j] if axis == -2 else rows[head, i]
        assert codes[head, i, j] == byte_of(rows[head, i, j], alike.min(), alike.max())
    step = 16 * scales
    whole = codes * scales + lows
    upper = (codes >> 4) * step + (lows + 8 * scales)
    assert (np.abs(whole - rows) <= step / 16 + 1e-5 * np.abs(rows)).all()
    assert (np.abs(upper - rows) <= step / 2 + 1e-5 * np.abs(rows)).all()
    if spread >= 1:
        assert np.abs(upper - rows).mean() > 8 * np.abs(whole - rows).mean()


# -- the store


def small_cache() -> HierarchicalKv:
    return HierarchicalKv(layers=2, slots=2, kv_heads=2, head_dim=4, group=4, max_rows=4, max_seq_len=256)


def check_view(kv: HierarchicalKv, slot: int, written: np.ndarray) -> None:
    """What the row after `written`, float32 [layers, 2, heads, positions, head_dim], reads: its first groups as bytes
    of those very rows, the rest as they are."""
    position = written.shape[3]
    groups = max(0, position // kv.group - 1)
    for index in range(groups):
        inside = written[:, :, :, index * kv.group : (index + 1) * kv.group]
        for part, axis, scales, lows in (
            (KEYS, -2, kv.key_scales, kv.key_lows),
            (VALUES, -1, kv.value_scales, kv.value_lows),
        ):
            held = kv.codes[:, part, slot, :, index], scales[:, slot, :, index], lows[:, slot, :, index]
            for one, other in zip(held, quantize(inside[:, part], axis), strict=True):
                assert np.array_equal(one, other)
    fresh = kv.recent_positions(position)
    assert fresh.tolist() == list(range(groups * kv.group, position))
    assert np.array_equal(kv.recent[:, :, slot][:, :, :, fresh % kv.recent_rows], written[:, :, :, fresh])


def pieces(start: int, count: int, group: int) -> Iterator[np.ndarray]:
    """The positions of a step, cut at the multiples of a group."""
    positions = np.arange(start, start + count)
    yield from (piece for piece in np.split(positions, np.flatnonzero(positions % group == 0)) if len(piece))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), max_size=60))
def test_every_row_reads_what_its_position_says(steps: list[tuple[int, int, bool]]) -> None:
    """Steps of which any part is taken back, past the end of a group and before it, in a slot that is copied about."""
    rng = np.random.default_rng(0)
    kv, slot, length = small_cache(), 0, 0
    written = np.zeros((2, 2, 2, 256, 4), np.float32)  # the last rows of each position
    for count, kept, copied in steps:
        for piece in pieces(length, count, kv.group):
            kv.write_from(slot, int(piece[0]))
            check_view(kv, slot, written[:, :, :, : piece[0]])
            written[:, :, :, piece] = rng.standard_normal((2, 2, 2, len(piece), 4))
            kv.store(slot, piece, written[:, :, :, piece])
        length += min(kept, count)
        if copied:
            kv.copy(slot, 1 - slot, length)
            slot = 1 - slot


def test_a_row_that_is_gone_is_not_read_as_another() -> None:
    kv = small_cache()
    for piece in pieces(0, 30, kv.group):
        kv.write_from(0, int(piece[0]))
        kv.store(0, piece, np.zeros((2, 2, 2, len(piece), 4), np.float32))
    kv.write_from(0, 26)
    with pytest.raises(ValueError, match="too far back"):
        kv.write_from(0, 16)
    kv.write_from(0, 0)


# -- the engine


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path], variant: str) -> Path:
    return tiny_model(variant)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By bits: the target's engine and the draft's, of the same weights."""
    made = {}
    for bits in (8, 4):
        made[bits] = tmp_path_factory.mktemp(f"bits{bits}")
        request = CompileRequest(
            model, "tiny", {"method": "none"}, max_batch=SLOTS, kv_group=GROUP, kv_bits=bits
        )
        compile_engine(request, made[bits])
    return made


@pytest.fixture
def target(folders: dict[int, Path]) -> Iterator[HierarchicalEngine]:
    engine = open_cpu_engine(folders[8])
    yield engine
    engine.close()


@pytest.fixture
def draft(folders: dict[int, Path], target: HierarchicalEngine) -> Iterator[HierarchicalEngine]:
    engine = HierarchicalEngine(folders[4], kv=target.kv)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 320, LENGTH)


@pytest.fixture(scope="module")
def plain(folders: dict[int, Path], tokens: np.ndarray) -> np.ndarray:
    """float32 [LENGTH, V]: of plain decoding, one row a step."""
    engine = open_cpu_engine(folders[8])
    return np.concatenate(
        [engine.forward([SlotStep(0, i, tokens[i : i + 1])])[0].logits.copy() for i in range(LENGTH)]
    )


def fed(engine: HierarchicalEngine, tokens: np.ndarray, slot: int = 0) -> None:
    for piece in pieces(0, len(tokens), GROUP):
        engine.forward([SlotStep(slot, int(piece[0]), tokens[piece])])


def reading(rows: np.ndarray, axis: int, groups: int, bits: int) -> np.ndarray:
    """float32 like `rows` [1, heads, positions, head_dim], the first `groups` as a view of `bits` reads them."""
    rows = rows.copy()
    for index in range(groups):
        inside = slice(index * GROUP, (index + 1) * GROUP)
        codes, scales, lows = quantize(rows[:, :, inside], axis)
        if bits == 4:
            codes = (codes & 0xF0) + np.uint8(8)
        rows[:, :, inside] = codes * scales + lows
    return rows


def expected(model: Path, tokens: np.ndarray, last_bits: int = 8) -> np.ndarray:
    """float32 [len(tokens), V] of transformers' own model, row by row, over a cache that is quantized and expanded here
    for every row anew; the last row reads `last_bits` of it."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    logits: list[np.ndarray] = []
    exact: list[list[np.ndarray]] = []  # by layer: keys and values as they were computed
    for position in range(len(tokens)):
        bits = last_bits if position == len(tokens) - 1 else 8
        groups = max(0, position // GROUP - 1)
        cache = transformers.DynamicCache()
        for layer, parts in enumerate(exact):
            read = [reading(rows, axis, groups, bits) for rows, axis in zip(parts, (-2, -1), strict=True)]
            cache.update(*map(torch.from_numpy, read), layer)
        with torch.inference_mode():
            out = network(torch.from_numpy(tokens[None, position : position + 1]), past_key_values=cache)
        new = [[rows[:, :, -1:].numpy() for rows in (kept.keys, kept.values)] for kept in cache.layers]
        if exact:
            new = [
                [np.concatenate(pair, axis=2) for pair in zip(*both, strict=True)]
                for both in zip(exact, new, strict=True)
            ]
        exact = new
        logits.append(out.logits[0, -1].numpy())
    return np.stack(logits)


def test_the_target_is_the_model_over_an_8_bit_cache(
    model: Path, tokens: np.ndarray, plain: np.ndarray
) -> None:
    np.testing.assert_allclose(plain, expected(model, tokens), atol=CLOSE)


def test_the_draft_reads_the_upper_halves_of_the_target_s_cache(
    model: Path, tokens: np.ndarray, plain: np.ndarray, target: HierarchicalEngine, draft: HierarchicalEngine
) -> None:
    """It never sees the prompt: its only rows are those it drafts itself."""
    start = 4 * GROUP + 3
    fed(target, tokens[:start])
    logits = draft.forward([SlotStep(0, start, tokens[start : start + 1])])[0].logits.copy()
    reference = expected(model, tokens[: start + 1], last_bits=4)[-1]
    np.testing.assert_allclose(logits[0], reference, atol=CLOSE)
    assert np.abs(reference - plain[start]).max() > 5 * CLOSE, "4 bits read what 8 bits do"


@pytest.mark.parametrize("seed", range(8))
def test_plain_and_speculative_rows_are_the_same_bits(
    target: HierarchicalEngine, draft: HierarchicalEngine, tokens: np.ndarray, plain: np.ndarray, seed: int
) -> None:
    """Prompts in any chunks, drafts of any length with any part rejected, in any company: every row's logits are those
    of plain decoding alone."""
    random = np.random.default_rng(seed)
    lengths = dict.fromkeys(range(SLOTS), 0)
    while lengths:
        steps: list[SlotStep] = []
        kept: list[int] = []
        for slot, start in lengths.items():
            if steps and random.random() < 0.3:
                continue  # sits this one out
            prompt = start < 60
            rows = tokens[start : start + random.integers(1, 1 + (GROUP if prompt else 9))].copy()
            kept.append(len(rows) if prompt else int(random.integers(1, len(rows) + 1)))
            rows[kept[-1] :] = random.integers(0, 320, len(rows) - kept[-1])
            steps.append(SlotStep(slot, start, rows))
        if drafted := [step for step in steps if step.start >= 60 and random.random() < 0.8]:
            draft.forward(drafted)
        for step, keep, output in zip(steps, kept, target.forward(steps), strict=True):
            assert np.array_equal(output.logits[:keep], plain[step.start : step.start + keep])
            lengths[step.slot] += keep
            if lengths[step.slot] == LENGTH:
                del lengths[step.slot]


def test_the_test_tells_a_cache_that_follows_the_steps(
    target: HierarchicalEngine,
    draft: HierarchicalEngine,
    tokens: np.ndarray,
    plain: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that read what the first row of their step reads depend on where the step began."""
    monkeypatch.setattr(hierarchical_kv, "_pieces", lambda step, group: iter([step]))
    with pytest.raises(AssertionError):
        test_plain_and_speculative_rows_are_the_same_bits(target, draft, tokens, plain, 0)


def test_a_copied_sequence_goes_on_bit_for_bit(
    target: HierarchicalEngine, tokens: np.ndarray, plain: np.ndarray
) -> None:
    fed(target, tokens[:100], slot=2)
    target.copy(2, 0, 100)
    fed(target, tokens[::-1][:100].copy(), slot=2)
    logits = target.forward([SlotStep(0, 100, tokens[100:105])])[0].logits
    assert np.array_equal(logits, plain[100:105])


def test_the_self_test_passes_here(target: HierarchicalEngine) -> None:
    assert inexact_steps(target) == []


def test_trees_are_refused(target: HierarchicalEngine) -> None:
    with pytest.raises(ValueError, match="chains only"):
        target.forward([SlotStep(0, 0, np.arange(3), np.array([-1, 0, 0]))])


def test_a_sequence_takes_a_fraction_of_a_float32_cache(folders: dict[int, Path]) -> None:
    info = EngineInfo.read(folders[8])
    kv = open_cpu_engine(folders[8]).kv
    per_token = kv.codes[:, :, 0, :, 0, 0].nbytes + sum(
        a[:, 0, :, 0].nbytes / GROUP for a in (kv.key_scales, kv.key_lows, kv.value_scales, kv.value_lows)
    )
    assert per_token < 0.4 * 4 * 2 * info.layers * info.kv_heads * info.head_dim
