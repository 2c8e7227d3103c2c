"""The attention plugin in standard ONNX operators: what the TensorRT graph computes, runnable where TensorRT is not.

The functions are added to a copy of the graph, never to the file that TensorRT reads: some parsers prefer a local
function to a plugin of the same name. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtspec.compile.export_onnx import DOMAIN
from trtspec.engines.tensorrt import Tensors
from trtspec.engines.tensorrt_info import APPEND, COMBINE, GRAPH

if TYPE_CHECKING:
    import onnxruntime

_E4M3_MAX = 448


class ReferenceRunner:
    """Runs the TensorRT graph of `folder` in ONNX Runtime, attention replaced by its definition (see `Runner`)."""

    device = "cpu"

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # it warns of every cache that it copies
        path = folder / "reference.onnx"
        path.write_bytes(with_reference_attention(folder / GRAPH).SerializeToString())
        try:
            self._session: onnxruntime.InferenceSession | None = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        finally:
            path.unlink()

    def run(self, profile: int, inputs: Tensors, outputs: Tensors) -> None:
        """See `Runner.run`."""
        import torch

        names = list(outputs)
        feeds = {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}
        for name, array in zip(names, self._session.run(names, feeds), strict=True):
            outputs[name].copy_(torch.from_numpy(array))

    def close(self) -> None:
        """See `Runner.close`."""
        self._session = None


class _Cache(NamedTuple):
    """What a layer's cache [B, KV heads, capacity, head_dim] is; dtype: ONNX's number of it."""

    kv_heads: int
    head_dim: int
    dtype: int


def with_reference_attention(graph: Path) -> onnx.ModelProto:
    """The model at `graph` (its weights still in the file beside it) with its plugin nodes defined as functions."""
    model = onnx.load(graph, load_external_data=False)
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    plugins = sorted({node.op_type for node in model.graph.node if node.domain == DOMAIN})
    if not plugins:
        return model
    keys = next(value for value in model.graph.input if value.name == "past_keys.0").type.tensor_type
    cache = _Cache(keys.shape.dim[1].dim_value, keys.shape.dim[3].dim_value, keys.elem_type)
    for name in plugins:
        body = _Body(opset)
        if name == COMBINE:
            function = _combine(body, cache)
        elif name == APPEND:
            function = _append(body, cache)
        else:
            define = _split_attention if "Split" in name else _attention
            function = define(body, name, cache)
        model.functions.append(function)
    return model


class _Body:
    """Collects the nodes of a function."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: object) -> str:
        output = output or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, values: object, dtype: type = np.int64) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.array(values, dtype)))

    def attribute(self, name: str) -> str:
        """The node's integer attribute as a tensor."""
        output = self.op("Constant")
        reference = onnx.AttributeProto(name="value_int", ref_attr_name=name, type=onnx.AttributeProto.INT)
        self._nodes[-1].attribute.append(reference)
        return output

    def count(self, size: str) -> str:
        """The numbers 0, 1, … below a scalar, int64."""
        return self.op("Range", self.constant(0), size, self.constant(1))

    def along(self, tensor: str, axis: int) -> str:
        """The numbers of a tensor's places along an axis."""
        return self.count(self.op("Squeeze", self.op("Shape", tensor, start=axis, end=axis + 1)))

    def unsqueezed(self, tensor: str, *axes: int) -> str:
        return self.op("Unsqueeze", tensor, self.constant(axes))

    def function(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], *own: str
    ) -> onnx.FunctionProto:
        attributes = ["plugin_namespace", "plugin_version", "aot", *own]
        opsets = [helper.make_opsetid("", self._opset)]
        return helper.make_function(DOMAIN, name, inputs, outputs, self._nodes, opsets, attributes)


def _inputs(name: str) -> tuple[str, ...]:
    """Of an attention plugin, in order."""
    if "Int4" in name:
        halves = ("upper",) if "Draft" in name else ("upper", "lower")
        planes = [f"{x}_{part}" for x in "kv" for part in (*halves, "scale", "zero")]
        return ("q", *planes, "k", "v", "quant_len", "kv_len", "q_len")
    scales = ["k_scale", "v_scale"] if "Fp8" in name else []
    return ("q", "k", "v", "kv_len", "q_len", *["mask"] * ("Tree" in name), *scales)


def _attended(body: _Body, plugin: str, cache: _Cache) -> str:
    """float32 [B,T,H,d] of q [B,T,H,d], k and v [B,K,S,d], kv_len and q_len [B], by definition.

    Row t of a sequence sees the keys before the step, kv_len − q_len of them, and of the step's rows those up to t, or
    those its mask has a bit for; of a hierarchical cache the quantized ones too. Rows from q_len on are zero.
    """
    op, dim = body.op, cache.head_dim

    def by_group(name: str) -> str:
        """[B, K, 1, S, d], for all query heads of a KV head."""
        elements = op("Cast", name, to=TensorProto.FLOAT)
        if "Fp8" in plugin:
            elements = op("Mul", elements, body.unsqueezed(f"{name}_scale", 1, 2))
        if "Int4" in plugin:
            elements = op("Concat", _dequantized(body, name, both="Draft" not in plugin), elements, axis=2)
        return body.unsqueezed(elements, 2)

    queries = op("Mul", op("Cast", "q", to=TensorProto.FLOAT), body.constant(dim**-0.5, np.float32))
    queries = op("Reshape", queries, body.constant([0, 0, cache.kv_heads, -1, dim]))
    queries = op("Transpose", queries, perm=[0, 2, 3, 1, 4])  # [B, K, G, T, d]
    scores = op("MatMul", queries, op("Transpose", by_group("k"), perm=[0, 1, 2, 4, 3]))
    rows, valid = body.along("q", 1), body.unsqueezed(op("Cast", "q_len", to=TensorProto.INT64), 1)
    past = op("Sub", body.unsqueezed(op("Cast", "kv_len", to=TensorProto.INT64), 1), valid)
    row = op("Sub", body.along("k", 2), past)  # [B, S]: of the step's, negative before it
    if "Int4" in plugin:
        row = op("Concat", _quantized_row(body), row, axis=1)
    if "Tree" in plugin:
        seen = body.unsqueezed(_tree_visible(body, row, valid), 1, 2)
    else:
        seen = op("LessOrEqual", body.unsqueezed(row, 1, 2, 3), body.unsqueezed(rows, 1))
    weights = op("Softmax", op("Where", seen, scores, body.constant(-np.inf, np.float32)), axis=-1)
    attended = op("Transpose", op("MatMul", weights, by_group("v")), perm=[0, 3, 1, 2, 4])
    attended = op("Reshape", attended, body.constant([0, 0, -1, dim]))
    kept = body.unsqueezed(op("Less", rows, valid), 2, 3)
    return op("Where", kept, attended, body.constant(0, np.float32))


def _tree_visible(body: _Body, row: str, valid: str) -> str:
    """bool [B,T,S]: which keys each row sees. row [B,S]: of the step's; valid [B,1]: how many those are."""
    op = body.op
    powers = body.constant([1 << bit for bit in range(32)])
    words = op("Mod", op("Cast", "mask", to=TensorProto.INT64), body.constant(1 << 32))  # as if unsigned
    bits = op("Mod", op("Div", body.unsqueezed(words, 3), powers), body.constant(2))
    bits = op("Reshape", bits, body.constant([0, 0, -1]))  # [B, T, 32 · words]
    row, valid = body.unsqueezed(row, 1), body.unsqueezed(valid, 1)
    is_bits = op("Equal", row, body.unsqueezed(body.along(bits, 2), 1))  # [B, 32 · words, S]: key s is row j
    is_bits = op("And", is_bits, op("Less", row, valid))
    marked = op("MatMul", *(op("Cast", part, to=TensorProto.FLOAT) for part in (bits, is_bits)))
    return op("Or", op("Cast", marked, to=TensorProto.BOOL), op("Less", row, body.constant(0)))


def _dequantized(body: _Body, name: str, both: bool) -> str:
    """float32 [B,K,S,d] of the quantized keys or values. both: halves of a code, or the upper one alone."""
    op = body.op

    def codes(half: str) -> str:
        first = op("BitwiseAnd", f"{name}_{half}", body.constant(15, np.uint8))
        second = op("BitShift", f"{name}_{half}", body.constant(4, np.uint8), direction="RIGHT")
        return op("Cast", op("Concat", first, second, axis=-1), to=TensorProto.FLOAT)

    elements = op("Mul", codes("upper"), body.constant(16, np.float32))
    if both:
        elements = op("Add", elements, op("Sub", codes("lower"), body.constant(8, np.float32)))
    scale, zero = (op("Cast", f"{name}_{part}", to=TensorProto.FLOAT) for part in ("scale", "zero"))
    if name == "k":  # one for a channel of a group: [B, K, groups, 1, d]
        shape = op("Shape", elements)
        by_group = op(
            "Concat", op("Shape", scale, end=3), body.constant([-1]), op("Shape", scale, start=3), axis=0
        )
        elements = op("Reshape", elements, by_group)
        elements = op("Mul", elements, body.unsqueezed(scale, 3))
        return op("Reshape", op("Add", elements, body.unsqueezed(zero, 3)), shape)
    return op("Add", op("Mul", elements, body.unsqueezed(scale, 3)), body.unsqueezed(zero, 3))


def _quantized_row(body: _Body) -> str:
    """int64 [B,S]: −1, before the step, for a quantized key and past all rows for a place that holds none."""
    places = body.along("k_upper", 2)
    count = body.unsqueezed(body.op("Cast", "quant_len", to=TensorProto.INT64), 1)
    return body.op("Where", body.op("Less", places, count), body.constant(-1), body.constant(1 << 32))


def _attention(body: _Body, name: str, cache: _Cache) -> onnx.FunctionProto:
    body.op("Cast", _attended(body, name, cache), output="out", to=cache.dtype)
    return body.function(name, _inputs(name), ["out"])


def _split_attention(body: _Body, name: str, cache: _Cache) -> onnx.FunctionProto:
    """All keys are the first piece's here: how keys are divided is the kernel's business, and what merges is not."""
    attended = _attended(body, name, cache)
    first = body.op("Equal", body.count(body.attribute("splits")), body.constant(0))
    first = body.unsqueezed(first, 1, 2, 3)
    zero, none = body.constant(0, np.float32), body.constant(-np.inf, np.float32)
    body.op("Where", body.unsqueezed(first, 4), attended, zero, output="partial")
    alike = body.op("ReduceSum", attended, body.constant([3]), keepdims=0)
    lse = body.op("Where", first, zero, none)
    body.op("Expand", lse, body.op("Shape", body.op("Add", lse, alike)), output="lse")
    return body.function(name, _inputs(name), ["partial", "lse"], "splits")


def _combine(body: _Body, cache: _Cache) -> onnx.FunctionProto:
    """Σ 2^lse · partial / Σ 2^lse over the pieces."""
    weights = body.op("Softmax", body.op("Mul", "lse", body.constant(np.log(2), np.float32)), axis=0)
    weighted = body.op("Mul", "partial", body.unsqueezed(weights, 4))
    body.op(
        "Cast", body.op("ReduceSum", weighted, body.constant([0]), keepdims=0), output="out", to=cache.dtype
    )
    return body.function(COMBINE, ["partial", "lse"], ["out"], "dtype")


def _append(body: _Body, cache: _Cache) -> onnx.FunctionProto:
    """The step's rows divided by their scales, rounded to e4m3 and written from `start` on."""
    op = body.op
    most, least = body.constant(_E4M3_MAX, np.float32), body.constant(-_E4M3_MAX, np.float32)
    starts = op("Cast", "start", to=TensorProto.INT64)
    for name in "kv":
        rows = op("Cast", f"{name}_new", to=TensorProto.FLOAT)
        rows = op("Clip", op("Div", rows, body.unsqueezed(f"{name}_scale", 1)), least, most)
        rows = op("Cast", op("Cast", rows, to=TensorProto.FLOAT8E4M3FN), to=cache.dtype)
        rows = op("Transpose", rows, perm=[0, 2, 1, 3])
        op("TensorScatter", name, rows, starts, output=f"{name}_out", axis=2, mode="linear")
    inputs = ["k_new", "v_new", "k", "v", "start", "q_len", "k_scale", "v_scale"]
    return body.function(APPEND, inputs, ["k_out", "v_out"])
