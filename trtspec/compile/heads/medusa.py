"""Medusa's graph: all heads in one pass over the target's last hidden states.

   hidden [N, H] f32          captured output of the target's last layer, before its final norm
→  candidates [N, heads, K]   int32, the likeliest ids of each head, likeliest first
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.head_layouts.medusa import read_head
from trtspec.compile.decoder import read_decoder
from trtspec.compile.graph import tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.graph import (
    CANDIDATES,
    HeadLayers,
    candidates,
    check_fit,
    open_layers,
    silu_block,
)
from trtspec.compile.weights import Weights
from trtspec.drafters.head_engine import HEAD_FOLDER, write_info
from trtspec.drafters.medusa import GRAPH
from trtspec.engines.info import EngineInfo
from trtspec.events import Emit, Progress

if TYPE_CHECKING:
    from trtspec.compile.export_tensorrt import TensorRtLayers


def export_medusa(
    layers: HeadLayers | TensorRtLayers,
    head: Head,
    weights: Weights,
    epsilon: float,
    *,
    heads: int,
    vocab_size: int,
) -> None:
    """Write the graph of the first `heads` heads. weights, epsilon: of the target, for its final norm.

    vocab_size: ids of the target's tokenizer; no other is ever a candidate.
    """
    blocks, hidden = int(head.config["medusa_num_layers"]), int(head.config["hidden_size"])
    writer = layers.writer
    gains = weights.array("model.norm.weight")
    normed = layers.rms_norm("model.norm", layers.state("hidden"), gains, epsilon)
    count = min(CANDIDATES, vocab_size)
    axis = writer.constant("by_head", np.array([1], np.int64))
    chosen = []
    for index in range(heads):
        state = normed
        for block in range(blocks):
            name = f"{index}.{block}.linear"
            weight, bias = head.array(f"{name}.weight"), head.array(f"{name}.bias")
            state = silu_block(layers, name, state, weight, bias, state)
        table = head.array(f"{index}.{blocks}.weight")[:vocab_size]
        logits = layers.linear(f"{index}.{blocks}", state, table)
        best = candidates(writer, logits, count, f"{index}.candidates")
        chosen.append(writer.node("Unsqueeze", [best, axis], f"{index}.row"))
    writer.node("Concat", chosen, "candidates", axis=1)
    writer.save(
        [tensor("hidden", TensorProto.FLOAT, ["N", hidden])],
        [tensor("candidates", TensorProto.INT32, ["N", heads, count])],
    )


def build(request: HeadRequest, engine: Path, emit: Emit) -> None:
    """Write the graph of a Medusa head; see `compile_head`."""
    emit(Progress("compile", "draft head", 0, 1, "step"))
    head = read_head(request.head)
    decoder, weights = read_decoder(request.model), Weights(request.model)
    spec = EngineInfo.read(engine).spec
    check_fit(head, decoder.hidden_size, decoder.vocab_size, request.head)
    trained = int(head.config["medusa_num_heads"])
    heads = min(trained, request.draft_length)
    vocab_size = min(spec.tokenizer_vocab_size, int(head.config["vocab_size"]))
    (engine / HEAD_FOLDER).mkdir()
    layers = open_layers(request, engine, GRAPH, spec.max_batch)
    export_medusa(layers, head, weights, decoder.norm_epsilon, heads=heads, vocab_size=vocab_size)
    count = min(CANDIDATES, vocab_size)
    write_info(engine, {"method": "medusa", "trained": trained, "heads": heads, "candidates": count})
    emit(Progress("compile", "draft head", 1, 1, "step"))
