"""The same decoder for TensorRT: standard ONNX operators, the attention plugin, and Q/DQ where ModelOpt quantized.

Every shape of a step is static (a TensorRT profile has B sequences of T rows), so nothing is ragged:

    input_ids, position_ids [B,T] int64     new rows; those past a sequence's own are padding
    write_starts [B] int64                  key index of each sequence's row 0; all T rows are written from there on
    kv_lengths [B] int32                    keys after this step, the valid new ones included
    query_lengths [B] int32                 valid rows
    tree_mask [B, T, ⌈T/32⌉] int32          bit j of word w: row t sees row 32·w + j; only in a graph with trees, the
                                            rows of others are chains
    logit_rows [R] int64                    rows (b·T + t) whose logits are wanted
    past_keys.i, past_values.i              [B, KV heads, capacity, head_dim] in the graph's dtype
 →  logits [R, V] f32, hidden [B, T, taps·H] f32 (only in a graph with taps)
    keys.i, values.i                        the same memory, written in place

`TensorScatter` is TensorRT's KV cache update (10.15 and later), for 16 bits; an FP8 cache is written by a plugin of
ours, `KvAppend`, with the checkpoint's scales. Attention is the plugin of `plugins/`, one node with domain,
`plugin_namespace` and no local function of its name in the file, so no parser version can take another. With `splits`
the keys are divided and a second plugin merges the pieces. Rows of a token tree lie in the cache in their own order;
whoever accepts a path moves its rows together.

| ModelOpt format | in the graph |
|---|---|
| 16 bits | MatMul in the graph's dtype |
| FP8 | Q/DQ of the input and DQ of the weight, one scale each |
| NVFP4 | dynamic quantization of the input in blocks of 16, two DQ (block scales, then values) on either side |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from trtspec.checkpoints.quantized_linear import QuantizedLinear
from trtspec.compile.decoder import DecoderSpec
from trtspec.compile.export_onnx import DOMAIN, DecoderGraph, GraphOptions
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.weights import Weights
from trtspec.engines.tensorrt_info import APPEND, COMBINE, KvCache, attention_plugin
from trtspec.errors import PlanInfeasible

OPSET = 24  # TensorScatter
IR_VERSION = 11
TENSORRT_DOMAIN = "trt"
FP4_BLOCK = 16
PLUGIN = {"plugin_namespace": DOMAIN, "plugin_version": "1", "aot": 1}  # attributes of every plugin's node

Dtype = Literal["float32", "float16", "bfloat16"]
NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """dtype: of activations, KV cache and unquantized weights. float32 is for comparison with PyTorch: no kernel
    takes it, and quantized weights are written dequantized.

    max_positions: length of the RoPE tables. capacity: keys a sequence's cache holds. splits: pieces attention
    divides the keys into. taps: 0-based layers whose output is captured. trees: attention takes a mask of the rows.
    kv_cache: "fp8" has e4m3 elements, floats of the same values in float32.
    """

    dtype: Dtype
    max_positions: int
    capacity: int
    splits: int = 1
    taps: tuple[int, ...] = ()
    trees: bool = False
    kv_cache: KvCache = "auto"


def export_for_tensorrt(spec: DecoderSpec, weights: Weights, options: TensorRtOptions, path: Path) -> None:
    """Write the graph to `path` and its weights beside it. Layout: see the module docstring.

    Raises PlanInfeasible for what the attention kernel or TensorRT's Q/DQ cannot express, by name.
    """
    check_attention(spec, options.max_positions)
    writer = GraphWriter(path, OPSET, IR_VERSION)
    TensorRtGraph(writer, spec, weights, options).write()


def check_attention(spec: DecoderSpec, longest: int) -> None:
    """Raise PlanInfeasible for what the attention kernel cannot do in a context of `longest` tokens."""
    if any(window is not None and window < longest for window in spec.windows):
        raise PlanInfeasible(
            f"the attention plugin has no sliding window, and this model's is shorter than {longest} tokens",
            hint="lower engine.max_seq_len to the window, or use backend tensorrt_llm",
        )
    if spec.head_dim & (spec.head_dim - 1):
        raise PlanInfeasible(
            f"the attention plugin takes head sizes that are powers of two, this model's is {spec.head_dim}",
            hint="use backend tensorrt_llm",
        )


class TensorRtLayers:
    """Layers in TensorRT's operators. dtype: of activations and weights."""

    def __init__(self, writer: GraphWriter, dtype: Dtype) -> None:
        self.writer = writer
        self.dtype = NUMPY[dtype]
        self.onnx_dtype = helper.np_dtype_to_tensor_dtype(self.dtype)

    def constant(self, name: str, values: np.ndarray) -> str:
        """A weight in the graph's dtype."""
        return self.writer.constant(name, values.astype(self.dtype))

    def state(self, name: str) -> str:
        """A float32 input of the graph as the layers take it."""
        return self.writer.node("Cast", [name], f"{name}.states", to=self.onnx_dtype)

    def rms_norm(self, name: str, source: str, gains: np.ndarray, epsilon: float) -> str:
        """RMS norm over the last axis."""
        return self.writer.node(
            "RMSNormalization",
            [source, self.constant(f"{name}.weight", gains)],
            f"{name}.out",
            axis=-1,
            epsilon=epsilon,
            stash_type=TensorProto.FLOAT,
        )

    def silu(self, name: str, source: str) -> str:
        """source · sigmoid(source)."""
        sigmoid = self.writer.node("Sigmoid", [source], f"{name}.sigmoid")
        return self.writer.node("Mul", [source, sigmoid], f"{name}.silu")

    def linear(self, name: str, source: str, weight: np.ndarray, bias: np.ndarray | None = None) -> str:
        """source [..., I] times weight [O, I] transposed, plus bias [O]."""
        return self.product(name, source, self.constant(f"{name}.weight", weight), bias)

    def product(self, name: str, source: str, weight: str, bias: np.ndarray | None) -> str:
        """The same for a weight of the graph, transposed there as ModelOpt's own exporter does."""
        weight = self.writer.node("Transpose", [weight], f"{name}.transposed", perm=[1, 0])
        if bias is None:
            return self.writer.node("MatMul", [source, weight], f"{name}.out")
        product = self.writer.node("MatMul", [source, weight], f"{name}.product")
        return self.writer.node("Add", [product, self.constant(f"{name}.bias", bias)], f"{name}.out")


class TensorRtGraph(DecoderGraph):
    """The walk over a decoder's layers in TensorRT's operators. walk: what another walk than a target's takes besides
    (see compile/heads/tensorrt.py)."""

    def __init__(
        self, writer: GraphWriter, spec: DecoderSpec, weights: Weights, options: TensorRtOptions, **walk: Any
    ) -> None:
        super().__init__(writer, spec, weights, GraphOptions(options.max_positions, options.taps), **walk)
        self._capacity, self._splits, self._trees = options.capacity, options.splits, options.trees
        self._layers = TensorRtLayers(writer, options.dtype)
        self._dtype, self._onnx_dtype = self._layers.dtype, self._layers.onnx_dtype
        self._fp8_cache = options.kv_cache == "fp8"
        bytes_of_e4m3 = self._fp8_cache and options.dtype != "float32"
        self._cache_dtype = TensorProto.FLOAT8E4M3FN if bytes_of_e4m3 else self._onnx_dtype

    def _constant(self, name: str, values: np.ndarray) -> str:
        return self._layers.constant(name, values)

    def _integers(self, name: str, *values: int) -> str:
        return self.writer.constant(name, np.array(values, np.int64))

    def _tables(self) -> None:
        for name, table in zip(("rope.cos", "rope.sin"), self.spec.rope.tables(self.options.max_positions)):
            self._constant(name, table)
        spec = self.spec
        self._integers("query_heads", 0, 0, spec.heads, spec.head_dim)
        self._integers("key_heads", 0, 0, spec.kv_heads, spec.head_dim)
        self._integers("flat", 0, 0, -1)
        self._integers("rows", -1, spec.hidden_size)
        if self._fp8_cache:
            self.writer.node("Cast", ["write_starts"], "append_starts", to=TensorProto.INT32)

    def _functions(self) -> Sequence[onnx.FunctionProto]:
        return ()

    def _embedding(self) -> str:
        table = self._constant("model.embed_tokens.weight", self.weights.embedding())
        return self.writer.node("Gather", [table, "input_ids"], "embedded")

    def _norm(self, name: str, source: str) -> str:
        gains = self.weights.array(f"{name}.weight")
        return self._layers.rms_norm(name, source, gains, self.spec.norm_epsilon)

    def _add_and_norm(self, name: str, residual: str, branch: str | None) -> tuple[str, str]:
        if branch is not None:
            residual = self.writer.node("Add", [residual, branch], f"{name}.residual")
        return self._norm(name, residual), residual

    def _attention(self, layer: int, normed: str) -> str:
        node, spec, prefix = self.writer.node, self.spec, f"model.layers.{layer}.self_attn"
        query, key, value = self._projections(normed, [f"{prefix}.{x}_proj" for x in "qkv"])
        if spec.qk_norm:
            query = self._norm_by_head(f"{prefix}.q_norm", query, "query_heads")
        if spec.rotates[layer]:
            query = self._rotated(f"{prefix}.q", query, spec.heads)
        queries = node("Reshape", [query, "query_heads"], f"{prefix}.queries")
        attended = self._over_cache(layer, prefix, queries, self._by_head(layer, prefix, key, value))
        flat = node("Reshape", [attended, "flat"], f"{prefix}.flat")
        return self._projections(flat, [f"{prefix}.o_proj"])[0]

    def _over_cache(self, layer: int, prefix: str, queries: str, new: Mapping[str, str]) -> str:
        """Attention [B, T, heads, head_dim] over what is cached and the step's `new` keys and values."""
        scales = self._cache_scales(prefix) if self._fp8_cache else []
        caches = self._updated(layer, prefix, new, scales)
        rows = ["kv_lengths", "query_lengths", *["tree_mask"] * self._trees]
        return self._attended(prefix, [queries, *caches, *rows, *scales])

    def _by_head(self, layer: int, prefix: str, key: str, value: str) -> dict[str, str]:
        """The step's keys, normed and rotated, and values: [B, T, KV heads, head_dim]."""
        if self.spec.qk_norm:
            key = self._norm_by_head(f"{prefix}.k_norm", key, "key_heads")
        if self.spec.rotates[layer]:
            key = self._rotated(f"{prefix}.k", key, self.spec.kv_heads)
        return {
            name: self.writer.node("Reshape", [rows, "key_heads"], f"{prefix}.{name}.by_head")
            for name, rows in (("keys", key), ("values", value))
        }

    def _cache_scales(self, prefix: str) -> list[str]:
        """What a stored 1 is worth, of the layer's keys and values: float32 [KV heads]."""
        return [
            self.writer.constant(name, np.full(self.spec.kv_heads, self.weights.array(name), np.float32))
            for name in (f"{prefix}.{x}_proj.{x}_scale" for x in "kv")
        ]

    def _updated(self, layer: int, prefix: str, new: Mapping[str, str], scales: Sequence[str]) -> list[str]:
        """Keys and values with the step's `new` ones [B, T, KV heads, head_dim] written in their memory."""
        past, outputs = ([f"{word}{name}.{layer}" for name in new] for word in ("past_", ""))
        if scales:
            inputs = [*new.values(), *past, "append_starts", "query_lengths", *scales]
            self.writer.node(APPEND, inputs, outputs, DOMAIN, **PLUGIN)
            return outputs
        for name, rows, cache, output in zip(new, new.values(), past, outputs):
            update = self.writer.node("Transpose", [rows], f"{prefix}.{name}.update", perm=[0, 2, 1, 3])
            inputs = [cache, update, "write_starts"]
            self.writer.node("TensorScatter", inputs, output, axis=2, mode="linear")
        return outputs

    def _attended(self, prefix: str, inputs: Sequence[str]) -> str:
        """Attention over the cache: [B, T, heads, head_dim]."""
        output, attention = f"{prefix}.attended", attention_plugin(self._splits, self._trees, self._fp8_cache)
        if self._splits == 1:
            return self.writer.node(attention, inputs, output, DOMAIN, **PLUGIN)
        parts = [f"{prefix}.partial", f"{prefix}.lse"]
        self.writer.node(attention, inputs, parts, DOMAIN, splits=self._splits, **PLUGIN)
        # The pieces are float32: only this says what their sum is rounded to.
        return self.writer.node(COMBINE, parts, output, DOMAIN, dtype=self._dtype.name, **PLUGIN)

    def _norm_by_head(self, name: str, source: str, shape: str) -> str:
        heads = self.writer.node("Reshape", [source, shape], f"{name}.heads")
        return self.writer.node("Reshape", [self._norm(name, heads), "flat"], f"{name}.flat")

    def _rotated(self, name: str, source: str, heads: int) -> str:
        inputs = [source, "rope.cos", "rope.sin", "position_ids"]
        return self.writer.node("RotaryEmbedding", inputs, f"{name}.rotated", num_heads=heads)

    def _mlp(self, prefix: str, normed: str) -> str:
        gate, up = self._projections(normed, [f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        silu = self._layers.silu(f"{prefix}.gate", gate)
        product = self.writer.node("Mul", [silu, up], f"{prefix}.product")
        return self._projections(product, [f"{prefix}.down_proj"])[0]

    def _head(self, normed: str) -> None:
        node = self.writer.node
        rows = node("Reshape", [normed, "rows"], "normed_rows")
        wanted = node("Gather", [rows, "logit_rows"], "wanted_rows")
        if self.weights.shares_head:
            table = node("Transpose", ["model.embed_tokens.weight"], "head.transposed", perm=[1, 0])
            product = node("MatMul", [wanted, table], "head.product")
        else:
            product = self._projections(wanted, ["lm_head"])[0]
        node("Cast", [product], "logits", to=TensorProto.FLOAT)

    def _hidden(self, taps: Sequence[str]) -> None:
        self.writer.node("Concat", taps, "taps", axis=-1)
        self.writer.node("Cast", ["taps"], "hidden", to=TensorProto.FLOAT)

    def _projections(self, source: str, modules: Sequence[str]) -> list[str]:
        """The outputs of `modules`, which read the same input."""
        stored = [self._stored(module) for module in modules]
        source = self._quantized_input(source, modules, stored)
        return [self._product(source, module, part) for module, part in zip(modules, stored)]

    def _stored(self, module: str) -> QuantizedLinear:
        if self._dtype == np.float32:
            return QuantizedLinear("float", self.weights.dense(f"{module}.weight"))
        return self.weights.stored(module)

    def _quantized_input(self, source: str, modules: Sequence[str], stored: Sequence[QuantizedLinear]) -> str:
        """`source` as the kernels of `modules` read it: through Q/DQ where their weights are quantized."""
        kind, scale = stored[0].kind, stored[0].input_scale
        alike = all((part.kind, part.input_scale) == (kind, scale) for part in stored)
        if kind == "float" and alike:
            return source
        scaled = any(part.pre_quant_scale is not None for part in stored)
        if kind not in ("fp8", "nvfp4") or scale is None or scaled or not alike:
            forms = ", ".join(
                f"{part.kind}{'' if part.input_scale else ', 16-bit inputs'}" for part in stored
            )
            raise PlanInfeasible(
                f"{modules[0]} and what shares its input are stored as {forms}: no Q/DQ of TensorRT says that",
                hint="the tensorrt backend builds target.quantization none, fp8 and nvfp4",
            )
        node, name = self.writer.node, f"{modules[0]}.input"
        if kind == "fp8":
            step, zero = self._constant(f"{name}_scale", np.array(scale)), self._zero_point()
            quantized = node("QuantizeLinear", [source, step, zero], f"{name}.fp8")
            return node("DequantizeLinear", [quantized, step, zero], name)
        step = self.writer.constant(f"{name}_scale", np.array(scale, np.float32))
        values, blocks = f"{name}.fp4", f"{name}.blocks"
        node(
            "TRT_FP4DynamicQuantize",
            [source, step],
            [values, blocks],
            TENSORRT_DOMAIN,
            axis=-1,
            block_size=FP4_BLOCK,
            scale_type=TensorProto.FLOAT8E4M3FN,
        )
        return self._from_fp4(name, values, blocks, step)

    def _product(self, source: str, module: str, stored: QuantizedLinear) -> str:
        """`source` times the module's weight [out, in]."""
        return self._layers.product(module, source, self._weight(module, stored), self.weights.bias(module))

    def _weight(self, module: str, stored: QuantizedLinear) -> str:
        node, constant, name = self.writer.node, self.writer.constant, f"{module}.weight"
        if stored.kind == "float":
            return self._constant(name, stored.weight)
        if stored.kind == "fp8":
            values = constant(name, stored.weight.astype(ml_dtypes.float8_e4m3fn))
            step = self._constant(f"{name}_scale", stored.scales.reshape(()))
            return node("DequantizeLinear", [values, step, self._zero_point()], f"{name}.dequantized")
        values = constant(name, stored.weight.astype(ml_dtypes.float4_e2m1fn))
        blocks = self.weights.array(f"{name}_scale").astype(ml_dtypes.float8_e4m3fn)
        step = self.weights.array(f"{name}_scale_2").astype(np.float32).reshape(())
        blocks, step = constant(f"{name}_scale", blocks), constant(f"{name}_scale_2", step)
        return self._from_fp4(name, values, blocks, step)

    def _from_fp4(self, name: str, values: str, blocks: str, step: str) -> str:
        """Values · block scales · the tensor's scale, in the graph's dtype."""
        node = self.writer.node
        scales = node("DequantizeLinear", [blocks, step], f"{name}.float_scales")
        scales = node("Cast", [scales], f"{name}.scales", to=self._onnx_dtype)
        return node(
            "DequantizeLinear", [values, scales], f"{name}.dequantized", axis=-1, block_size=FP4_BLOCK
        )

    def _zero_point(self) -> str:
        """Its type is what makes a QuantizeLinear FP8."""
        if not self._has_zero_point:
            self.writer.constant("fp8.zero", np.zeros((), ml_dtypes.float8_e4m3fn))
            self._has_zero_point = True
        return "fp8.zero"

    _has_zero_point = False

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        i64, i32 = TensorProto.INT64, TensorProto.INT32
        inputs = [
            tensor("input_ids", i64, ["B", "T"]),
            tensor("position_ids", i64, ["B", "T"]),
            tensor("write_starts", i64, ["B"]),
            tensor("kv_lengths", i32, ["B"]),
            tensor("query_lengths", i32, ["B"]),
            tensor("logit_rows", i64, ["R"]),
        ]
        if self._trees:
            inputs.append(tensor("tree_mask", i32, ["B", "T", "words"]))
        return inputs + [
            tensor(f"past_{name}", self._cache_dtype, self._cache_shape) for name in self._cache_names()
        ]

    def _outputs(self, tapped: bool) -> list[onnx.ValueInfoProto]:
        f32, width = TensorProto.FLOAT, len(self.options.taps) * self.spec.hidden_size
        outputs = [tensor("logits", f32, ["R", self.spec.vocab_size])]
        if tapped:
            outputs.append(tensor("hidden", f32, ["B", "T", width]))
        return outputs + [tensor(name, self._cache_dtype, self._cache_shape) for name in self._cache_names()]

    @property
    def _cache_shape(self) -> list[int | str]:
        return ["B", self.spec.kv_heads, self._capacity, self.spec.head_dim]
