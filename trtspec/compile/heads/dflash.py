"""The graphs of DFlash and DSpark: context rows are prepared once, then each draft is one pass over a block.

Those for TensorRT are in dflash_tensorrt.py.

**context.onnx**: what the head's layers see of the target's states; rows are tokens, in any number.

    hidden [N, W] f32             captured states, the layers' side by side
    positions [N] int64           of the tokens
 →  keys [N, L, KV, d], values [N, L, KV, d] f32      of every layer, keys rotated

**block.onnx**: S sequences, each with a block of B rows: its last known token and mask tokens.

    embedded [S, B, H] f32        embeddings of the block's tokens
    positions [S, B] int64        of its rows
    keys, values [S, L, KV, C, d] f32     context rows as they came from context.onnx, padded behind
    mask [S, 1, 1, B, C+B] f32    added to the scores of row and key: −inf hides padding, context out of the window
                                  and, in a causal head, later rows of the block
    last [S] int64                the last known token (DSpark)
 →  tokens [S, D] int32           drafts in order
    confidence [S, D] f32         how likely each is accepted after those before it (DSpark with a confidence head)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.dflash import DFlashNumbers, numbers_of, read_head
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.compile.decoder import read_decoder
from trtspec.compile.graph import MICROSOFT, GraphWriter, tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.block_tokens import BlockTokens
from trtspec.compile.heads.graph import HeadLayers, check_fit, embedding_place, rms_norm
from trtspec.compile.rope import Rope
from trtspec.compile.weights import Weights
from trtspec.drafters.block_engine import BLOCK, CONTEXT
from trtspec.drafters.head_engine import HEAD_FOLDER, write_info
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import GRAPH
from trtspec.events import Emit, Progress

_F32, _I64 = TensorProto.FLOAT, TensorProto.INT64


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A head and what both of its graphs need of its target. positions: of tokens that may be its context.

    drafts: D. vocab_size: ids of the target's tokenizer; no other is ever drafted. target: its weights.
    """

    head: Head
    numbers: DFlashNumbers
    rope: Rope
    positions: int
    drafts: int
    vocab_size: int
    target: Weights


def build(request: HeadRequest, engine: Path, emit: Emit) -> None:
    """Write both graphs into the engine folder, for its backend; see `compile_head`."""
    emit(Progress("compile", "draft head", 0, 1, "step"))
    head = read_head(request.head)
    numbers = numbers_of(head, str(request.head))
    decoder, info = read_decoder(request.model), EngineInfo.read(engine)
    check_fit(head, decoder.hidden_size, decoder.vocab_size, request.head)
    whole = BlockHead(
        head,
        numbers,
        Rope.of(numbers.rope, numbers.head_dim, numbers.positions, where=str(request.head)),
        positions=min(numbers.positions, info.spec.max_seq_len),
        drafts=min(numbers.drafts, request.draft_length),
        vocab_size=min(info.spec.tokenizer_vocab_size, numbers.vocab_size),
        target=Weights(request.model),
    )
    (engine / HEAD_FOLDER).mkdir()
    on_gpu = info.backend == "tensorrt"
    if on_gpu:
        from trtspec.compile.heads.dflash_tensorrt import write_graphs
    else:
        write_graphs = _write_graphs
    write_graphs(whole, request, engine)
    write_info(
        engine,
        {
            "method": request.method,
            "embedding": None if on_gpu else embedding_place(engine, GRAPH),  # there the graph has it
            "layers": numbers.layers,
            "kv_heads": numbers.kv_heads,
            "head_dim": numbers.head_dim,
            "block_size": numbers.block_size,
            "drafts": whole.drafts,
            "mask_token_id": numbers.mask_token_id,
            "causal": numbers.causal,
            "window": numbers.window,
            "max_positions": whole.positions,
            "confidence": numbers.confidence,
        },
    )
    emit(Progress("compile", "draft head", 1, 1, "step"))


def _write_graphs(whole: BlockHead, request: HeadRequest, engine: Path) -> None:
    folder, int8 = engine / HEAD_FOLDER, request.quantization == "int8_weight_only"
    tables = whole.rope.tables(whole.positions + whole.numbers.block_size)
    export_context(whole.head, whole.numbers, tables, folder / CONTEXT, int8=int8)
    export_block(
        whole.head,
        whole.numbers,
        tables,
        whole.target,
        drafts=whole.drafts,
        vocab_size=whole.vocab_size,
        path=folder / BLOCK,
        int8=int8,
    )


def export_context(
    head: Head,
    numbers: DFlashNumbers,
    tables: tuple[np.ndarray, np.ndarray],
    path: Path,
    *,
    int8: bool = False,
) -> None:
    """Write context.onnx. tables: cos and sin, float32 [positions, d / 2]. int8: see `HeadLayers`."""
    writer = GraphWriter(path)
    add = HeadLayers(writer, int8=int8)
    n, node = numbers, writer.node
    fused = add.linear("fc", "hidden", head.array("fc.weight"))
    gamma = writer.constant("hidden_norm.weight", head.array("hidden_norm.weight"))
    features = rms_norm(writer, fused, gamma, n.epsilon, "features")
    by_head = writer.constant("by_head", np.array([0, n.layers, n.kv_heads, n.head_dim], np.int64))
    for part in ("keys", "values"):
        name = f"{part[0]}_proj"
        weights = [head.array(f"layers.{i}.self_attn.{name}.weight") for i in range(n.layers)]
        biases = [head.array(f"layers.{i}.self_attn.{name}.bias") for i in range(n.layers) if n.biases]
        bias = np.concatenate(biases) if biases else None
        rows = add.linear(name, features, np.concatenate(weights), bias)
        node("Reshape", [rows, by_head], "values" if part == "values" else "keys.plain")
    ones = writer.constant("ones", np.ones(n.head_dim, np.float32))
    gains = np.stack([head.array(f"layers.{i}.self_attn.k_norm.weight") for i in range(n.layers)])[:, None]
    even = rms_norm(writer, "keys.plain", ones, n.epsilon, "keys.even")
    normed = node("Mul", [even, writer.constant("k_norm", gains)], "keys.normed")
    # The rotation knows [batch, rows, heads · d]; all layers and heads turn alike.
    flat = writer.constant("flat", np.array([1, -1, n.layers * n.kv_heads * n.head_dim], np.int64))
    one_batch = writer.constant("one_batch", np.array([1, -1], np.int64))
    places = node("Reshape", ["positions", one_batch], "places")
    rotated = _rotate(writer, node("Reshape", [normed, flat], "keys.flat"), places, tables, "keys.rotated")
    rows = writer.constant("rows", np.array([-1, n.layers, n.kv_heads, n.head_dim], np.int64))
    node("Reshape", [rotated, rows], "keys")
    width = head.tensors["fc.weight"].shape[1]
    shape: list[int | str] = ["N", n.layers, n.kv_heads, n.head_dim]
    writer.save(
        [tensor("hidden", _F32, ["N", width]), tensor("positions", _I64, ["N"])],
        [tensor("keys", _F32, shape), tensor("values", _F32, shape)],
    )


def export_block(
    head: Head,
    numbers: DFlashNumbers,
    tables: tuple[np.ndarray, np.ndarray],
    target: Weights,
    *,
    drafts: int,
    vocab_size: int,
    path: Path,
    int8: bool = False,
) -> None:
    """Write block.onnx, whose output layer is the target's.

    tables: as of `export_context`. drafts: D, at most `numbers.drafts`. vocab_size: ids of the target's tokenizer; no
    other is ever drafted. int8: see `HeadLayers`.
    """
    _Block(GraphWriter(path), head, numbers, int8).write(tables, target, drafts, vocab_size)


def _rotate(
    writer: GraphWriter, source: str, positions: str, tables: tuple[np.ndarray, np.ndarray], result: str
) -> str:
    """Rotary embedding of [batch, rows, heads · d] at positions [batch, rows]."""
    names = [writer.constant(f"{result}.{part}", table) for part, table in zip(("cos", "sin"), tables)]
    return writer.node("RotaryEmbedding", [source, positions, *names], result, MICROSOFT, interleaved=0)


class _Block:
    def __init__(self, writer: GraphWriter, head: Head, numbers: DFlashNumbers, int8: bool) -> None:
        self.writer, self.head, self.n = writer, head, numbers
        self.add = HeadLayers(writer, int8=int8)
        self._known: set[str] = set()

    def write(
        self, tables: tuple[np.ndarray, np.ndarray], target: Weights, drafts: int, vocab_size: int
    ) -> None:
        node, n = self.writer.node, self.n
        self.tables = [self._constant(f"rope.{x}", table) for x, table in zip(("cos", "sin"), tables)]
        state = "embedded"
        for part in ("keys", "values"):
            split = [f"{part}.{i}.all" for i in range(n.layers)]
            node("Split", [part], split, axis=1, num_outputs=n.layers)
        for layer in range(n.layers):
            state = self._layer(layer, state)
        # DFlash's row 0 is the known token; DSpark's row k stands for the token after its place.
        first = 0 if n.shifted else 1
        bounds = [self._ints(f"rows.{i}", [v]) for i, v in enumerate((first, first + drafts, 1))]
        state = node("Slice", [self._norm("norm", state), *bounds], "drafted.states")
        logits = self._output_layer(state, target, vocab_size)
        outputs = BlockTokens(self.add, self.head, n, drafts, vocab_size).write(logits, state, "last")
        cache: list[int | str] = ["S", n.layers, n.kv_heads, "C", n.head_dim]
        inputs = [
            tensor("embedded", _F32, ["S", n.block_size, n.hidden_size]),
            tensor("positions", _I64, ["S", n.block_size]),
            tensor("keys", _F32, cache),
            tensor("values", _F32, cache),
            tensor("mask", _F32, ["S", 1, 1, n.block_size, "K"]),
        ]
        if n.markov:
            inputs.append(tensor("last", _I64, ["S"]))
        self.writer.save(inputs, outputs)

    def _layer(self, layer: int, state: str) -> str:
        node, prefix = self.writer.node, f"layers.{layer}"
        attended = self._attention(layer, self._norm(f"{prefix}.input_layernorm", state))
        state = node("Add", [state, attended], f"{prefix}.attended")
        normed = self._norm(f"{prefix}.post_attention_layernorm", state)
        gate, up = (self._linear(f"{prefix}.mlp.{x}_proj", normed) for x in ("gate", "up"))
        silu = node("QuickGelu", [gate], f"{prefix}.silu", MICROSOFT, alpha=1.0)
        product = node("Mul", [silu, up], f"{prefix}.product")
        return node("Add", [state, self._linear(f"{prefix}.mlp.down_proj", product)], f"{prefix}.out")

    def _attention(self, layer: int, normed: str) -> str:
        """Rows of the block over the context and the block; the query heads of a KV head are rows of one product."""
        node, n, prefix = self.writer.node, self.n, f"layers.{layer}.self_attn"
        group = n.heads // n.kv_heads
        queries = self._turned(prefix, "q", normed, n.heads)
        split = self._ints("queries.split", [0, n.block_size, n.kv_heads, group, n.head_dim])
        packed = self._ints("queries.packed", [0, n.kv_heads, group * n.block_size, n.head_dim])
        queries = node("Reshape", [queries, split], f"{prefix}.queries.split")
        queries = node("Transpose", [queries], f"{prefix}.queries.turned", perm=[0, 2, 3, 1, 4])
        queries = node("Reshape", [queries, packed], f"{prefix}.queries.packed")
        keys = self._with_context(prefix, layer, "keys", self._turned(prefix, "k", normed, n.kv_heads))
        values = self._with_context(prefix, layer, "values", self._linear(f"{prefix}.v_proj", normed))
        keys = node("Transpose", [keys], f"{prefix}.keys.turned", perm=[0, 1, 3, 2])
        scores = node("MatMul", [queries, keys], f"{prefix}.scores")
        scale = self._constant("scale", np.array(n.head_dim**-0.5, np.float32))
        scores = node("Mul", [scores, scale], f"{prefix}.scaled")
        by_row = self._ints("scores.by_row", [0, n.kv_heads, group, n.block_size, -1])
        scores = node("Reshape", [scores, by_row], f"{prefix}.scores.by_row")
        scores = node("Add", [scores, "mask"], f"{prefix}.masked")
        shares = node("Softmax", [scores], f"{prefix}.shares", axis=-1)
        by_key = self._ints("shares.packed", [0, n.kv_heads, group * n.block_size, -1])
        shares = node("Reshape", [shares, by_key], f"{prefix}.shares.packed")
        mixed = node("MatMul", [shares, values], f"{prefix}.mixed")
        by_head = self._ints("mixed.by_head", [0, n.kv_heads, group, n.block_size, n.head_dim])
        mixed = node("Reshape", [mixed, by_head], f"{prefix}.mixed.by_head")
        mixed = node("Transpose", [mixed], f"{prefix}.mixed.turned", perm=[0, 3, 1, 2, 4])
        flat = self._ints("mixed.flat", [0, n.block_size, n.heads * n.head_dim])
        mixed = node("Reshape", [mixed, flat], f"{prefix}.mixed.flat")
        return self._linear(f"{prefix}.o_proj", mixed)

    def _turned(self, prefix: str, x: str, normed: str, heads: int) -> str:
        """Queries or keys of the block, normed by head and rotated: [S, B, heads · d]."""
        node, n = self.writer.node, self.n
        rows = self._linear(f"{prefix}.{x}_proj", normed)
        by_head = self._ints(f"{x}.by_head", [0, n.block_size, heads, n.head_dim])
        flat = self._ints(f"{x}.flat", [0, n.block_size, heads * n.head_dim])
        rows = self._norm(f"{prefix}.{x}_norm", node("Reshape", [rows, by_head], f"{prefix}.{x}.heads"))
        rows = node("Reshape", [rows, flat], f"{prefix}.{x}.flat")
        return node(
            "RotaryEmbedding",
            [rows, "positions", *self.tables],
            f"{prefix}.{x}.turned",
            MICROSOFT,
            interleaved=0,
        )

    def _with_context(self, prefix: str, layer: int, part: str, rows: str) -> str:
        """[S, KV, C + B, d]: the cached rows of a layer and the block's own behind them."""
        node, n = self.writer.node, self.n
        axis = self._ints("layer_axis", [1])
        cached = node("Squeeze", [f"{part}.{layer}.all", axis], f"{prefix}.{part}.cached")
        by_head = self._ints("kv.by_head", [0, n.block_size, n.kv_heads, n.head_dim])
        rows = node("Reshape", [rows, by_head], f"{prefix}.{part}.heads")
        rows = node("Transpose", [rows], f"{prefix}.{part}.rows", perm=[0, 2, 1, 3])
        return node("Concat", [cached, rows], f"{prefix}.{part}.whole", axis=2)

    def _output_layer(self, state: str, target: Weights, vocab_size: int) -> str:
        """The target's, over ids of its tokenizer; 8-bit where the target's is."""
        stored = None if target.shares_head else target.linear(["lm_head"])
        if stored is None or stored.bits == 32 or stored.input_scale is not None:
            return self.add.linear("lm_head", state, target.dense("lm_head.weight")[:vocab_size])
        kept = {name: getattr(stored, name)[:vocab_size] for name in ("weight", "scales")}
        return self.add.product("lm_head", state, replace(stored, outputs=vocab_size, **kept))

    def _linear(self, name: str, source: str) -> str:
        bias = self.head.array(f"{name}.bias") if f"{name}.bias" in self.head else None
        return self.add.linear(name, source, self.head.array(f"{name}.weight"), bias)

    def _norm(self, name: str, source: str) -> str:
        gamma = self._constant(f"{name}.weight", self.head.array(f"{name}.weight"))
        return rms_norm(self.writer, source, gamma, self.n.epsilon, f"{name}.out")

    def _ints(self, name: str, values: list[int]) -> str:
        return self._constant(name, np.array(values, np.int64))

    def _constant(self, name: str, array: np.ndarray) -> str:
        """A constant, written once however often it is used."""
        if name not in self._known:
            self._known.add(name)
            self.writer.constant(name, array)
        return name
