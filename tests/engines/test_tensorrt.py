"""The TensorRT adapter, its graph run by definition in ONNX Runtime: steps, slots and KV are as the CPU engine has
them. (What needs a plan and a GPU is not tested here.)"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.decoder import read_decoder
from trtspec.compile.export_tensorrt import TensorRtOptions, export_for_tensorrt
from trtspec.compile.reference_attention import ReferenceRunner
from trtspec.compile.tensorrt import TensorRtRequest, export_graph
from trtspec.compile.weights import Weights
from trtspec.engines.base import Engine, SlotStep
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.engines.tensorrt import TensorRtEngine, check_plan
from trtspec.engines.tensorrt_info import BuiltPlan, TensorRtInfo
from trtspec.errors import SetupError

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
    """What a build leaves, with the graph in float32: ONNX Runtime has no bfloat16 kernels on a CPU."""
    into = tmp_path_factory.mktemp(request.param)
    request = TensorRtRequest(
        model, "tiny", {"method": "none"}, rows=ROWS, arch="sm_90", splits=2, max_batch=SLOTS,
        numerics=request.param, taps=TAPS,
    )  # fmt: skip
    export_graph(request, into)
    shapes = dataclasses.replace(TensorRtInfo.read(into), dtype="float32")
    shapes.write(into)
    options = TensorRtOptions("float32", 256, shapes.capacity, shapes.splits, TAPS)
    export_for_tensorrt(read_decoder(model), Weights(model), options, into / "model.onnx")
    return into


@pytest.fixture
def engine(folder: Path, model: Path) -> Iterator[TensorRtEngine]:
    opened = TensorRtEngine(folder, runner=ReferenceRunner(folder, read_decoder(model)))
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
