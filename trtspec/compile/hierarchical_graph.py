"""The decoder graph over QuantSpec's hierarchical KV cache (engines/hierarchical_kv.py) in place of a float32 one.

Before attention every layer expands its groups to float32 and puts the full-precision rows where they belong; after it
the step's new rows are what the graph gives back. What is expanded lives for one layer, so the memory of a sequence is
its codes and its newest rows. Instead of `past_keys.i`, `past_values.i` and the whole buffers as outputs there are

    groups [1] int64               groups of the expanded buffers; their last row is nobody's and takes what is not read
    recent_places [B,KV,R,3] int64 (b, head, row of the expanded buffer) of each full-precision row
    new_places [B,KV,T,3] int64    (b, head, row) of the step's own rows
    key_codes.i, value_codes.i     [B, KV heads, groups, G, head_dim] uint8
    key_scales.i, key_lows.i       [B, KV heads, groups, 1, head_dim] f32
    value_scales.i, value_lows.i   [B, KV heads, groups, G, 1] f32
    recent_keys.i, recent_values.i [B, KV heads, R, head_dim] f32
 →  keys.i, values.i               [B, KV heads, T, head_dim] f32, keys with their rotation
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto

from trtspec.compile.decoder import DecoderSpec
from trtspec.compile.export_onnx import DecoderGraph, GraphOptions
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.weights import Weights
from trtspec.engines.hierarchical_kv import HALF

_UPPER_HALF = 0xF0


@dataclass(frozen=True, slots=True)
class KvView:
    """group: tokens of a quantized group. bits: 8 reads whole bytes (the target), 4 their upper halves (the draft)."""

    group: int
    bits: Literal[4, 8]


def export_hierarchical(
    spec: DecoderSpec, weights: Weights, options: GraphOptions, view: KvView, path: Path
) -> None:
    """As `export_decoder`, over a hierarchical cache."""
    HierarchicalGraph(GraphWriter(path), spec, weights, options, view).write()


class HierarchicalGraph(DecoderGraph):
    """A decoder's graph whose past is read through `view`."""

    def __init__(
        self,
        writer: GraphWriter,
        spec: DecoderSpec,
        weights: Weights,
        options: GraphOptions,
        view: KvView,
    ) -> None:
        super().__init__(writer, spec, weights, options)
        self.view = view

    def _tables(self) -> None:
        super()._tables()
        node, constant, width = self.writer.node, self.writer.constant, self.spec.head_dim
        sizes = {"first": [0], "axis": [2], "heads": [self.spec.kv_heads], "width": [width]}
        sizes |= {"group": [self.view.group], "flat": [-1], "column": [-1, 1], "rows": [-1, width]}
        for name, values in sizes.items():
            constant(f"kv.{name}", np.array(values, np.int64))
        if self.view.bits == 4:
            constant("kv.upper_half", np.array(_UPPER_HALF, np.uint8))
            constant("kv.half", np.array(HALF, np.float32))
        batch = node("Shape", ["padded_rows"], "kv.batch", end=1)
        length = node("Mul", ["groups", "kv.group"], "kv.length")
        node("Concat", [batch, "kv.heads", length, "kv.width"], "kv.shape", axis=0)

    def _past(self, layer: int) -> tuple[str, str]:
        return self._expanded("key", layer), self._expanded("value", layer)

    def _present(self, layer: int) -> tuple[str, str]:
        return f"present_keys.{layer}", f"present_values.{layer}"

    def _attention(self, layer: int, normed: str) -> str:
        attended = super()._attention(layer, normed)
        for whole, rows in zip(self._present(layer), (f"keys.{layer}", f"values.{layer}"), strict=True):
            self.writer.node("GatherND", [whole, "new_places"], rows)
        return attended

    def _expanded(self, part: Literal["key", "value"], layer: int) -> str:
        """f32 [B, KV heads, groups · G, head_dim]: the sequence as this view reads it."""
        node, prefix = self.writer.node, f"kv.{part}.{layer}"
        codes, scales, lows = (
            node("Slice", [f"{part}_{name}.{layer}", "kv.first", "groups", "kv.axis"], f"{prefix}.{name}")
            for name in ("codes", "scales", "lows")
        )
        if self.view.bits == 4:  # as if nothing were left over
            codes = node("BitwiseAnd", [codes, "kv.upper_half"], f"{prefix}.upper")
            lows = node(
                "Add", [lows, node("Mul", [scales, "kv.half"], f"{prefix}.raise")], f"{prefix}.raised"
            )
        where = {"axis": 3, "block_size": self.view.group}
        if part == "value":  # one scale a row: as rows of a matrix, which the kernel is ten times faster at
            shapes = {"codes": (codes, "kv.rows"), "scales": (scales, "kv.flat"), "lows": (lows, "kv.column")}
            codes, scales, lows = (
                node("Reshape", list(given), f"{prefix}.{name}.flat") for name, given in shapes.items()
            )
            where = {"axis": 0}
        steps = node("DequantizeLinear", [codes, scales], f"{prefix}.steps", **where)
        expanded = node("Add", [steps, lows], f"{prefix}.expanded")
        past = node("Reshape", [expanded, "kv.shape"], f"{prefix}.past")
        updates = [past, "recent_places", f"recent_{part}s.{layer}"]
        return node("ScatterND", updates, f"{prefix}.with_recent")

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        i64 = TensorProto.INT64
        heads = self.spec.kv_heads
        places = [
            tensor("groups", i64, [1]),
            tensor("recent_places", i64, ["B", heads, "recent", 3]),
            tensor("new_places", i64, ["B", heads, "T", 3]),
        ]
        return [*self._step_inputs(), *places, *self._cache_inputs()]

    def _cache_inputs(self) -> Iterator[onnx.ValueInfoProto]:
        heads, width, group = self.spec.kv_heads, self.spec.head_dim, self.view.group
        f32 = TensorProto.FLOAT
        for layer in range(self.spec.layers):
            for part, shape in (("key", [1, width]), ("value", [group, 1])):
                head = ["B", heads, "capacity"]
                yield tensor(f"{part}_codes.{layer}", TensorProto.UINT8, [*head, group, width])
                yield tensor(f"{part}_scales.{layer}", f32, [*head, *shape])
                yield tensor(f"{part}_lows.{layer}", f32, [*head, *shape])
                yield tensor(f"recent_{part}s.{layer}", f32, ["B", heads, "recent", width])

    @property
    def _cache_shape(self) -> list[int | str]:
        return ["B", self.spec.kv_heads, "T", self.spec.head_dim]
