"""The decoder graph, built node by node from a config and its weights.

Rows are ragged: the N new rows of all B sequences of a step stand one behind the other, so that a sequence with
many drafts costs its neighbours nothing. Only attention sees them padded to [B, T].

    input_ids [N] int64            new rows, sequence by sequence
    padded_rows [B,T] int64        which of the N rows stands at each padded place
    flat_places [N] int64          the padded place (b·T + t) of each row
    position_ids [B,T] int64       start + depth of each row
    total_lengths [B] int32        keys of each sequence after this step, minus one
    query_lengths [B] int32        valid rows of each sequence in this step
    longest [] int32               an upper bound of the total lengths
    attention_bias [B|1,1,T,S] f32 added to the scores of row t and key s: −inf hides a key (a token tree in one lane);
                                   only in a graph with `masks`: it costs a tenth of a step, and chains are causal
                                   without it
    logit_rows [R] int64           the rows whose logits are wanted
    past_keys.i, past_values.i     [B, KV heads, capacity, head_dim] f32, one pair a layer
 →  logits [R, V] f32
    hidden [N, taps·H] f32         residual stream after each tapped layer, only in a graph with taps
    keys.i, values.i               the same buffers, written in place

The attention node is `trtspec::SpecVerifyAttention`. Here it is a model-local function whose body is ONNX
Runtime's GroupQueryAttention (inlined ahead of time); for TensorRT the same node is the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from trtspec.compile.decoder import DecoderSpec
from trtspec.compile.graph import MICROSOFT, OPSET, GraphWriter, tensor
from trtspec.compile.weights import Linear, Weights

DOMAIN = "trtspec"
ATTENTION = "SpecVerifyAttention"
_ATTENTION_INPUTS = (
    "qkv", "past_key", "past_value", "total_lengths", "longest", "cos", "sin",
    "position_ids", "attention_bias", "query_lengths",
)  # fmt: skip
_ATTENTION_ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "do_rotary", "local_window_size")


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """max_positions: length of the RoPE tables. taps: 0-based layers whose output is captured. masks: the graph has
    an `attention_bias`.

    activation_bits 8 lets quantized projections round activations to 8 bits a row and block (`MatMulNBits`
    accuracy level 4: what makes them fast); 32 keeps them in float32.
    """

    max_positions: int
    taps: tuple[int, ...] = ()
    masks: bool = False
    activation_bits: int = 8


def export_decoder(spec: DecoderSpec, weights: Weights, options: GraphOptions, path: Path) -> None:
    """Write the graph to `path` and its weights beside it. Layout: see the module docstring."""
    writer = GraphWriter(path)
    DecoderGraph(writer, spec, weights, options).write()


class DecoderGraph:
    """The walk over a decoder's layers, in ONNX Runtime's operators; other runtimes override how a part is said."""

    def __init__(
        self, writer: GraphWriter, spec: DecoderSpec, weights: Weights, options: GraphOptions
    ) -> None:
        self.writer, self.spec, self.weights, self.options = writer, spec, weights, options

    def write(self) -> None:
        """Add all nodes and weights and write the files."""
        spec, options = self.spec, self.options
        self._tables()
        residual = self._embedding()
        branch: str | None = None  # what the previous block adds to the residual stream
        taps = []
        for layer in range(spec.layers):
            prefix = f"model.layers.{layer}"
            normed, residual = self._add_and_norm(f"{prefix}.input_layernorm", residual, branch)
            if layer - 1 in options.taps:
                taps.append(residual)
            attended = self._attention(layer, normed)
            normed, residual = self._add_and_norm(f"{prefix}.post_attention_layernorm", residual, attended)
            branch = self._mlp(f"{prefix}.mlp", normed)
        normed, residual = self._add_and_norm("model.norm", residual, branch)
        if spec.layers - 1 in options.taps:
            taps.append(residual)
        self._head(normed)
        if taps:
            self._hidden(taps)
        self.writer.save(self._inputs(), self._outputs(bool(taps)), self._functions())

    def _tables(self) -> None:
        """Constants that all layers share."""
        cos, sin = self.spec.rope.tables(self.options.max_positions)
        self.writer.constant("rope.cos", cos)
        self.writer.constant("rope.sin", sin)
        width = self.spec.heads * self.spec.head_dim
        self.writer.constant("attended_shape", np.array([-1, width], np.int64))

    def _functions(self) -> Sequence[onnx.FunctionProto]:
        return [_attention_function()]

    def _hidden(self, taps: Sequence[str]) -> None:
        self.writer.node("Concat", taps, "hidden", axis=-1)

    def _embedding(self) -> str:
        table = self.writer.constant("model.embed_tokens.weight", self.weights.embedding())
        return self.writer.node("Gather", [table, "input_ids"], "embedded")

    def _add_and_norm(self, name: str, residual: str, branch: str | None) -> tuple[str, str]:
        """RMS norm of residual + branch; returns (normed, the new residual)."""
        gamma = self.writer.constant(f"{name}.weight", self.weights.array(f"{name}.weight"))
        normed, epsilon = f"{name}.out", self.spec.norm_epsilon
        if branch is None:
            self.writer.node(
                "SimplifiedLayerNormalization",
                [residual, gamma],
                normed,
                axis=-1,
                epsilon=epsilon,
                stash_type=1,
            )
            return normed, residual
        outputs = [normed, "", "", f"{name}.residual"]
        self.writer.node(
            "SkipSimplifiedLayerNormalization", [residual, branch, gamma], outputs, MICROSOFT, epsilon=epsilon
        )
        return normed, outputs[3]

    def _attention(self, layer: int, normed: str) -> str:
        spec, prefix = self.spec, f"model.layers.{layer}.self_attn"
        qkv = self._linear(f"{prefix}.qkv", normed, [f"{prefix}.{x}_proj" for x in "qkv"])
        if spec.qk_norm:
            qkv = self._norm_heads(prefix, qkv)
        inputs = dict.fromkeys(_ATTENTION_INPUTS, "")
        padded = self.writer.node("Gather", [qkv, "padded_rows"], f"{prefix}.padded")
        past_key, past_value = self._past(layer)
        inputs |= {"qkv": padded, "past_key": past_key, "past_value": past_value}
        inputs |= {"cos": "rope.cos", "sin": "rope.sin"}
        shared = ["total_lengths", "query_lengths", "longest", "position_ids"]
        if self.options.masks:
            shared.append("attention_bias")
        inputs |= {name: name for name in shared}
        window = spec.windows[layer]
        self.writer.node(
            ATTENTION,
            list(inputs.values()),
            [f"{prefix}.attended", *self._present(layer)],
            DOMAIN,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.head_dim**-0.5,
            do_rotary=int(spec.rotates[layer]),
            local_window_size=-1 if window is None else window,
        )
        places = self.writer.node("Reshape", [f"{prefix}.attended", "attended_shape"], f"{prefix}.places")
        rows = self.writer.node("Gather", [places, "flat_places"], f"{prefix}.rows")
        return self._linear(f"{prefix}.o", rows, [f"{prefix}.o_proj"])

    def _past(self, layer: int) -> tuple[str, str]:
        """Keys and values that attention reads and adds the step's to."""
        return f"past_keys.{layer}", f"past_values.{layer}"

    def _present(self, layer: int) -> tuple[str, str]:
        """What attention calls them with the step's rows among them."""
        return f"keys.{layer}", f"values.{layer}"

    def _norm_heads(self, prefix: str, qkv: str) -> str:
        """Qwen3's RMS norm over each query and key head, before the rotation."""
        node, spec = self.writer.node, self.spec
        widths = np.array([spec.heads, spec.kv_heads, spec.kv_heads], np.int64) * spec.head_dim
        split = self.writer.constant(f"{prefix}.widths", widths)
        parts = [f"{prefix}.{x}" for x in "qkv"]
        node("Split", [qkv, split], parts, axis=-1)
        by_head = self.writer.constant(f"{prefix}.by_head", np.array([0, -1, spec.head_dim], np.int64))
        by_row = self.writer.constant(f"{prefix}.by_row", np.array([0, -1], np.int64))
        for i, x in enumerate("qk"):
            gamma = self.writer.constant(
                f"{prefix}.{x}_norm.weight", self.weights.array(f"{prefix}.{x}_norm.weight")
            )
            heads = node("Reshape", [parts[i], by_head], f"{prefix}.{x}.heads")
            normed = node(
                "SimplifiedLayerNormalization",
                [heads, gamma],
                f"{prefix}.{x}.normed",
                axis=-1,
                epsilon=spec.norm_epsilon,
                stash_type=1,
            )
            parts[i] = node("Reshape", [normed, by_row], f"{prefix}.{x}.flat")
        return node("Concat", parts, f"{prefix}.normed", axis=-1)

    def _mlp(self, prefix: str, normed: str) -> str:
        """SwiGLU: down(silu(gate) · up), with gate and up in one product. QuickGelu with alpha 1 is SiLU."""
        node = self.writer.node
        both = self._linear(f"{prefix}.gate_up", normed, [f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        node("Split", [both], [f"{prefix}.gate", f"{prefix}.up"], axis=-1, num_outputs=2)
        node("QuickGelu", [f"{prefix}.gate"], f"{prefix}.silu", MICROSOFT, alpha=1.0)
        node("Mul", [f"{prefix}.silu", f"{prefix}.up"], f"{prefix}.product")
        return self._linear(f"{prefix}.down", f"{prefix}.product", [f"{prefix}.down_proj"])

    def _head(self, normed: str) -> None:
        """Logits of the wanted rows only: the head is the widest product of the step."""
        self.writer.node("Gather", [normed, "logit_rows"], "wanted_rows")
        if self.weights.shares_head:  # one table serves as embedding and head
            self.writer.node("Gemm", ["wanted_rows", "model.embed_tokens.weight"], "logits", transB=1)
        else:
            self._linear("lm_head.out", "wanted_rows", ["lm_head"], output="logits")

    def _linear(self, name: str, source: str, modules: Sequence[str], output: str | None = None) -> str:
        """One product for all of `modules` (which share their input), concatenated along the outputs."""
        node, constant = self.writer.node, self.writer.constant
        linear, result = self.weights.linear(modules), output or f"{name}.out"
        if linear.input_scale is not None:
            scale = constant(f"{name}.input_scale", linear.input_scale)
            source = node("Mul", [source, scale], f"{name}.scaled")
        if linear.bits == 32:
            return self._float_product(name, source, linear, result)
        inputs = [
            source,
            constant(f"{name}.weight", linear.weight),
            constant(f"{name}.scales", linear.scales),
        ]
        if linear.bias is not None:
            inputs += ["", "", constant(f"{name}.bias", linear.bias)]
        return node(
            "MatMulNBits",
            inputs,
            result,
            MICROSOFT,
            K=linear.inputs,
            N=linear.outputs,
            bits=linear.bits,
            block_size=linear.block_size,
            accuracy_level=4 if self.options.activation_bits == 8 else 1,
        )

    def _float_product(self, name: str, source: str, linear: Linear, result: str) -> str:
        weight = self.writer.constant(f"{name}.weight", linear.weight.T)
        if linear.bias is None:
            return self.writer.node("MatMul", [source, weight], result)
        product = self.writer.node("MatMul", [source, weight], f"{name}.product")
        return self.writer.node("Add", [product, self.writer.constant(f"{name}.bias", linear.bias)], result)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        past = [tensor(f"past_{name}", TensorProto.FLOAT, self._cache_shape) for name in self._cache_names()]
        return self._step_inputs() + past

    def _step_inputs(self) -> list[onnx.ValueInfoProto]:
        i64, i32, f32 = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
        inputs = [
            tensor("input_ids", i64, ["N"]),
            tensor("padded_rows", i64, ["B", "T"]),
            tensor("flat_places", i64, ["N"]),
            tensor("position_ids", i64, ["B", "T"]),
            tensor("total_lengths", i32, ["B"]),
            tensor("query_lengths", i32, ["B"]),
            tensor("longest", i32, []),
            tensor("logit_rows", i64, ["R"]),
        ]
        if self.options.masks:
            inputs.append(tensor("attention_bias", f32, ["B_mask", 1, "T", "S"]))
        return inputs

    def _outputs(self, tapped: bool) -> list[onnx.ValueInfoProto]:
        f32, width = TensorProto.FLOAT, len(self.options.taps) * self.spec.hidden_size
        outputs = [tensor("logits", f32, ["R", self.spec.vocab_size])]
        if tapped:
            outputs.append(tensor("hidden", f32, ["N", width]))
        return outputs + [tensor(name, f32, self._cache_shape) for name in self._cache_names()]

    @property
    def _cache_shape(self) -> list[int | str]:
        return ["B", self.spec.kv_heads, "capacity", self.spec.head_dim]

    def _cache_names(self) -> list[str]:
        return [f"{part}.{layer}" for layer in range(self.spec.layers) for part in ("keys", "values")]


def _attention_function() -> onnx.FunctionProto:
    """`trtspec::SpecVerifyAttention` in ONNX Runtime's operators: GroupQueryAttention with ragged queries."""
    body = helper.make_node(
        "GroupQueryAttention",
        [
            "qkv", "", "", "past_key", "past_value", "total_lengths", "longest", "cos", "sin",
            "position_ids", "attention_bias", "", "", "", "", "", "query_lengths",
        ],
        ["attended", "key", "value"],
        domain=MICROSOFT,
    )  # fmt: skip
    for name in _ATTENTION_ATTRIBUTES:
        kind = onnx.AttributeProto.FLOAT if name == "scale" else onnx.AttributeProto.INT
        body.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=name, type=kind))
    return helper.make_function(
        DOMAIN,
        ATTENTION,
        list(_ATTENTION_INPUTS),
        ["attended", "key", "value"],
        [body],
        [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        list(_ATTENTION_ATTRIBUTES),
    )
