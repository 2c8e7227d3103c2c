"""Medusa's graph: all heads in one pass over the target's last hidden states.

   hidden [N, H] f32          captured output of the target's last layer, before its final norm
→  candidates [N, heads, K]   int64, the likeliest ids of each head, likeliest first
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.head_layouts.medusa import read_head
from trtspec.compile.decoder import read_decoder
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.graph import (
    CANDIDATES,
    HeadLayers,
    candidates,
    check_fit,
    final_norm,
)
from trtspec.compile.heads.measure import own_texts, rank_hits, say_hits
from trtspec.compile.weights import Weights
from trtspec.drafters.head_engine import HEAD_FOLDER, HeadGraph, write_info
from trtspec.drafters.medusa import GRAPH
from trtspec.engines.info import EngineInfo
from trtspec.events import Emit


def export_medusa(
    head: Head,
    weights: Weights,
    epsilon: float,
    *,
    heads: int,
    vocab_size: int,
    path: Path,
    int8: bool = False,
) -> None:
    """Write the graph of the first `heads` heads. weights, epsilon: of the target, for its final norm.

    vocab_size: ids of the target's tokenizer; no other is ever a candidate. int8: see `HeadLayers`.
    """
    layers, hidden = int(head.config["medusa_num_layers"]), int(head.config["hidden_size"])
    writer = GraphWriter(path)
    add = HeadLayers(writer, int8=int8)
    normed = final_norm(writer, weights, epsilon, "hidden")
    count = min(CANDIDATES, vocab_size)
    axis = writer.constant("by_head", np.array([1], np.int64))
    chosen = []
    for index in range(heads):
        state = normed
        for block in range(layers):
            name = f"{index}.{block}.linear"
            weight, bias = head.array(f"{name}.weight"), head.array(f"{name}.bias")
            state = add.silu_block(name, state, weight, bias, state)
        table = head.array(f"{index}.{layers}.weight")[:vocab_size]
        logits = add.linear(f"{index}.{layers}", state, table)
        best = candidates(writer, logits, count, f"{index}.candidates")
        chosen.append(writer.node("Unsqueeze", [best, axis], f"{index}.row"))
    writer.node("Concat", chosen, "candidates", axis=1)
    writer.save(
        [tensor("hidden", TensorProto.FLOAT, ["N", hidden])],
        [tensor("candidates", TensorProto.INT64, ["N", heads, count])],
    )


def build(request: HeadRequest, engine: Path, emit: Emit) -> None:
    """Write the graph of a Medusa head and the hits of its candidates; see `compile_head`."""
    head = read_head(request.head)
    decoder, weights = read_decoder(request.model), Weights(request.model)
    spec = EngineInfo.read(engine).spec
    check_fit(head, decoder.hidden_size, decoder.vocab_size, request.head)
    trained = int(head.config["medusa_num_heads"])
    heads = min(trained, request.draft_length)
    folder = engine / HEAD_FOLDER
    folder.mkdir()
    export_medusa(
        head,
        weights,
        decoder.norm_epsilon,
        heads=heads,
        vocab_size=min(spec.tokenizer_vocab_size, int(head.config["vocab_size"])),
        path=folder / GRAPH,
        int8=request.quantization == "int8_weight_only",
    )
    texts = own_texts(engine, request.prompts, emit)
    graph = HeadGraph(engine, GRAPH)
    judged = []
    for text in texts:
        (ranked,) = graph(hidden=text.hidden)
        for index in range(heads):
            truth = text.tokens[index + 1 :]
            judged.append((index, ranked[: len(truth), index], truth))
    hits = rank_hits(judged, heads)
    write_info(engine, {"method": "medusa", "trained": trained, "hits": hits})
    say_hits(hits, texts, emit)
