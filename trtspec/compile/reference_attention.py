"""The attention plugin in standard ONNX operators: what the TensorRT graph computes, runnable where TensorRT is not.

The functions are added to a copy of the graph, never to the file that TensorRT reads: some parsers prefer a local
function to a plugin of the same name. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtspec.compile.decoder import DecoderSpec
from trtspec.compile.export_onnx import DOMAIN
from trtspec.engines.tensorrt import Tensors
from trtspec.engines.tensorrt_info import GRAPH

if TYPE_CHECKING:
    import onnxruntime


class ReferenceRunner:
    """Runs the TensorRT graph of `folder` in ONNX Runtime, attention replaced by its definition (see `Runner`)."""

    device = "cpu"

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # it warns of every cache that it copies
        path = folder / "reference.onnx"
        path.write_bytes(with_reference_attention(folder / GRAPH, spec).SerializeToString())
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


def with_reference_attention(graph: Path, spec: DecoderSpec) -> onnx.ModelProto:
    """The model at `graph` (its weights still in the file beside it) with its plugin nodes defined as functions."""
    model = onnx.load(graph, load_external_data=False)
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    cache = next(value for value in model.graph.input if value.name == "past_keys.0")
    dtype = cache.type.tensor_type.elem_type
    defined = {
        "SpecVerifyAttention": _attention,
        "SpecVerifySplitAttention": _split_attention,
        "SpecVerifyCombine": _combine,
    }
    for name in sorted({node.op_type for node in model.graph.node if node.domain == DOMAIN}):
        model.functions.append(defined[name](_Body(opset), spec, dtype))
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


_INPUTS = ("q", "k", "v", "kv_len", "q_len")


def _attended(body: _Body, spec: DecoderSpec) -> str:
    """float32 [B,T,H,d] of q [B,T,H,d], k and v [B,K,S,d], kv_len and q_len [B], by definition.

    Row t of a sequence sees keys 0 … kv_len − q_len + t; rows from q_len on are zero.
    """
    op, dim = body.op, spec.head_dim

    def by_group(name: str) -> str:
        """[B, K, 1, S, d], for all query heads of a KV head."""
        return body.unsqueezed(op("Cast", name, to=TensorProto.FLOAT), 2)

    queries = op("Transpose", op("Cast", "q", to=TensorProto.FLOAT), perm=[0, 2, 1, 3])
    folded = body.constant([0, spec.kv_heads, spec.heads // spec.kv_heads, -1, dim])
    queries = op("Mul", op("Reshape", queries, folded), body.constant(dim**-0.5, np.float32))
    scores = op("MatMul", queries, op("Transpose", by_group("k"), perm=[0, 1, 2, 4, 3]))
    rows, valid = body.along("q", 1), body.unsqueezed(op("Cast", "q_len", to=TensorProto.INT64), 1)
    past = op("Sub", body.unsqueezed(op("Cast", "kv_len", to=TensorProto.INT64), 1), valid)
    last = body.unsqueezed(op("Add", past, rows), 1, 2, 4)  # [B, 1, 1, T, 1]
    seen = op("LessOrEqual", body.along("k", 2), last)
    weights = op("Softmax", op("Where", seen, scores, body.constant(-np.inf, np.float32)), axis=-1)
    unfolded = body.constant([0, spec.heads, -1, dim])
    attended = op("Reshape", op("MatMul", weights, by_group("v")), unfolded)
    attended = op("Transpose", attended, perm=[0, 2, 1, 3])
    kept = body.unsqueezed(op("Less", rows, valid), 2, 3)
    return op("Where", kept, attended, body.constant(0, np.float32))


def _attention(body: _Body, spec: DecoderSpec, dtype: int) -> onnx.FunctionProto:
    body.op("Cast", _attended(body, spec), output="out", to=dtype)
    return body.function("SpecVerifyAttention", _INPUTS, ["out"])


def _split_attention(body: _Body, spec: DecoderSpec, dtype: int) -> onnx.FunctionProto:
    """All keys are the first piece's here: how keys are divided is the kernel's business, and what merges is not."""
    attended = _attended(body, spec)
    first = body.op("Equal", body.count(body.attribute("splits")), body.constant(0))
    first = body.unsqueezed(first, 1, 2, 3)
    zero, none = body.constant(0, np.float32), body.constant(-np.inf, np.float32)
    body.op("Where", body.unsqueezed(first, 4), attended, zero, output="partial")
    alike = body.op("ReduceSum", attended, body.constant([3]), keepdims=0)
    lse = body.op("Where", first, zero, none)
    body.op("Expand", lse, body.op("Shape", body.op("Add", lse, alike)), output="lse")
    return body.function("SpecVerifySplitAttention", _INPUTS, ["partial", "lse"], "splits")


def _combine(body: _Body, spec: DecoderSpec, dtype: int) -> onnx.FunctionProto:
    """Σ 2^lse · partial / Σ 2^lse over the pieces."""
    weights = body.op("Softmax", body.op("Mul", "lse", body.constant(np.log(2), np.float32)), axis=0)
    weighted = body.op("Mul", "partial", body.unsqueezed(weights, 4))
    body.op("Cast", body.op("ReduceSum", weighted, body.constant([0]), keepdims=0), output="out", to=dtype)
    return body.function("SpecVerifyCombine", ["partial", "lse"], ["out"], "dtype")
