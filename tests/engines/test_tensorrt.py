"""The TensorRT adapter, its graph run by definition in ONNX Runtime: steps, slots and KV are as the CPU engine has
them. (What needs a plan and a GPU is not tested here.)"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.tensorrt_reference import export_float32, with_cache_scales
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.reference_attention import ReferenceRunner
from trtspec.engines.base import Engine, SlotStep
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.engines.tensorrt import TensorRtEngine, check_plan
from trtspec.engines.tensorrt_info import BuiltPlan, TensorRtInfo
from trtspec.errors import SetupError
from trtspec.verify.tree import TokenTree

SLOTS, ROWS, PREFIX, TAPS = 3, 8, 50, (0, 2)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    into = tmp_path_factory.mktemp("cpu")
    compile_engine(CompileRequest(model, "tiny", {"method": "none"}, max_batch=SLOTS, taps=TAPS), into)
    return OnnxRuntimeEngine(into)


@pytest.fixture(scope="module", params=["exact", "fast"])
def folder(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(model, tmp_path_factory.mktemp(request.param), rows=ROWS, numerics=request.param)


def exported(model: Path, into: Path, **settings: object) -> Path:
    return export_float32(model, into, splits=2, max_batch=SLOTS, taps=TAPS, **settings)


@pytest.fixture
def engine(folder: Path) -> Iterator[TensorRtEngine]:
    opened = TensorRtEngine(folder, runner=ReferenceRunner(folder))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tokens(cpu: OnnxRuntimeEngine) -> np.ndarray:
    return np.random.default_rng(3).integers(0, cpu.spec.vocab_size, 240)


def both(cpu: Engine, engine: Engine, *steps: SlotStep) -> None:
    for expected, found in zip(cpu.forward(steps), engine.forward(steps), strict=True):
        np.testing.assert_allclose(found.logits, expected.logits, atol=TOLERANCE)
        np.testing.assert_allclose(found.hidden, expected.hidden, atol=TOLERANCE)


def test_a_prompt_and_its_steps_are_the_cpu_engines(cpu: Engine, engine: Engine, tokens: np.ndarray) -> None:
    both(cpu, engine, SlotStep(0, 0, tokens[:PREFIX], logits_from=PREFIX - 1))
    start = PREFIX
    for count in (1, 8, 3, 1, 20, 7):
        both(cpu, engine, SlotStep(0, start, tokens[start : start + count]))
        start += count


@pytest.mark.parametrize("wanted", [0, 1, 9, 200])
def test_a_step_longer_than_every_profile_takes_several_runs(
    cpu: Engine, engine: Engine, tokens: np.ndarray, wanted: int
) -> None:
    both(cpu, engine, SlotStep(1, 0, tokens[:200], logits_from=200 - wanted))
    both(cpu, engine, SlotStep(1, 200, tokens[200:203]))


def test_ragged_neighbours_share_a_step(cpu: Engine, engine: Engine, tokens: np.ndarray) -> None:
    prompts = [SlotStep(slot, 0, tokens[slot : slot + 9 + slot]) for slot in range(SLOTS)]
    both(cpu, engine, *prompts)
    lone, draft, prompt = (
        SlotStep(slot, 9 + slot, tokens[40 : 40 + n]) for slot, n in ((0, 1), (1, 7), (2, 30))
    )
    both(cpu, engine, prompt, lone, draft)


def test_slots_that_take_no_part_keep_their_keys(cpu: Engine, engine: Engine, tokens: np.ndarray) -> None:
    """Static shapes write rows for every slot: an idle one's must land where no sequence reaches."""
    last = engine.spec.max_seq_len - 2
    both(cpu, engine, SlotStep(0, 0, tokens[:PREFIX]))
    for start in range(0, last, 200):
        step = SlotStep(2, start, np.resize(tokens, last)[start : start + 200])
        both(cpu, engine, dataclasses.replace(step, tokens=step.tokens[: last - start], logits_from=0))
    both(cpu, engine, SlotStep(1, 0, tokens[:30]))
    both(cpu, engine, SlotStep(0, PREFIX, tokens[:5]), SlotStep(2, last, tokens[:2]))


def test_rejected_rows_leave_no_trace(cpu: Engine, engine: Engine, tokens: np.ndarray) -> None:
    both(cpu, engine, SlotStep(0, 0, tokens[:PREFIX]))
    engine.forward([SlotStep(0, PREFIX, tokens[::-1][:8].copy())])
    engine.commit(0, PREFIX, (0, 1))
    both(cpu, engine, SlotStep(0, PREFIX, tokens[PREFIX : PREFIX + 3]))


def test_a_copied_sequence_goes_on(cpu: Engine, engine: Engine, tokens: np.ndarray) -> None:
    both(cpu, engine, SlotStep(2, 0, tokens[:PREFIX]))
    cpu.copy(2, 0, PREFIX)
    engine.copy(2, 0, PREFIX)
    both(cpu, engine, SlotStep(0, PREFIX, tokens[PREFIX : PREFIX + 3]))


def test_exact_engines_have_one_profile(folder: Path) -> None:
    """Two profiles may have different kernels, and with them different last bits of the same row."""
    rows = [(profile.rows, profile.reads) for profile in TensorRtInfo.read(folder).profiles]
    plain, prompt = [(1, "steps")], [(128, "prompt")]
    exact = EngineInfo.read(folder).spec.exact
    assert rows == ([(ROWS, "steps")] if exact else [*plain, (ROWS, "steps"), *prompt])


def test_steps_that_do_not_fit_are_refused(engine: Engine, tokens: np.ndarray) -> None:
    one = tokens[:1]
    for step, words in (
        (SlotStep(SLOTS, 0, one), "slots 0 to 2"),
        (SlotStep(0, 0, tokens[:0]), "a step takes 1 to"),
        (SlotStep(0, engine.spec.max_seq_len, one), "max_seq_len"),
        (SlotStep(0, 0, tokens[:3], np.array([-1, 0, 0])), "chains"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.forward([step])
    with pytest.raises(ValueError, match="once"):
        engine.forward([SlotStep(0, 0, one), SlotStep(0, 0, one)])
    with pytest.raises(ValueError, match="no path of a chain"):
        engine.commit(0, 0, (0, 2))


TREE_ROWS = 40  # two words of the mask


@pytest.fixture(scope="module")
def tree_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorRtEngine]:
    into = tmp_path_factory.mktemp("trees")
    exported(model, into, rows=TREE_ROWS, numerics="fast", max_branches=TREE_ROWS)
    opened = TensorRtEngine(into, runner=ReferenceRunner(into))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tree_cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    """Exact: every branch in memory of its own, where no mask is needed."""
    into = tmp_path_factory.mktemp("cpu-trees")
    request = CompileRequest(
        model, "tiny", {"method": "none"}, max_batch=SLOTS, taps=TAPS, max_branches=TREE_ROWS
    )
    compile_engine(request, into)
    return OnnxRuntimeEngine(into)


def tree_step(slot: int, start: int, rows: int, seed: int) -> SlotStep:
    """A random tree below one token."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(rng.integers(max(0, row - 6), row) for row in range(1, rows))])
    return SlotStep(slot, start, rng.integers(0, 300, rows), parents)


def longest_path(step: SlotStep) -> list[int]:
    tree = TokenTree(tuple(step.tokens.tolist()), tuple(step.parents.tolist()))
    return list(tree.path(int(np.argmax(tree.depths))))


@pytest.mark.parametrize("rows", [2, 3, 9, 31, 32, 33, TREE_ROWS])
def test_a_tree_is_the_cpu_engines_and_what_it_accepts_is_kept(
    tree_cpu: Engine, tree_engine: Engine, tokens: np.ndarray, rows: int
) -> None:
    start = rows  # a prefix that ends anywhere in a block of keys
    both(tree_cpu, tree_engine, SlotStep(0, 0, tokens[:start]))
    for seed in range(3):
        step = tree_step(0, start, rows, seed)
        both(tree_cpu, tree_engine, step)
        kept = longest_path(step)[: rows // 2 + 1]
        for engine in (tree_cpu, tree_engine):
            engine.commit(0, start, kept)
        start += len(kept)
        both(tree_cpu, tree_engine, SlotStep(0, start, tokens[:2]))  # reads what was moved together


def test_trees_chains_and_prompts_share_a_step(
    tree_cpu: Engine, tree_engine: Engine, tokens: np.ndarray
) -> None:
    both(tree_cpu, tree_engine, *(SlotStep(slot, 0, tokens[slot : slot + 9 + slot]) for slot in range(SLOTS)))
    chain = SlotStep(1, 10, tokens[:5])
    prompt = SlotStep(2, 11, tokens[: TREE_ROWS + 30], logits_from=TREE_ROWS + 20)
    both(tree_cpu, tree_engine, prompt, tree_step(0, 9, 12, 7), chain)


def test_a_tree_that_no_run_holds_is_refused(tree_engine: Engine) -> None:
    with pytest.raises(ValueError, match="a tree of 41 rows, at most 40 fit"):
        tree_engine.forward([tree_step(0, 0, TREE_ROWS + 1, 0)])


@pytest.mark.parametrize("trees", [False, True])
def test_an_fp8_cache_is_pytorchs_rounding_of_keys_and_values(
    model: Path, tmp_path: Path, tokens: np.ndarray, trees: bool
) -> None:
    import torch

    from trtspec.quantize.score_torch import load_for_scoring

    scaled, into = with_cache_scales(model, tmp_path / "model", layers=3), tmp_path / "engine"
    into.mkdir()
    branches = {"max_branches": ROWS - 1} if trees else {}
    exported(scaled, into, rows=ROWS, numerics="fast", kv_cache="fp8", **branches)
    engine = TensorRtEngine(into, runner=ReferenceRunner(into))
    with torch.inference_mode():
        rounded = load_for_scoring(scaled, torch.float32)
        expected = rounded(torch.tensor(tokens[None, :40]), use_cache=False).logits[0].numpy()
        plain = load_for_scoring(model, torch.float32)
        unrounded = plain(torch.tensor(tokens[None, :40]), use_cache=False).logits[0].numpy()
    found, start = [], 0
    for count in (17, 1, 8, 14):
        (output,) = engine.forward([SlotStep(1, start, tokens[start : start + count])])
        found.append(output.logits)
        start += count
    worst = np.abs(np.concatenate(found) - expected).max()
    assert worst < 1e-3 < 0.05 < np.abs(unrounded - expected).max()
    codes = engine._cache[:, :, 1, :, :start].numpy()
    assert np.array_equal(codes, codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


BUILT = BuiltPlan("11.4.0.106", "sm_90", "H200", hashlib.sha256(b"plan").hexdigest(), 3)


@pytest.mark.parametrize(
    ("plan", "built", "version", "sm", "words"),
    [
        (b"", None, "11.4.0.106", "sm_90", "no TensorRT plan was built"),
        (b"changed", BUILT, "11.4.0.106", "sm_90", "bytes are not those"),
        (b"plan", BUILT, "11.3.0.99", "sm_90", "for TensorRT 11.4.0.106, here is 11.3.0.99"),
        (b"plan", BUILT, "11.4.0.106", "sm_100", "for GPU sm_90, here is sm_100"),
    ],
)
def test_a_plan_of_another_machine_is_refused_before_it_is_opened(
    plan: bytes, built: BuiltPlan | None, version: str, sm: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match=words) as caught:
        check_plan(tmp_path, plan, built, version, sm)
    assert "trtspec build --resume" in caught.value.hint


def test_the_plan_of_this_machine_passes(tmp_path: Path) -> None:
    check_plan(tmp_path, b"plan", BUILT, "11.4.0.106", "sm_90")


def test_without_tensorrt_opening_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(SetupError, match=r"tensorrt is not installed|NVIDIA GPU"):
        TensorRtEngine(folder)
