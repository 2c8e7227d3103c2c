"""Hydra's graphs, one for each head:

   hidden [N, H] f32                 captured output of the target's last layer, before its final norm
   embedded [N, (i+1)·H] f32         embeddings of the last known token and of the i tokens drafted since
→  candidates [N, K] int32           the likeliest ids, likeliest first
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.head_layouts.hydra import read_head
from trtspec.compile.decoder import read_decoder
from trtspec.compile.graph import tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.graph import (
    CANDIDATES,
    HeadLayers,
    candidates,
    check_fit,
    open_layers,
    provide_embedding,
    silu_block,
)
from trtspec.compile.weights import Weights
from trtspec.drafters.head_engine import HEAD_FOLDER, write_info
from trtspec.drafters.hydra import graph_name
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import MEMORY_BOUND_ROWS
from trtspec.events import Emit, Progress

if TYPE_CHECKING:
    from trtspec.compile.export_tensorrt import TensorRtLayers


def export_hydra(
    layers: HeadLayers | TensorRtLayers,
    head: Head,
    weights: Weights,
    epsilon: float,
    *,
    index: int,
    vocab_size: int,
) -> None:
    """Write the graph of head `index`. weights, epsilon: of the target, for its final norm.

    vocab_size: ids of the target's tokenizer; no other is ever a candidate.
    """
    blocks, hidden = int(head.config["hydra_num_layers"]), int(head.config["hidden_size"])
    writer = layers.writer

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        return head.array(f"{name}.weight"), head.array(f"{name}.bias")

    gains = weights.array("model.norm.weight")
    normed = layers.rms_norm("model.norm", layers.state("hidden"), gains, epsilon)
    state = writer.node("Concat", [normed, layers.state("embedded")], "input", axis=-1)
    for block in range(blocks):
        name, residual = f"hydra_mlp.{index}.{block}", state
        if block == 0:
            residual = layers.linear(f"{name}.res_connection", state, *pair(f"{name}.res_connection"))
        state = silu_block(layers, f"{name}.linear", state, *pair(f"{name}.linear"), residual)
    output = f"hydra_lm_head.{index}"
    weight, bias = (array[:vocab_size] for array in pair(output))
    count = min(CANDIDATES, vocab_size)
    candidates(writer, layers.linear(output, state, weight, bias), count, "candidates")
    writer.save(
        [
            tensor("hidden", TensorProto.FLOAT, ["N", hidden]),
            tensor("embedded", TensorProto.FLOAT, ["N", (index + 1) * hidden]),
        ],
        [tensor("candidates", TensorProto.INT32, ["N", count])],
    )


def build(request: HeadRequest, engine: Path, emit: Emit) -> None:
    """Write the graphs of a Hydra head; see `compile_head`."""
    emit(Progress("compile", "draft head", 0, 1, "step"))
    head = read_head(request.head)
    decoder, weights = read_decoder(request.model), Weights(request.model)
    spec = EngineInfo.read(engine).spec
    check_fit(head, decoder.hidden_size, decoder.vocab_size, request.head)
    trained = int(head.config["hydra_num_heads"])
    heads = min(trained, request.draft_length)
    vocab_size = min(spec.tokenizer_vocab_size, int(head.config["vocab_size"]))
    (engine / HEAD_FOLDER).mkdir()
    rows = min(MEMORY_BOUND_ROWS, spec.max_batch * spec.max_branches)  # a node for each path, at most
    for index in range(heads):
        layers = open_layers(request, engine, graph_name(index), rows)
        export_hydra(layers, head, weights, decoder.norm_epsilon, index=index, vocab_size=vocab_size)
    write_info(
        engine,
        {
            "method": "hydra",
            "trained": trained,
            "heads": heads,
            "candidates": min(CANDIDATES, vocab_size),
            "embedding": provide_embedding(engine, weights),
        },
    )
    emit(Progress("compile", "draft head", 1, 1, "step"))
