"""The CPU engine: bit-exact rows whatever shares the step, and KV that follows commits and moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from trtspec.compile import CompileRequest, compile_engine
from trtspec.engines.base import SlotStep
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.engines.selftest import inexact_steps
from trtspec.errors import SetupError

PREFIX = 50
TAPS = (0, 2)


def compiled(model: Path, into: Path, **options: str) -> Path:
    request = CompileRequest(
        model, "tiny", {"method": "none"}, max_batch=3, max_branches=3, taps=TAPS, **options
    )
    compile_engine(request, into)
    return into


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tiny_model("llama"), tmp_path_factory.mktemp("engine"))


@pytest.fixture
def engine(folder: Path) -> Iterator[OnnxRuntimeEngine]:
    opened = OnnxRuntimeEngine(folder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tokens(folder: Path) -> np.ndarray:
    return np.random.default_rng(1).integers(0, EngineInfo.read(folder).spec.vocab_size, PREFIX + 20)


def prefill(engine: OnnxRuntimeEngine, tokens: np.ndarray, slot: int = 0) -> None:
    others = [SlotStep(i, 0, tokens[:1]) for i in range(slot)]
    engine.forward([*others, SlotStep(slot, 0, tokens[:PREFIX], logits_from=PREFIX)])


def rows(
    engine: OnnxRuntimeEngine, tokens: np.ndarray, start: int, count: int, slot: int = 0, **step: object
) -> np.ndarray:
    return engine.forward([SlotStep(slot, start, tokens[start : start + count], **step)])[0].logits.copy()


def inexact(folder: Path, into: Path) -> Path:
    """The same engine, claiming no exactness."""
    for file in folder.iterdir():
        if file.name != "engine.json":
            (into / file.name).symlink_to(file)
    info = EngineInfo.read(folder)
    dataclasses.replace(info, spec=dataclasses.replace(info.spec, exact=False)).write(into)
    return into


@pytest.mark.parametrize("count", range(1, 18))
def test_rows_are_bit_identical_for_any_draft_length(
    engine: OnnxRuntimeEngine, tokens: np.ndarray, count: int
) -> None:
    prefill(engine, tokens)
    reference = rows(engine, tokens, PREFIX, 18)
    assert np.array_equal(rows(engine, tokens, PREFIX, count), reference[:count])


@pytest.mark.parametrize("pieces", [(50,), (49, 1), (1, 49), (25, 24, 1), (2,) * 25, (1,) * 50])
def test_the_prompt_may_be_fed_in_any_pieces(
    engine: OnnxRuntimeEngine, tokens: np.ndarray, pieces: tuple[int, ...]
) -> None:
    prefill(engine, tokens)
    reference = rows(engine, tokens, PREFIX, 4)
    start = 0
    for piece in pieces:
        rows(engine, tokens, start, piece)
        start += piece
    assert np.array_equal(rows(engine, tokens, PREFIX, 4), reference)


def test_neighbours_change_nothing(engine: OnnxRuntimeEngine, tokens: np.ndarray) -> None:
    """Ragged steps: a lone row, a long draft and a prompt side by side."""
    prefill(engine, tokens)
    reference = rows(engine, tokens, PREFIX, 9)
    engine.forward([SlotStep(slot, 0, tokens[:PREFIX], logits_from=PREFIX) for slot in range(3)])
    out = engine.forward(
        [
            SlotStep(0, PREFIX, tokens[PREFIX : PREFIX + 1]),
            SlotStep(1, PREFIX, tokens[PREFIX : PREFIX + 9]),
            SlotStep(2, 0, tokens[:PREFIX], logits_from=PREFIX),
        ]
    )
    assert np.array_equal(out[0].logits, reference[:1])
    assert np.array_equal(out[1].logits, reference)
    assert out[2].logits.shape == (0, engine.spec.vocab_size)


def test_slots_that_take_no_part_are_left_alone(engine: OnnxRuntimeEngine, tokens: np.ndarray) -> None:
    prefill(engine, tokens)
    reference = rows(engine, tokens, PREFIX, 5)
    prefill(engine, tokens)
    alone = engine.forward([SlotStep(2, 0, tokens[:PREFIX], logits_from=PREFIX - 1)])[0].logits.copy()
    assert np.array_equal(rows(engine, tokens, PREFIX, 5), reference)
    out = engine.forward([SlotStep(2, PREFIX, tokens[PREFIX : PREFIX + 5]), SlotStep(0, 0, tokens[:PREFIX])])
    assert np.array_equal(out[0].logits, reference)
    assert np.array_equal(out[1].logits[-1:], alone)


def test_hidden_states_are_the_tapped_layers(
    engine: OnnxRuntimeEngine, tokens: np.ndarray, tiny_model: Callable[[str], Path]
) -> None:
    import torch
    import transformers

    out = engine.forward([SlotStep(0, 0, tokens[:PREFIX])])[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.from_numpy(tokens[None, :PREFIX]), output_hidden_states=True).hidden_states
    # transformers norms the last entry of hidden_states; a tap is the residual stream before that norm
    width = engine.spec.hidden_size
    np.testing.assert_allclose(out.hidden[:, :width], states[TAPS[0] + 1][0], atol=1e-4)
    with torch.inference_mode():
        normed = model.model.norm(torch.from_numpy(out.hidden[:, width:]))
    np.testing.assert_allclose(normed, states[-1][0], atol=1e-4)


class Forks:
    """A tree of three branches below PREFIX, and what each branch gives as a chain."""

    parents = np.array([-1, 0, 0, 1, 2, 3, 0])
    paths = ((0, 1, 3, 5), (0, 2, 4), (0, 6))

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens[PREFIX : PREFIX + len(self.parents)]

    def chains(self, engine: OnnxRuntimeEngine) -> list[np.ndarray]:
        steps = [SlotStep(0, PREFIX, self.tokens[list(path)]) for path in self.paths]
        return [engine.forward([step])[0].logits.copy() for step in steps]

    def step(self) -> SlotStep:
        return SlotStep(0, PREFIX, self.tokens, self.parents)


def test_a_tree_scores_each_branch_as_its_chain_bit_for_bit(
    engine: OnnxRuntimeEngine, tokens: np.ndarray
) -> None:
    forks = Forks(tokens)
    prefill(engine, tokens)
    chains = forks.chains(engine)
    logits = engine.forward([forks.step()])[0].logits
    for path, chain in zip(forks.paths, chains, strict=True):
        assert np.array_equal(logits[list(path)], chain)


@pytest.mark.parametrize("kept", [(0,), (0, 1), (0, 1, 3, 5), (0, 2), (0, 2, 4), (0, 6)])
def test_a_committed_path_is_the_sequence_bit_for_bit(
    engine: OnnxRuntimeEngine, tokens: np.ndarray, kept: tuple[int, ...]
) -> None:
    """Also when the next step is a tree again, whose branches start from what was committed."""
    forks = Forks(tokens)
    start = PREFIX + len(kept)
    prefill(engine, tokens)
    engine.forward([SlotStep(0, PREFIX, forks.tokens[list(kept)])])
    chain = engine.forward([SlotStep(0, start, tokens[:4])])[0].logits.copy()
    prefill(engine, tokens)
    engine.forward([forks.step()])
    engine.commit(0, PREFIX, kept)
    assert np.array_equal(engine.forward([SlotStep(0, start, tokens[:4])])[0].logits, chain)
    fork = SlotStep(0, start, tokens[[7, 0, 1, 2, 3]], np.array([-1, -1, 1, 2, 3]))
    assert np.array_equal(engine.forward([fork])[0].logits[1:], chain)


def test_trees_and_chains_share_a_step(engine: OnnxRuntimeEngine, tokens: np.ndarray) -> None:
    forks = Forks(tokens)
    prefill(engine, tokens)
    tree = engine.forward([forks.step()])[0].logits.copy()
    chain = rows(engine, tokens, PREFIX, 3)
    engine.forward([SlotStep(slot, 0, tokens[:PREFIX], logits_from=PREFIX) for slot in range(3)])
    out = engine.forward(
        [
            SlotStep(0, PREFIX, tokens[PREFIX : PREFIX + 1]),
            SlotStep(1, PREFIX, forks.tokens, forks.parents),
            SlotStep(2, PREFIX, tokens[PREFIX : PREFIX + 3]),
        ]
    )
    assert np.array_equal(out[0].logits, chain[:1])
    assert np.array_equal(out[1].logits, tree)
    assert np.array_equal(out[2].logits, chain)


def test_an_inexact_engine_scores_trees_under_a_mask(
    tiny_model: Callable[[str], Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    """To rounding only: a hidden key still takes a place in the kernel's sums."""
    engine = OnnxRuntimeEngine(compiled(tiny_model("llama"), tmp_path, numerics="fast"))
    forks = Forks(tokens)
    prefill(engine, tokens)
    chains = forks.chains(engine)
    logits = engine.forward([forks.step()])[0].logits.copy()
    for path, chain in zip(forks.paths, chains, strict=True):
        np.testing.assert_allclose(logits[list(path)], chain, atol=1e-5)
    engine.commit(0, PREFIX, (0, 2, 4))
    after = engine.forward([SlotStep(0, PREFIX + 3, tokens[:2])])[0].logits.copy()
    prefill(engine, tokens)
    engine.forward([SlotStep(0, PREFIX, forks.tokens[[0, 2, 4]])])
    np.testing.assert_allclose(
        after, engine.forward([SlotStep(0, PREFIX + 3, tokens[:2])])[0].logits, atol=1e-5
    )


def test_paths_and_branches_that_do_not_fit_are_refused(
    engine: OnnxRuntimeEngine, tokens: np.ndarray
) -> None:
    prefill(engine, tokens)
    engine.forward([Forks(tokens).step()])
    with pytest.raises(ValueError, match="no path of the tree"):
        engine.commit(0, PREFIX, (0, 1, 4))
    with pytest.raises(ValueError, match="4 branches, at most 3"):
        engine.forward([SlotStep(0, PREFIX, tokens[:5], np.array([-1, 0, 0, 0, 0]))])


def test_a_sequence_at_the_context_limit_shares_a_step_with_a_long_prompt(
    engine: OnnxRuntimeEngine,
) -> None:
    """The step is as wide as its widest sequence, which is more than is left of the other's context."""
    spec = engine.spec
    text = np.arange(spec.max_seq_len) % 300
    last = SlotStep(0, spec.max_seq_len - 2, text[-2:])
    for start in range(0, last.start, spec.max_rows):
        engine.forward([SlotStep(0, start, text[start : min(start + spec.max_rows, last.start)])])
    alone = engine.forward([last])[0].logits.copy()
    prompt = SlotStep(1, 0, text[:40])
    reference = engine.forward([prompt])[0].logits.copy()
    together = engine.forward([last, prompt])
    assert np.array_equal(together[0].logits, alone)
    assert np.array_equal(together[1].logits, reference)


def test_rejected_rows_leave_no_trace(engine: OnnxRuntimeEngine, tokens: np.ndarray) -> None:
    prefill(engine, tokens)
    reference = rows(engine, tokens, PREFIX, 3)
    rows(engine, tokens[::-1].copy(), PREFIX, 12)
    assert np.array_equal(rows(engine, tokens, PREFIX, 3), reference)


def test_a_copied_sequence_goes_on_bit_for_bit(engine: OnnxRuntimeEngine, tokens: np.ndarray) -> None:
    prefill(engine, tokens)
    reference = rows(engine, tokens, PREFIX, 5)
    prefill(engine, tokens, slot=2)
    engine.forward([SlotStep(0, 0, tokens[::-1].copy())])
    engine.copy(2, 0, PREFIX)
    assert np.array_equal(rows(engine, tokens, PREFIX, 5), reference)
    assert np.array_equal(rows(engine, tokens, PREFIX, 5, slot=2), reference)


def test_what_an_idle_slot_holds_survives_the_steps_of_its_neighbours(
    engine: OnnxRuntimeEngine, tokens: np.ndarray
) -> None:
    prefill(engine, tokens, slot=1)
    reference = rows(engine, tokens, PREFIX, 5, slot=1)
    backwards = tokens[::-1].copy()
    engine.forward([SlotStep(0, 0, backwards), SlotStep(2, 0, backwards[:3])])
    engine.forward([SlotStep(2, 3, backwards[3:4])])
    assert np.array_equal(rows(engine, tokens, PREFIX, 5, slot=1), reference)


def test_the_last_position_of_the_context_can_be_used(engine: OnnxRuntimeEngine) -> None:
    """The companion row of a lone last row lies past the public limit."""
    limit = engine.spec.max_seq_len
    step = SlotStep(0, limit - 1, np.array([5]))
    assert np.isfinite(engine.forward([step])[0].logits).all()
    with pytest.raises(ValueError, match="max_seq_len"):
        engine.forward([SlotStep(0, limit, np.array([5]))])


def test_steps_that_do_not_fit_are_refused(engine: OnnxRuntimeEngine, tokens: np.ndarray) -> None:
    one = tokens[:1]
    with pytest.raises(ValueError, match="slots 0 to 2"):
        engine.forward([SlotStep(3, 0, one)])
    with pytest.raises(ValueError, match="once"):
        engine.forward([SlotStep(0, 0, one), SlotStep(0, 0, one)])
    with pytest.raises(ValueError, match="a step takes 1 to"):
        engine.forward([SlotStep(0, 0, tokens[:0])])
    with pytest.raises(ValueError, match="a step takes 1 to"):
        engine.forward([SlotStep(0, 0, np.zeros(engine.spec.max_rows + 1, np.int64))])


def test_the_self_test_passes_here_and_catches_a_lone_row(folder: Path, tmp_path: Path) -> None:
    """Without the companion row the claim of exactness is false, and opening the engine must find out."""
    assert inexact_steps(OnnxRuntimeEngine(folder)) == []
    failures = inexact_steps(OnnxRuntimeEngine(inexact(folder, tmp_path)))
    assert any(failure.startswith("1 of") for failure in failures)


def test_a_folder_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="not an engine folder"):
        OnnxRuntimeEngine(tmp_path)
    (tmp_path / "engine.json").write_text('{"format": 99}')
    with pytest.raises(SetupError, match="format 99"):
        OnnxRuntimeEngine(tmp_path)
