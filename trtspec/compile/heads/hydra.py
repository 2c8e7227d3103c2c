"""Hydra's graphs, one for each head:

   hidden [N, H] f32                 captured output of the target's last layer, before its final norm
   embedded [N, (i+1)·H] f32         embeddings of the last known token and of the i tokens drafted since
→  candidates [N, K] int64           the likeliest ids, likeliest first
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.head_layouts.hydra import read_head
from trtspec.compile.decoder import read_decoder
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.graph import (
    CANDIDATES,
    HeadLayers,
    candidates,
    check_fit,
    embedding_place,
    final_norm,
)
from trtspec.compile.heads.measure import own_texts, rank_hits, say_hits
from trtspec.compile.weights import Weights
from trtspec.drafters.head_engine import HEAD_FOLDER, write_info
from trtspec.drafters.hydra import graph_name, open_heads
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import GRAPH
from trtspec.events import Emit


def export_hydra(
    head: Head,
    weights: Weights,
    epsilon: float,
    *,
    index: int,
    vocab_size: int,
    path: Path,
    int8: bool = False,
) -> None:
    """Write the graph of head `index`. weights, epsilon: of the target, for its final norm.

    vocab_size: ids of the target's tokenizer; no other is ever a candidate. int8: see `HeadLayers`.
    """
    layers, hidden = int(head.config["hydra_num_layers"]), int(head.config["hidden_size"])
    writer = GraphWriter(path)
    add = HeadLayers(writer, int8=int8)

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        return head.array(f"{name}.weight"), head.array(f"{name}.bias")

    normed = final_norm(writer, weights, epsilon, "hidden")
    state = writer.node("Concat", [normed, "embedded"], "input", axis=-1)
    for block in range(layers):
        name, residual = f"hydra_mlp.{index}.{block}", state
        if block == 0:
            residual = add.linear(f"{name}.res_connection", state, *pair(f"{name}.res_connection"))
        state = add.silu_block(f"{name}.linear", state, *pair(f"{name}.linear"), residual)
    output = f"hydra_lm_head.{index}"
    weight, bias = (array[:vocab_size] for array in pair(output))
    count = min(CANDIDATES, vocab_size)
    candidates(writer, add.linear(output, state, weight, bias), count, "candidates")
    writer.save(
        [
            tensor("hidden", TensorProto.FLOAT, ["N", hidden]),
            tensor("embedded", TensorProto.FLOAT, ["N", (index + 1) * hidden]),
        ],
        [tensor("candidates", TensorProto.INT64, ["N", count])],
    )


def build(request: HeadRequest, engine: Path, emit: Emit) -> None:
    """Write the graphs of a Hydra head and the hits of its candidates; see `compile_head`."""
    head = read_head(request.head)
    decoder, weights = read_decoder(request.model), Weights(request.model)
    check_fit(head, decoder.hidden_size, decoder.vocab_size, request.head)
    trained = int(head.config["hydra_num_heads"])
    heads = min(trained, request.draft_length)
    vocab_size = min(EngineInfo.read(engine).spec.tokenizer_vocab_size, int(head.config["vocab_size"]))
    folder = engine / HEAD_FOLDER
    folder.mkdir()
    for index in range(heads):
        export_hydra(
            head,
            weights,
            decoder.norm_epsilon,
            index=index,
            vocab_size=vocab_size,
            path=folder / graph_name(index),
            int8=request.quantization == "int8_weight_only",
        )
    info = {
        "method": "hydra",
        "trained": trained,
        "heads": heads,
        "embedding": embedding_place(engine, GRAPH),
    }
    texts = own_texts(engine, request.prompts, emit)
    judged = []
    for index, ranked in enumerate(open_heads(engine, info)):
        for text in texts:
            # Of a token that stands t tokens behind its state, the t before it were drafted right.
            count = len(text.tokens) - index - 1
            if count > 0:
                path = np.stack([text.tokens[i : i + count] for i in range(index + 1)], axis=1)
                judged.append((index, ranked(text.hidden[:count], path), text.tokens[index + 1 :]))
    info["hits"] = rank_hits(judged, heads)
    write_info(engine, info)
    say_hits(info["hits"], texts, emit)
