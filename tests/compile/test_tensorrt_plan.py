"""Building a plan, as far as it can be followed without TensorRT: what is asked of it, what is kept, what is said.

One test holds every name used of TensorRT against the real compiled bindings of two versions: they load over a
library of stubs, which has the few C functions they link and nothing behind them.
"""

from __future__ import annotations

import ast
import enum
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import onnx
import pytest

from tests.plugins.tensorrt_host import VARIABLE, version_of, wheels
from tests.tensorrt_reference import with_cache_scales
from tests.tiny_heads import tiny_head
from tests.tiny_parallel_heads import dflash_head, hydra_head
from trtspec.checkpoints.head_layouts import dflash, hydra, mtp
from trtspec.compile import tensorrt as stage
from trtspec.compile.heads import HeadRequest, compile_head
from trtspec.compile.tensorrt import TensorRtRequest, build_plan, export_graph
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import TensorRtInfo
from trtspec.errors import SetupError, StageFailed
from trtspec.events import Note

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """A stand-in for TensorRT's builder: notes what it is told, and answers as the real one would."""

    def __init__(self, version: str = "11.4.0.106") -> None:
        self.version, self.errors, self.cache_fits = version, [], True
        self.shapes: list[dict[str, tuple[int, ...]]] = []
        self.flags: int | None = None
        self.preview: tuple[str, bool] | None = None
        self.given_cache: bytes | None = None
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.layers = [f"model.layers.{i}.self_attn.attended" for i in range(3)]

    def parse(self, path: str) -> bool:
        graph = onnx.load(path, load_external_data=False).graph
        types = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
        self.inputs = {
            name: tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)
            for name, dims in types.items()
        }
        return not self.errors

    def module(self) -> ModuleType:
        outer, trt = self, ModuleType("tensorrt")

        class Severity(enum.IntEnum):
            ERROR, WARNING = 1, 2

        class ILogger:
            pass

        class Profile(dict):
            def set_shape(self, name, *shapes):
                assert len(set(shapes)) == 1, "static: minimum, optimum and maximum are one shape"
                self[name] = shapes[0]

        class Config:
            profiling_verbosity = None

            def set_memory_pool_limit(self, *_): ...

            def set_preview_feature(self, feature, on):
                outer.preview = (feature, on)

            def create_timing_cache(self, content):
                outer.given_cache = content
                return SimpleNamespace(serialize=lambda: b"measured")

            def set_timing_cache(self, cache, ignore_mismatch):
                fits, outer.cache_fits = outer.cache_fits, True
                return fits

            def add_optimization_profile(self, profile):
                outer.shapes.append(dict(profile))

        class Network:
            num_inputs = property(lambda self: len(outer.inputs))

            def get_input(self, index):
                name, shape = list(outer.inputs.items())[index]
                return SimpleNamespace(name=name, shape=shape)

        class Builder:
            def __init__(self, logger): ...

            def create_network(self, flags):
                outer.flags = flags
                return Network()

            def create_builder_config(self):
                return Config()

            def create_optimization_profile(self):
                return Profile()

            def build_serialized_network(self, network, config):
                return b"a plan"

        listed = json.dumps({"Layers": [{"Name": name} for name in outer.layers]})
        inspector = SimpleNamespace(get_engine_information=lambda form: listed)
        engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
        ILogger.Severity = Severity
        trt.__version__, trt.ILogger, trt.Builder = outer.version, ILogger, Builder
        trt.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1, PREFER_AOT_PYTHON_PLUGINS=3)
        trt.ProfilingVerbosity, trt.MemoryPoolType = SimpleNamespace(DETAILED=1), SimpleNamespace(WORKSPACE=0)
        trt.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased")
        trt.LayerInformationFormat = SimpleNamespace(JSON=1)
        trt.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
        trt.OnnxParser = lambda network, logger: SimpleNamespace(
            parse_from_file=outer.parse,
            num_errors=len(outer.errors),
            get_error=outer.errors.__getitem__,
        )
        return trt


@pytest.fixture(scope="module")
def graph(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("graph")
    request = TensorRtRequest(
        tiny_model("llama"), "tiny", {}, rows=8, arch="sm_90", max_batch=3, numerics="fast", max_seq_len=128
    )
    export_graph(request, into)
    return into


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    cuda = SimpleNamespace(get_device_capability=lambda: (9, 0), get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setattr(
        "trtspec.engines.tensorrt.modules", lambda: (made.module(), SimpleNamespace(cuda=cuda))
    )
    monkeypatch.setattr(stage._Builder, "_register_plugins", lambda self: None)
    return made


def test_each_profile_has_one_shape_for_every_input(graph: Path, recorder: Recorder, tmp_path: Path) -> None:
    build_plan(graph, tmp_path, tmp_path / "timing")
    assert recorder.flags == 1 << 1 | 1 << 3, "strongly typed, plugins ahead of time"
    for shapes, (batch, rows, logits) in zip(
        recorder.shapes, [(3, 1, 3), (3, 8, 24), (1, 128, 1)], strict=True
    ):
        assert shapes.keys() == recorder.inputs.keys()
        assert shapes["input_ids"] == shapes["position_ids"] == (batch, rows)
        assert shapes["logit_rows"] == (logits,) and shapes["kv_lengths"] == (batch,)
        assert shapes["past_values.2"] == (batch, 2, 128 + 128, 16)


def test_the_engine_folder_says_what_the_plan_is_bound_to(
    graph: Path, recorder: Recorder, tmp_path: Path
) -> None:
    build_plan(graph, tmp_path, tmp_path / "cache" / "timing")
    built = TensorRtInfo.read(tmp_path).built
    assert (built.version, built.sm, built.device, built.attention_layers) == (
        "11.4.0.106",
        "sm_90",
        "NVIDIA H200",
        3,
    )
    assert (tmp_path / "model.plan").read_bytes() == b"a plan"
    assert (tmp_path / "engine.json").read_bytes() == (graph / "engine.json").read_bytes()
    assert not list(tmp_path.glob("model.onnx*")), "the plan has the weights"
    assert TensorRtInfo.read(graph).built is None


def test_a_heads_graphs_become_plans_beside_the_targets(
    tiny_model: Callable[[str], Path], recorder: Recorder, tmp_path: Path
) -> None:
    target, graph, into = tiny_model("llama"), tmp_path / "graph", tmp_path / "engine"
    mtp.write_head(tiny_head("mtp", num_hidden_layers=2), tmp_path / "head")
    graph.mkdir()
    into.mkdir()
    request = TensorRtRequest(
        target, "tiny", {}, rows=40, arch="sm_90", max_batch=3, max_branches=39, numerics="fast", taps=(2,)
    )
    export_graph(request, graph)
    compile_head(HeadRequest("mtp", tmp_path / "head", target, 4), graph)
    build_plan(graph, into, tmp_path / "timing")
    found = sorted(path.relative_to(into).parent.as_posix() for path in into.rglob("model.plan"))
    assert found == [".", "head", "head/module-1"]
    assert (into / "head" / "head.json").is_file() and not list(into.rglob("*.onnx*"))
    for part in found:
        assert TensorRtInfo.read(into / part).built.sm == "sm_90" and EngineInfo.read(into / part).layers
    assert len(recorder.shapes) == 3 * 3
    verify, prompt = recorder.shapes[-2:]
    assert verify["captured"] == verify["recycled"] == (3, 40, 64) and verify["is_recycled"] == (3, 40, 1)
    assert verify["tree_mask"] == (3, 40, 2) and prompt["tree_mask"] == (1, 128, 4)
    assert prompt["captured"] == (1, 128, 64) and prompt["past_keys.0"][0] == 1


def test_a_graph_over_rows_becomes_a_plan_without_plugins(
    tiny_model: Callable[[str], Path],
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no attention to look for in the plan, and needs no kernel."""
    registered: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        stage._Builder, "_register_plugins", lambda self: registered.append(self._shapes.plugins)
    )
    target, graph, into = tiny_model("llama"), tmp_path / "graph", tmp_path / "engine"
    hydra.write_head(hydra_head(heads=2), tmp_path / "head")
    graph.mkdir()
    into.mkdir()
    request = TensorRtRequest(
        target, "tiny", {}, rows=8, arch="sm_90", max_batch=3, max_branches=7, numerics="fast", taps=(2,)
    )
    export_graph(request, graph)
    compile_head(HeadRequest("hydra", tmp_path / "head", target, 7), graph)
    events: list[object] = []
    recorder.layers = ["model.layers.0.self_attn.attended"] * 3
    build_plan(graph, into, tmp_path / "timing", events.append)
    found = sorted(path.relative_to(into).parent.as_posix() for path in into.rglob("model.plan"))
    assert found == [".", "head/hydra.0", "head/hydra.1"]
    assert registered == [("SpecVerifyTreeAttention",), (), ()]
    assert recorder.shapes[-2:] == [
        {"hidden": (21, 64), "embedded": (21, 64)},
        {"hidden": (21, 64), "embedded": (21, 128)},
    ]
    assert (into / "head" / "embedding.safetensors").is_file()
    assert not [event for event in events if isinstance(event, Note)]


def test_a_block_and_its_context_become_two_plans(
    tiny_model: Callable[[str], Path], recorder: Recorder, tmp_path: Path
) -> None:
    target, graph, into = tiny_model("llama"), tmp_path / "graph", tmp_path / "engine"
    dflash.write_head(dflash_head(block_size=40), tmp_path / "head")
    graph.mkdir()
    into.mkdir()
    taps = (0, 2)
    request = TensorRtRequest(
        target, "tiny", {}, rows=8, arch="sm_90", max_batch=3, numerics="fast", max_seq_len=128, taps=taps
    )
    export_graph(request, graph)
    compile_head(HeadRequest("dflash", tmp_path / "head", target, 7), graph)
    build_plan(graph, into, tmp_path / "timing")
    found = sorted(path.relative_to(into).parent.as_posix() for path in into.rglob("model.plan"))
    assert found == [".", "head/block", "head/context"]
    block, steps, prompt = recorder.shapes[-3:]
    cache = (2, 128 + 128, 16)
    assert block["input_ids"] == block["position_ids"] == (3, 40) and block["tree_mask"] == (3, 40, 2)
    assert steps["captured"] == (3, 8, 128) and prompt["captured"] == (1, 128, 128)
    assert steps["position_ids"] == (3, 8) and prompt["write_starts"] == (1,)
    assert block["past_keys.1"] == steps["past_keys.1"] == (3, *cache) and prompt["past_keys.1"] == (
        1,
        *cache,
    )
    assert {"kv_lengths", "input_ids"}.isdisjoint(steps) and "logit_rows" not in block


@pytest.mark.parametrize("bits", [8, 4])
def test_a_hierarchical_cache_is_read_by_another_plugin(
    tiny_model: Callable[[str], Path], recorder: Recorder, tmp_path: Path, bits: int
) -> None:
    from trtspec_plugins.tensorrt.plugins import PLUGINS

    graph, into = tmp_path / "graph", tmp_path / "engine"
    graph.mkdir()
    into.mkdir()
    request = TensorRtRequest(
        tiny_model("llama"),
        "tiny",
        {},
        rows=8,
        arch="sm_90",
        max_batch=3,
        max_seq_len=160,
        kv_group=64,
        kv_bits=bits,
    )
    export_graph(request, graph)
    (name,) = TensorRtInfo.read(graph).plugins
    nodes = [
        n
        for n in onnx.load(graph / "model.onnx", load_external_data=False).graph.node
        if n.domain == "trtspec"
    ]
    assert [node.op_type for node in nodes] == [name] * 3
    assert {len(node.input) for node in nodes} == {len(PLUGINS[name].inputs)}
    build_plan(graph, into, tmp_path / "timing")
    (shapes,) = recorder.shapes
    assert shapes["past_keys.2"] == (3, 2, 2 * 64 + 8, 16), "the newest rows and a step's own"
    assert shapes["key_upper.0"] == (3, 2, 192, 8) and ("key_lower.0" in shapes) == (bits == 8)
    assert shapes["key_scales.0"] == (3, 2, 3, 16) and shapes["value_zeros.0"] == (3, 2, 192)
    assert shapes["quantized_lengths"] == (3,)


def test_an_fp8_cache_is_written_in_place_by_a_plugin(
    tiny_model: Callable[[str], Path], recorder: Recorder, tmp_path: Path
) -> None:
    """TensorRT has to be told that outputs of plugins may be their inputs' memory."""
    model = with_cache_scales(tiny_model("llama"), tmp_path / "model", layers=3)
    for kv_cache, expected in (("auto", None), ("fp8", ("aliased", True))):
        graph, into = tmp_path / f"{kv_cache}-graph", tmp_path / kv_cache
        graph.mkdir()
        into.mkdir()
        export_graph(TensorRtRequest(model, "tiny", {}, rows=8, arch="sm_90", kv_cache=kv_cache), graph)
        build_plan(graph, into, tmp_path / "timing")
        assert recorder.preview == expected
        assert TensorRtInfo.read(into).cache_dtype == ("uint8" if expected else "bfloat16")


def test_measurements_are_kept_for_the_next_build(graph: Path, recorder: Recorder, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}").mkdir()
        build_plan(graph, tmp_path / f"{number}", tmp_path / "timing")
    assert recorder.given_cache == b"measured"
    recorder.cache_fits = False
    (tmp_path / "3").mkdir()
    build_plan(graph, tmp_path / "3", tmp_path / "timing")
    assert recorder.given_cache == b"", "another GPU's measurements are started anew"


def test_a_refused_graph_is_told_in_tensorrts_words(graph: Path, recorder: Recorder, tmp_path: Path) -> None:
    recorder.errors = ["In node 7: Unsupported operator TensorScatter"]
    with pytest.raises(StageFailed, match="Unsupported operator TensorScatter"):
        build_plan(graph, tmp_path, tmp_path / "timing")
    assert not (tmp_path / "model.plan").exists()


def test_a_plan_without_the_plugin_is_told(graph: Path, recorder: Recorder, tmp_path: Path) -> None:
    """It would be right, and slower: nothing else would show it."""
    recorder.layers = ["fused everything"]
    events: list[object] = []
    build_plan(graph, tmp_path, tmp_path / "timing", events.append)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == ["0 of 3 attention layers of the plan are named as the plugin's: see model.layers.json"]


def test_an_old_tensorrt_is_refused(graph: Path, recorder: Recorder, tmp_path: Path) -> None:
    recorder.version = "10.13.3.9"
    with pytest.raises(
        SetupError, match=r"10\.13\.3\.9 has no in-place KV cache update; 10\.15 is the first"
    ):
        build_plan(graph, tmp_path, tmp_path / "timing")


@pytest.mark.parametrize(
    ("asked", "fits"), [(None, True), ("11", True), ("11.4", True), ("11.40", False), ("10.16", False)]
)
def test_the_version_a_config_asks_for_is_kept(
    graph: Path, recorder: Recorder, tmp_path: Path, asked: str | None, fits: bool
) -> None:
    if fits:
        build_plan(graph, tmp_path, tmp_path / "timing", version=asked)
        return
    with pytest.raises(SetupError, match=r"TensorRT 11\.4\.0\.106 is installed"):
        build_plan(graph, tmp_path, tmp_path / "timing", version=asked)


def test_a_machine_that_lacks_something_is_told_all_of_it() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    assert stage.lacking() == "tensorrt and an NVIDIA GPU driver"


# What a local name in the sources is of TensorRT's.
CLASSES = {
    "trtspec/compile/tensorrt.py": {
        "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser", "config": "IBuilderConfig",
        "cache": "ITimingCache", "made": "IOptimizationProfile", "tensor": "ITensor", "runtime": "Runtime",
        "engine": "ICudaEngine", "inspector": "EngineInspector",
    },
    "trtspec/engines/tensorrt.py": {"context": "IExecutionContext", "_engine": "ICudaEngine", "_runtime": "Runtime"},
}  # fmt: skip
STUBS = """
createInferBuilder_INTERNAL createInferRefitter_INTERNAL createInferRuntime_INTERNAL getPluginRegistry
createNvOnnxParserRefitter_INTERNAL createNvOnnxParser_INTERNAL getBuilderPluginRegistry getNvOnnxParserVersion
initLibNvInferPlugins
"""
LIST = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); import tensorrt_bindings.tensorrt as trt; "
    "print(json.dumps({name: dir(getattr(trt, name)) for name in dir(trt)}))"
)


def used_names(source: Path, classes: dict[str, str]) -> set[tuple[str, str]]:
    """(class or enumeration, member) that a source uses; the member is empty for `trt.Name` alone."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if ast.unparse(owner) in ("trt", "self._trt") and not node.attr.startswith("__"):
            found.add((node.attr, ""))
        member = isinstance(owner, ast.Attribute) and ast.unparse(owner.value) in ("trt", "self._trt")
        if member and not owner.attr.startswith("__"):
            found.add((owner.attr, node.attr))
        name = (
            owner.id
            if isinstance(owner, ast.Name)
            else owner.attr
            if isinstance(owner, ast.Attribute)
            else ""
        )
        if name in classes:
            found.add((classes[name], node.attr))
    return found


@pytest.mark.parametrize("wheel", wheels() or [None], ids=lambda w: version_of(w) if w else "none")
def test_every_name_exists_in_the_real_bindings(wheel: Path | None, tmp_path: Path) -> None:
    if wheel is None:
        pytest.skip(
            f"no bindings wheels: ${VARIABLE} names no folder of them (see tests/plugins/tensorrt_host.py)"
        )
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler: the bindings cannot be loaded")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "stub.c").write_text(
        "".join(f"void *{name}(void) {{ return 0; }}\n" for name in STUBS.split())
    )
    major = version_of(wheel).split(".")[0]
    for library in ("nvinfer", "nvonnxparser", "nvinfer_plugin"):
        target = tmp_path / f"lib{library}.so.{major}"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", str(target), str(tmp_path / "stub.c")], check=True
        )
    command = [sys.executable, "-c", LIST, str(tmp_path)]
    ran = subprocess.run(
        command, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    members = json.loads(ran.stdout)
    for source, classes in CLASSES.items():
        used = used_names(ROOT / source, classes)
        assert len(used) > 4
        missing = [f"{owner}.{name}" for owner, name in used if name not in ("", *members.get(owner, ()))]
        missing += [owner for owner, name in used if not name and owner not in members]
        assert not missing, f"TensorRT {version_of(wheel)} has no {', '.join(sorted(missing))}"
