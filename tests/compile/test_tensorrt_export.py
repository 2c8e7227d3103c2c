"""The graph that TensorRT gets computes what PyTorch computes: run here with its plugin replaced by its definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx.reference import ReferenceEvaluator

from tests.tensorrt_reference import with_cache_scales
from tests.tiny_models import VARIANTS
from trtspec.compile.check import graph_error, torch_logits
from trtspec.compile.decoder import read_decoder
from trtspec.compile.export_tensorrt import Dtype, TensorRtOptions, export_for_tensorrt
from trtspec.compile.reference_attention import ReferenceRunner, with_reference_attention
from trtspec.compile.tensorrt import TensorRtRequest, export_graph
from trtspec.compile.weights import Weights
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import TensorRtInfo
from trtspec.errors import PlanInfeasible, StageFailed

REFUSED = {"mistral": "powers of two", "mistral-window": "sliding window", "qwen2-window": "sliding window"}
FP8_MAX, FP4_MAX = 448.0, 6.0


def exported(model: Path, into: Path, **options: object) -> EngineInfo:
    request = TensorRtRequest(model, "tiny", {"method": "none"}, **{"rows": 8, "arch": "sm_90", **options})
    return export_graph(request, into)


def graph_of(model: Path, into: Path, dtype: Dtype, **options: object) -> Path:
    into.mkdir(exist_ok=True)
    settings = TensorRtOptions(dtype, 64, 96, **options)
    export_for_tensorrt(read_decoder(model), Weights(model), settings, into / "model.onnx")
    return into / "model.onnx"


def prompt_feeds(model: Path, tokens: np.ndarray, dtype: np.dtype) -> dict[str, np.ndarray]:
    """One sequence's first step, all of its logits wanted."""
    spec, rows = read_decoder(model), len(tokens)
    cache = np.zeros((1, spec.kv_heads, 96, spec.head_dim), dtype)
    return {
        "input_ids": tokens[None],
        "position_ids": np.arange(rows)[None],
        "write_starts": np.zeros(1, np.int64),
        "kv_lengths": np.array([rows], np.int32),
        "query_lengths": np.array([rows], np.int32),
        "logit_rows": np.arange(rows),
        **{f"past_{part}.{layer}": cache for layer in range(spec.layers) for part in ("keys", "values")},
    }


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 300, 20)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in REFUSED])
def test_the_graph_equals_pytorch(variant: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    info = exported(tiny_model(variant), tmp_path, splits=3 if variant == "llama" else 1)
    assert info.checks["graph_error"] < 2e-5
    assert sorted(path.name for path in tmp_path.iterdir() if "model" in path.name) == [
        "model.onnx",
        "model.onnx.data",
    ]


@pytest.mark.parametrize(("variant", "words"), REFUSED.items())
def test_what_the_kernel_cannot_do_is_refused_by_name(
    variant: str, words: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(PlanInfeasible, match=words):
        exported(tiny_model(variant), tmp_path)


def test_a_window_longer_than_the_context_is_no_window(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    assert exported(tiny_model("mistral-window"), tmp_path, max_seq_len=16).spec.max_seq_len == 16


def test_no_local_function_can_be_taken_for_the_plugin(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Parsers differ in which of the two wins; a shadowed plugin gives right answers, only slower."""
    model = onnx.load(graph_of(tiny_model("llama"), tmp_path, "bfloat16"), load_external_data=False)
    assert not model.functions
    nodes = [node for node in model.graph.node if node.domain == "trtspec"]
    assert [node.op_type for node in nodes] == ["SpecVerifyAttention"] * 3
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes == {"plugin_namespace": b"trtspec", "plugin_version": b"1", "aot": 1}
    assert {entry.domain for entry in model.opset_import} == {"", "trtspec"}
    onnx.checker.check_model(str(tmp_path / "model.onnx"))


def test_trees_are_another_plugin_with_a_mask(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    graph = onnx.load(
        graph_of(tiny_model("llama"), tmp_path, "bfloat16", splits=2, trees=True), load_external_data=False
    ).graph
    nodes = [node for node in graph.node if node.op_type == "SpecVerifySplitTreeAttention"]
    assert len(nodes) == 3 and {node.input[-1] for node in nodes} == {"tree_mask"}
    (mask,) = [value for value in graph.input if value.name == "tree_mask"]
    assert mask.type.tensor_type.elem_type == onnx.TensorProto.INT32


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
def test_every_plugin_node_is_a_registered_one_with_its_inputs(
    splits: int, trees: bool, kv_cache: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from trtspec_plugins.tensorrt.plugins import PLUGINS

    model = with_cache_scales(tiny_model("llama"), tmp_path / "model", layers=3)
    path = graph_of(model, tmp_path / "graph", "bfloat16", splits=splits, trees=trees, kv_cache=kv_cache)
    graph = onnx.load(path, load_external_data=False).graph
    nodes = [node for node in graph.node if node.domain == "trtspec"]
    shapes = TensorRtInfo("bfloat16", 96, splits, "sm_90", (), trees, kv_cache)
    assert {node.op_type for node in nodes} == set(shapes.plugins)
    for node in nodes:
        plugin = PLUGINS[node.op_type]
        assert (len(node.input), len(node.output)) == (len(plugin.inputs), len(plugin.outputs))
        given = {value.name for value in node.attribute} - {"plugin_namespace", "plugin_version", "aot"}
        assert given == plugin.attributes.keys()
    element = onnx.TensorProto.FLOAT8E4M3FN if kv_cache == "fp8" else onnx.TensorProto.BFLOAT16
    caches = [value for value in (*graph.input, *graph.output) if ".0" in value.name]
    assert len(caches) == 4 and {value.type.tensor_type.elem_type for value in caches} == {element}


def test_caches_are_what_tensorrt_updates_in_place(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """An IKVCacheUpdateLayer's cache must be a network input, its result an output, its length static."""
    graph = onnx.load(graph_of(tiny_model("llama"), tmp_path, "float16"), load_external_data=False).graph
    inputs = {value.name: value.type.tensor_type for value in graph.input}
    outputs = {value.name for value in graph.output}
    updates = [node for node in graph.node if node.op_type == "TensorScatter"]
    assert len(updates) == 6
    for node in updates:
        assert node.output[0] in outputs and node.input[0] == f"past_{node.output[0]}"
        assert inputs[node.input[0]].shape.dim[2].dim_value == 96
        assert inputs[node.input[0]].elem_type == onnx.TensorProto.FLOAT16


def test_the_same_model_gives_the_same_bytes(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = (graph_of(tiny_model("qwen3"), tmp_path / name, "bfloat16") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".onnx.data").read_bytes() == second.with_suffix(".onnx.data").read_bytes()


def quantized(model: Path, into: Path, form: str, without: str | None = None) -> Path:
    """`model` with its projections stored as ModelOpt's FP8 or NVFP4 export stores them. without: a tensor's end."""
    shutil.copytree(model, into)
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight, module = tensors[name], name.removesuffix(".weight")
        if form == "fp8":
            scale = np.float32(np.abs(weight).max() / FP8_MAX)
            tensors[name] = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = np.array(scale, np.float32)
            tensors[f"{module}.input_scale"] = np.array(8 / FP8_MAX, np.float32)
            continue
        blocks = weight.reshape(len(weight), -1, 16)
        second = np.float32(np.abs(weight).max() / (FP4_MAX * FP8_MAX))
        scales = (np.abs(blocks).max(-1) / FP4_MAX / second).astype(ml_dtypes.float8_e4m3fn)
        steps = np.maximum(scales.astype(np.float32)[..., None] * second, 1e-12)
        codes = (blocks / steps).astype(ml_dtypes.float4_e2m1fn).reshape(weight.shape).view(np.uint8)
        tensors[name] = codes[:, 0::2] | codes[:, 1::2] << 4
        tensors[f"{module}.weight_scale"] = scales
        tensors[f"{module}.weight_scale_2"] = np.array(second, np.float32)
        tensors[f"{module}.input_scale"] = np.array(8 / (FP4_MAX * FP8_MAX), np.float32)
    kept = {name: tensor for name, tensor in tensors.items() if not (without and name.endswith(without))}
    safetensors.numpy.save_file(kept, into / "model.safetensors", metadata={"format": "pt"})
    return into


def test_fp8_weights_run_as_qdq(
    tiny_model: Callable[[str], Path], tmp_path: Path, tokens: np.ndarray
) -> None:
    """In float16, which ONNX Runtime runs with 8-bit floats: near the dequantized model, and not equal to it."""
    model = quantized(tiny_model("llama"), tmp_path / "model", "fp8")
    path = graph_of(model, tmp_path / "graph", "float16")
    graph = onnx.load(path, load_external_data=False).graph
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 4 * 3, (
        "q, k and v share one; so do gate and up"
    )
    scales = scales_of(graph)
    assert len(scales) == 2 * 4 * 3 + 7 * 3 and set(scales) == {()}
    found = run_reference(path.parent, model, prompt_feeds(model, tokens, np.float16))
    assert 1e-3 < graph_error(found, torch_logits(model, tokens)) < 0.3


def scales_of(graph: onnx.GraphProto) -> list[tuple[int, ...]]:
    """Shapes of the constants that quantization divides by. Of a whole tensor it is a scalar, and a vector of one is an
    axis of one element, which fits no weight."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    scaled = [node for node in graph.node if "uantize" in node.op_type]
    return [shapes[node.input[1]] for node in scaled if node.input[1] in shapes]


def run_reference(folder: Path, model: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Logits, by way of the runner that the stage's own check uses."""
    import torch

    rows, spec = len(feeds["logit_rows"]), read_decoder(model)
    outputs = {"logits": torch.zeros(rows, spec.vocab_size)}
    runner = ReferenceRunner(folder)
    runner.run(0, {name: torch.from_numpy(array) for name, array in feeds.items()}, outputs)
    runner.close()
    return outputs["logits"].numpy()


def test_nvfp4_weights_are_two_dequantizations(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """ONNX's own evaluator has 4-bit floats: the constants of every projection give back its weight."""
    model = quantized(tiny_model("llama"), tmp_path / "model", "nvfp4")
    path = graph_of(model, tmp_path / "graph", "float16")
    graph, weights = onnx.load(path).graph, Weights(model)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    by_output = {output: node for node in graph.node for output in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul" and "_proj" in node.output[0]]
    assert len(products) == 7 * 3
    for product in products:
        transposed = by_output[product.input[1]]
        values = by_output[transposed.input[0]]
        cast = by_output[values.input[1]]
        scales = by_output[cast.input[0]]
        chain = [scales, cast, values, transposed]
        assert [node.op_type for node in chain] == [
            "DequantizeLinear",
            "Cast",
            "DequantizeLinear",
            "Transpose",
        ]
        names = [name for node in chain for name in node.input if name in constants]
        output = onnx.helper.make_tensor_value_info(transposed.output[0], onnx.TensorProto.FLOAT16, None)
        part = onnx.helper.make_graph(chain, "weight", [], [output], [constants[name] for name in names])
        made = onnx.helper.make_model(part, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11)
        (weight,) = ReferenceEvaluator(made).run(None, {})
        name = product.output[0].removesuffix(".out") + ".weight"
        np.testing.assert_allclose(weight.T.astype(np.float32), weights.dense(name), rtol=2e-3, atol=1e-6)


def test_nvfp4_inputs_are_quantized_in_the_graph(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As ModelOpt's exporter says it: an operator of TensorRT's own, its scale the tensor's, in blocks of 16."""
    model = quantized(tiny_model("llama"), tmp_path / "model", "nvfp4")
    loaded = onnx.load(graph_of(model, tmp_path / "graph", "bfloat16"), load_external_data=False)
    dynamic = [node for node in loaded.graph.node if node.op_type == "TRT_FP4DynamicQuantize"]
    assert len(dynamic) == 4 * 3
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in dynamic[0].attribute}
    assert attributes == {"axis": -1, "block_size": 16, "scale_type": onnx.TensorProto.FLOAT8E4M3FN}
    assert {entry.domain for entry in loaded.opset_import} == {"", "trt", "trtspec"}
    assert set(scales_of(loaded.graph)) == {()}, "of the input and of the scales of its blocks"


def test_a_quantized_checkpoint_passes_the_stages_check(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "engine").mkdir()
    model = quantized(tiny_model("llama"), tmp_path / "model", "nvfp4")
    info = exported(model, tmp_path / "engine")
    assert info.checks["graph_error"] < 2e-5
    assert info.weights == "22 projections: 21 NVFP4, 1 bfloat16"
    assert TensorRtInfo.read(tmp_path / "engine").dtype == "bfloat16", (
        "float16 has not a float32 model's range"
    )


def test_formats_without_qdq_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = quantized(
        tiny_model("llama"), tmp_path / "model", "fp8", without="layers.0.mlp.down_proj.input_scale"
    )
    with pytest.raises(PlanInfeasible, match=r"down_proj .* stored as fp8, 16-bit inputs"):
        graph_of(model, tmp_path / "graph", "bfloat16")


def test_a_graph_that_computes_something_else_is_not_published(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    spec = read_decoder(model)
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("trtspec.compile.decoder.read_decoder", lambda folder: spec)
    (tmp_path / "engine").mkdir()
    with pytest.raises(StageFailed, match="graph_error"):
        exported(model, tmp_path / "engine")


def test_the_reference_leaves_the_file_alone(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = graph_of(tiny_model("llama"), tmp_path, "float32", splits=2)
    before = path.read_bytes()
    names = [f.name for f in with_reference_attention(path).functions]
    assert names == ["SpecVerifyCombine", "SpecVerifySplitAttention"]
    assert path.read_bytes() == before
