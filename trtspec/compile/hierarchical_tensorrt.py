"""The graph for TensorRT over QuantSpec's hierarchical KV cache (engines/hierarchical_device_kv.py).

`past_keys.i`, `past_values.i` and what they become hold the newest rows alone, and write_starts and kv_lengths count
from the first of those. Attention is another plugin of ours, which reads the quantized rows before them as they are:

    quantized_lengths [B] int32            rows read in quantized form, a multiple of G
    key_upper.i, value_upper.i             [B, KV heads, S, head_dim/2] uint8
    key_lower.i, value_lower.i             the same; only in the target's graph
    key_scales.i, key_zeros.i              [B, KV heads, S/G, head_dim] in the graph's dtype
    value_scales.i, value_zeros.i          [B, KV heads, S]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from trtspec.compile.decoder import DecoderSpec
from trtspec.compile.export_onnx import DOMAIN
from trtspec.compile.export_tensorrt import (
    IR_VERSION,
    OPSET,
    PLUGIN,
    TensorRtGraph,
    TensorRtOptions,
    check_attention,
)
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.hierarchical_graph import KvView
from trtspec.compile.weights import Weights
from trtspec.engines.tensorrt_info import int4_plugin


def export_hierarchical_for_tensorrt(
    spec: DecoderSpec,
    weights: Weights,
    options: TensorRtOptions,
    view: KvView,
    quantized: int,
    path: Path,
) -> None:
    """As `export_for_tensorrt`, over a hierarchical cache. quantized: S, the positions it has room for in that form;
    options.capacity: newest rows."""
    check_attention(spec, options.max_positions)
    writer = GraphWriter(path, OPSET, IR_VERSION)
    HierarchicalGraph(writer, spec, weights, options, view, quantized).write()


class HierarchicalGraph(TensorRtGraph):
    """A decoder's graph whose past is read through `view`."""

    def __init__(
        self,
        writer: GraphWriter,
        spec: DecoderSpec,
        weights: Weights,
        options: TensorRtOptions,
        view: KvView,
        quantized: int,
    ) -> None:
        super().__init__(writer, spec, weights, options)
        self.view, self._quantized = view, quantized

    def _over_cache(self, layer: int, prefix: str, queries: str, new: Mapping[str, str]) -> str:
        recent = self._updated(layer, prefix, new, [])
        read = [value.name for value in self._planes(layer)]
        lengths = ["quantized_lengths", "kv_lengths", "query_lengths"]
        inputs = [queries, *read, *recent, *lengths]
        return self.writer.node(int4_plugin(self.view.bits), inputs, f"{prefix}.attended", DOMAIN, **PLUGIN)

    def _planes(self, layer: int) -> Iterator[onnx.ValueInfoProto]:
        """What attention reads of the quantized rows, in the plugin's order."""
        heads, width, kept = self.spec.kv_heads, self.spec.head_dim, self._quantized
        shapes = {"key": [kept // self.view.group, width], "value": [kept]}
        halves = ("upper", "lower") if self.view.bits == 8 else ("upper",)
        for part, shape in shapes.items():
            for half in halves:
                yield tensor(f"{part}_{half}.{layer}", TensorProto.UINT8, ["B", heads, kept, width // 2])
            for name in ("scales", "zeros"):
                yield tensor(f"{part}_{name}.{layer}", self._onnx_dtype, ["B", heads, *shape])

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        planes = [value for layer in range(self.spec.layers) for value in self._planes(layer)]
        return [*super()._inputs(), tensor("quantized_lengths", TensorProto.INT32, ["B"]), *planes]
