"""The graph of autoregressive heads for TensorRT: the walk of heads/eagle.py, said as export_tensorrt.py says it.

Rows are those of a step of static shape. Besides what a target's graph takes (input_ids are the pairs' tokens):

    captured [B, T, W] f32      captured states of the target, for rows that have them
    recycled [B, T, H] f32      outputs of this graph, for the others
    is_recycled [B, T, 1] bool  which rows those are
 →  logits [R, Vd] f32, hidden [B, T, H] f32, keys.i, values.i

The embedding table is in the graph: it takes memory again where it is the target's, and no lookup leaves the GPU.

Heads without attention (Medusa, Hydra) are plans over rows, said by the walk of their own modules in `TensorRtLayers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import safetensors.numpy
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.compile.export_tensorrt import (
    IR_VERSION,
    NUMPY,
    OPSET,
    TensorRtGraph,
    TensorRtLayers,
    TensorRtOptions,
    check_attention,
)
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.eagle import HeadGraph, HeadWeights, captured_width, decoder_of, module_info
from trtspec.compile.weights import Weights
from trtspec.drafters.head_engine import HEAD_FOLDER, TABLE
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import GRAPH, Profile, TensorRtInfo
from trtspec.files import JSON

_EMBEDDING = f"{HEAD_FOLDER}/embedding.safetensors"  # in the target's engine folder


def write_module(
    head: Head, request: HeadRequest, engine: Path, weights: Weights, epsilon: float, into: Path
) -> None:
    """One graph as an engine folder, with the slots, rows and 16-bit type of the target's in `engine`.

    weights, epsilon: of the target. Raises PlanInfeasible for a head that the attention kernel cannot run.
    """
    spec, target = decoder_of(head, str(request.head)), TensorRtInfo.read(engine)
    info = module_info(head, request, EngineInfo.read(engine), spec)
    max_seq_len = info.spec.max_seq_len
    check_attention(spec, max_seq_len)
    capacity = max_seq_len + max(profile.rows for profile in target.profiles)
    shapes = replace(target, capacity=capacity, kv_cache="auto")  # one layer: little to save
    options = TensorRtOptions(
        dtype=shapes.dtype,
        max_positions=max_seq_len,
        capacity=shapes.capacity,
        splits=shapes.splits,
        taps=info.spec.taps,
        trees=shapes.trees,
    )
    writer, parts = GraphWriter(into / GRAPH, OPSET, IR_VERSION), HeadWeights(head, weights)
    TensorRtHeadGraph(writer, spec, parts, options, head=head, target_epsilon=epsilon).write()
    shapes.write(into)
    info.write(into)


def open_rows(engine: Path, into: Path, rows: int) -> TensorRtLayers:
    """Layers of a new graph over rows, without attention, in the new folder `into`; as many rows in each run."""
    into.mkdir()
    profiles = (Profile(rows, 1, rows),)
    shapes = replace(TensorRtInfo.read(engine), capacity=0, splits=1, profiles=profiles, kv_cache="auto")
    shapes.write(into)
    return TensorRtLayers(GraphWriter(into / GRAPH, OPSET, IR_VERSION), shapes.dtype)


def write_embedding(engine: Path, weights: Weights) -> dict[str, JSON]:
    """Write the target's table in its 16-bit type, for heads that read it outside their graphs; see head.json."""
    table = weights.embedding().astype(NUMPY[TensorRtInfo.read(engine).dtype])
    safetensors.numpy.save_file({TABLE: table}, engine / _EMBEDDING)
    return {"file": _EMBEDDING}


class TensorRtHeadGraph(TensorRtGraph, HeadGraph):
    """What a part computes is HeadGraph's, how it is said TensorRtGraph's."""

    def _features(self) -> str:
        self._embedding()
        fused = self._fused(self._layers.state("captured"))
        recycled = self._layers.state("recycled")
        return self.writer.node("Where", ["is_recycled", recycled, fused], "features")

    def _target_norm(self, state: str) -> str:
        return self._layers.rms_norm("target.norm", state, self.weights.target_norm(), self.target_epsilon)

    def _linear(self, name: str, source: str, modules: Sequence[str], output: str | None = None) -> str:
        return self._projections(source, modules)[0]

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        f32, width = TensorProto.FLOAT, captured_width(self.head)
        return [
            *super()._inputs(),
            tensor("captured", f32, ["B", "T", width]),
            tensor("recycled", f32, ["B", "T", self.spec.hidden_size]),
            tensor("is_recycled", TensorProto.BOOL, ["B", "T", 1]),
        ]
