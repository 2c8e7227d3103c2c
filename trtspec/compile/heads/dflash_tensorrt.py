"""The graphs of DFlash and DSpark for TensorRT: those of heads/dflash.py over one KV cache, which both write in place.

**context** makes the rows of committed tokens, of a step's static shape:

    captured [B,T,W] f32          captured states, the layers' side by side
    position_ids [B,T] int64      of the tokens
    write_starts [B] int64        place of each sequence's first row; all T rows are written from there on
    past_keys.i, past_values.i    [B, KV heads, capacity, head_dim] in the graph's dtype
 →  keys.i, values.i              the same memory

**block** has one block of T rows for each sequence behind its context, T the head's own block size:

    input_ids, position_ids [B,T] int64
    write_starts, kv_lengths, query_lengths [B]     as in compile/export_tensorrt.py
    tree_mask [B, T, ⌈T/32⌉] int32                  all ones: rows of a block see each other; not in a causal head
    past_keys.i, past_values.i
 →  tokens [B,D] int32, confidence [B,D] f32, keys.i, values.i

Attention is the plugin a target's graph has. The embedding table is in the block's graph.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto

from trtspec.compile.decoder import DecoderSpec
from trtspec.compile.export_tensorrt import (
    IR_VERSION,
    OPSET,
    TensorRtGraph,
    TensorRtOptions,
    check_attention,
)
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.block_tokens import BlockTokens
from trtspec.compile.heads.dflash import BlockHead
from trtspec.compile.heads.eagle import HeadWeights, module_info
from trtspec.drafters.block_engine import BLOCK, CONTEXT
from trtspec.drafters.head_engine import plan_folder
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import GRAPH, MEMORY_BOUND_ROWS, Profile, TensorRtInfo

_NO_LOGITS = 0
_OF_ATTENTION = ("input_ids", "kv_lengths", "query_lengths", "logit_rows", "tree_mask")


def write_graphs(whole: BlockHead, request: HeadRequest, engine: Path) -> None:
    """Both graphs as parts of the engine folder, with the slots, rows and 16-bit type of the target's.

    Raises PlanInfeasible for a head that the attention kernel cannot run.
    """
    spec, block_rows = _decoder_of(whole), whole.numbers.block_size
    positions = whole.positions + block_rows
    check_attention(spec, positions)
    target, info = TensorRtInfo.read(engine), EngineInfo.read(engine)
    slots = info.spec.max_batch
    accepted = max(profile.rows for profile in target.profiles if profile.reads == "steps")
    steps = Profile(slots, accepted, _NO_LOGITS)
    prompt = Profile(1, MEMORY_BOUND_ROWS, _NO_LOGITS, "prompt")
    block = replace(
        target,
        capacity=whole.positions + max(block_rows, accepted, MEMORY_BOUND_ROWS),
        profiles=(Profile(slots, block_rows, _NO_LOGITS),),
        trees=not whole.numbers.causal,
        kv_cache="auto",  # a few layers: little to save
    )
    options = TensorRtOptions(
        dtype=block.dtype,
        max_positions=positions,
        capacity=block.capacity,
        splits=block.splits,
        trees=block.trees,
    )
    parts = {
        CONTEXT: (ContextGraph, replace(block, capacity=0, trees=False, profiles=(steps, prompt))),
        BLOCK: (BlockGraph, block),
    }
    for name, (graph, shapes) in parts.items():
        folder = plan_folder(engine, name)
        folder.mkdir()
        graph(GraphWriter(folder / GRAPH, OPSET, IR_VERSION), spec, whole, options).write()
        shapes.write(folder)
    module_info(whole.head, request, info, spec).write(plan_folder(engine, BLOCK))


def _decoder_of(whole: BlockHead) -> DecoderSpec:
    """The head's layers as the graph builder sees a decoder."""
    n = whole.numbers
    return DecoderSpec(
        family="qwen3",
        vocab_size=whole.vocab_size,
        layers=n.layers,
        hidden_size=n.hidden_size,
        intermediate_size=n.intermediate_size,
        heads=n.heads,
        kv_heads=n.kv_heads,
        head_dim=n.head_dim,
        norm_epsilon=n.epsilon,
        qk_norm=True,
        max_position_embeddings=whole.positions,
        windows=(n.window,) * n.layers,
        rotates=(True,) * n.layers,
        rope=whole.rope,
    )


class ContextGraph(TensorRtGraph):
    """Keys and values of every layer, of the target's states."""

    def __init__(
        self, writer: GraphWriter, spec: DecoderSpec, whole: BlockHead, options: TensorRtOptions
    ) -> None:
        super().__init__(writer, spec, HeadWeights(whole.head, whole.target), options)
        self._width = whole.head.tensors["fc.weight"].shape[1]

    def write(self) -> None:
        """Add all nodes and weights and write the files."""
        self._tables()
        fused = self._projections(self._layers.state("captured"), ["fc"])[0]
        features = self._norm("hidden_norm", fused)
        for layer in range(self.spec.layers):
            prefix = f"model.layers.{layer}.self_attn"
            key, value = self._projections(features, [f"{prefix}.{x}_proj" for x in "kv"])
            self._updated(layer, prefix, self._by_head(layer, prefix, key, value), [])
        cache = [tensor(name, self._cache_dtype, self._cache_shape) for name in self._cache_names()]
        self.writer.save(self._inputs(), cache)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        known = [value for value in super()._inputs() if value.name not in _OF_ATTENTION]
        return [tensor("captured", TensorProto.FLOAT, ["B", "T", self._width]), *known]


class BlockGraph(TensorRtGraph):
    """A block through the head's layers, to tokens by the target's output layer."""

    def __init__(
        self, writer: GraphWriter, spec: DecoderSpec, whole: BlockHead, options: TensorRtOptions
    ) -> None:
        super().__init__(writer, spec, HeadWeights(whole.head, whole.target), options)
        self._whole = whole

    def _head(self, normed: str) -> None:
        node, whole = self.writer.node, self._whole
        # DFlash's row 0 is the known token; DSpark's row k stands for the token after its place.
        first = 0 if whole.numbers.shifted else 1
        bounds = [
            self._integers(f"rows.{name}", value)
            for name, value in {"first": first, "end": first + whole.drafts, "axis": 1}.items()
        ]
        state = node("Slice", [normed, *bounds], "drafted.states")
        table = self.weights.dense("lm_head.weight")[: whole.vocab_size]
        logits = self._layers.linear("lm_head", state, table)
        if whole.numbers.markov:
            known = node("Gather", ["input_ids", self._integers("known", 0)], "last.row", axis=1)
            node("Squeeze", [known, self._integers("last.axis", 1)], "last")
        tokens = BlockTokens(self._layers, whole.head, whole.numbers, whole.drafts, whole.vocab_size)
        self._results = tokens.write(logits, state, "last")

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        return [value for value in super()._inputs() if value.name != "logit_rows"]

    def _outputs(self, tapped: bool) -> list[onnx.ValueInfoProto]:
        return [
            *self._results,
            *(tensor(name, self._cache_dtype, self._cache_shape) for name in self._cache_names()),
        ]
