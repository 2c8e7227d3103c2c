"""The graph of autoregressive heads: EAGLE-1, -2 and -3, P-EAGLE, MTP modules. A small decoder over pairs.

Row i of a sequence is the pair of token i + 1 and the state that token was predicted from; it scores token i + 2. The
state is the target's where the target has been there, and the head's own output one row before where it has not.

    embedded [N, H] f32         embeddings of the rows' tokens (the table is not in the graph: see drafters/head_engine)
    captured [C, W] f32         captured states of the target, for rows that have them
    recycled [R, H] f32         outputs of this graph, for the others
    feature_rows [N] int64      each row's place among the C captured and then the R recycled ones
    padded_rows … past_values   as in compile/export_onnx.py
 →  logits [R', Vd] f32         of the rows `logit_rows`, over the draft vocabulary
    hidden [N, H] f32           what the next row may take in the target's stead
    keys.i, values.i

What is recycled: EAGLE-1's output itself, which stands for the target's last state; EAGLE-3's before its final norm
(after it with `norm_output`); an MTP module's after its own norm, as its output layer reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from trtspec import __version__
from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.heads import head_of
from trtspec.checkpoints.quantized_linear import QuantizedLinear
from trtspec.checkpoints.rope import read_rope
from trtspec.compile.decoder import DecoderSpec, read_decoder
from trtspec.compile.export_onnx import DecoderGraph, GraphOptions
from trtspec.compile.graph import GraphWriter, tensor
from trtspec.compile.heads import HeadRequest
from trtspec.compile.heads.graph import check_fit, embedding_place, int8_rows, rms_norm
from trtspec.compile.rope import Rope
from trtspec.compile.weights import Linear, Weights, packed_linear
from trtspec.drafters.head_engine import HEAD_FOLDER, write_info
from trtspec.drafters.pair_engine import EMBEDDING, MASK, VOCABULARY, module_folder
from trtspec.engines.base import EngineSpec
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import GRAPH, RESERVE_ROWS
from trtspec.errors import ConfigError
from trtspec.events import Emit, Progress


def build(request: HeadRequest, engine: Path, emit: Emit) -> None:
    """Write an autoregressive head into the engine folder, for the engine's backend; see `compile_head`."""
    emit(Progress("compile", "draft head", 0, 1, "step"))
    target, weights = read_decoder(request.model), Weights(request.model)
    head = read(request, target.layers)
    if int(head.config["target_hidden_size"]) != target.hidden_size:
        raise ConfigError(
            f"the head reads states {head.config['target_hidden_size']} wide, the target's are {target.hidden_size}",
            where=str(request.head),
        )
    own_table = "embed_tokens.weight" in head
    if not own_table or "lm_head.weight" not in head:
        check_fit(head, target.hidden_size, target.vocab_size, request.head)
    folder, on_gpu = engine / HEAD_FOLDER, EngineInfo.read(engine).backend == "tensorrt"
    folder.mkdir()
    if on_gpu:
        from trtspec.compile.heads.tensorrt import write_module
    else:
        write_module = _write_module
    for index, part in enumerate(modules(head)):
        place = folder / module_folder(index)
        place.mkdir(exist_ok=True)
        write_module(part, request, engine, weights, target.norm_epsilon, place)
    if own_table and not on_gpu:  # there the graph has it
        np.save(folder / EMBEDDING, head.array("embed_tokens.weight"))
    if head.d2t is not None:
        np.save(folder / VOCABULARY, head.d2t)
    if "mask_hidden" in head:
        np.save(folder / MASK, head.array("mask_hidden"))
    write_info(
        engine,
        {
            "method": request.method,
            "embedding": None if own_table or on_gpu else embedding_place(engine, GRAPH),
            "captured_width": captured_width(head),
            "mask_token_id": head.config.get("mask_token_id"),
            "modules": len(modules(head)),
        },
    )


def _write_module(
    head: Head, request: HeadRequest, engine: Path, weights: Weights, epsilon: float, into: Path
) -> None:
    """One graph as an engine folder. weights, epsilon: of the target, whose slots and numerics it has.

    It can hide rows of other branches where the target takes trees: a mask costs time.
    """
    spec, target = decoder_of(head, str(request.head)), EngineInfo.read(engine)
    parts = HeadWeights(head, weights, int8=request.quantization == "int8_weight_only")
    info = module_info(head, request, target, spec)
    options = GraphOptions(max_positions=info.spec.max_seq_len + RESERVE_ROWS, masks=target.spec.trees)
    HeadGraph(GraphWriter(into / GRAPH), spec, parts, options, head, epsilon).write()
    replace(info, least_rows=parts.least_rows).write(into)


def module_info(head: Head, request: HeadRequest, target: EngineInfo, spec: DecoderSpec) -> EngineInfo:
    """What a module's engine folder says of itself."""
    max_seq_len = min(target.spec.max_seq_len, spec.max_position_embeddings)
    return EngineInfo(
        trtspec_version=__version__,
        backend=target.backend,
        model=request.head.name,
        spec=EngineSpec(
            vocab_size=spec.vocab_size,
            tokenizer_vocab_size=spec.vocab_size,
            max_batch=target.spec.max_batch,
            max_seq_len=max_seq_len,
            max_rows=min(target.spec.max_rows, max_seq_len),
            exact=target.spec.exact,
            max_branches=target.spec.max_branches,
            hidden_size=spec.hidden_size,
            taps=(0,),
        ),
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        least_rows=1,
        stop_token_ids=(),
        weights=f"{head.parameters / 1e6:.1f}M parameters, quantization {request.quantization}",
        speculation={"method": request.method, "draft_length": request.draft_length},
    )


def modules(head: Head) -> list[Head]:
    """What runs by itself, with KV of its own: each of several MTP modules, otherwise the head."""
    if head.method != "mtp":
        return [head]
    shared = {name: array for name, array in head.tensors.items() if not name.startswith("layers.")}
    found = []
    for index in range(int(head.config["num_hidden_layers"])):
        prefix = f"layers.{index}."
        own = {
            f"layers.0.{name.removeprefix(prefix)}": array
            for name, array in head.tensors.items()
            if name.startswith(prefix)
        }
        found.append(replace(head, tensors=shared | own, config={**head.config, "num_hidden_layers": 1}))
    return found


def read(request: HeadRequest, target_layers: int) -> Head:
    """The head of a request. Raises ConfigError for one of another mechanism."""
    if request.method == "mtp":
        head = mtp.read_head(request.head)
    else:
        head = eagle.read_head(request.head, target_layers)
    if head_of(head.method) != head_of(request.method):
        raise ConfigError(f"this is a head for {head.method}, not {request.method}", where=str(request.head))
    return head


def captured_width(head: Head) -> int:
    """W: what the head reads of the target at one token."""
    return max(1, len(head.captured_layers)) * int(head.config["target_hidden_size"])


def decoder_of(head: Head, where: str) -> DecoderSpec:
    """The head's layers as the graph builder sees a decoder; its vocabulary is the draft's."""
    config = dict(head.config)
    layers, dim = int(config["num_hidden_layers"]), int(config["head_dim"])
    if dim % 16:
        raise ConfigError(f"head_dim is {dim}; the attention kernel takes multiples of 16", where=where)
    positions = int(config["max_position_embeddings"])
    return DecoderSpec(
        family="llama",
        vocab_size=int(config["draft_vocab_size"]),
        layers=layers,
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=dim,
        norm_epsilon=float(config["rms_norm_eps"]),
        qk_norm="layers.0.self_attn.q_norm.weight" in head,
        max_position_embeddings=positions,
        windows=(None,) * layers,
        rotates=(True,) * layers,
        rope=Rope.of(read_rope(ConfigView(config, where)), dim, positions, where=where),
    )


class HeadWeights:
    """`compile.weights.Weights` over a head: its own tensors, and the target's where it has none.

    int8: products are quantized as ModelOpt's INT8_WEIGHT_ONLY does, a symmetric scale for each output row.
    """

    shares_head = False  # its embedding is not in the graph

    def __init__(self, head: Head, target: Weights, int8: bool = False) -> None:
        self._head, self._target, self._int8 = head, target, int8
        self.least_rows = 1  # see `EngineInfo.least_rows`; complete once every weight has been read

    def array(self, name: str) -> np.ndarray:
        """float32 value of a tensor of the head by its canonical name, a leading `model.` allowed."""
        return self._head.array(name.removeprefix("model."))

    def linear(self, modules: Sequence[str]) -> Linear:
        """The projections `modules`, which read the same input, as one; rows in their order."""
        if list(modules) == ["lm_head"]:
            return self._output_layer()
        return self._own(modules)

    def _own(self, modules: Sequence[str]) -> Linear:
        names = [module.removeprefix("model.") for module in modules]
        linear = self._product(np.concatenate([self._head.array(f"{name}.weight") for name in names]))
        biases = [self._head.array(f"{n}.bias") for n in names if f"{n}.bias" in self._head]
        return replace(linear, bias=np.concatenate(biases)) if biases else linear

    def _product(self, weight: np.ndarray) -> Linear:
        packed = packed_linear([int8_rows(weight)]) if self._int8 else None
        if packed is None:
            self.least_rows = 2
        return packed or Linear(weight, *weight.shape)

    def stored(self, module: str) -> QuantizedLinear:
        """A projection as it is stored: in 16 or 32 bits."""
        return QuantizedLinear("float", self.dense(f"{module}.weight"))

    def bias(self, module: str) -> np.ndarray | None:
        """float32 [out], None where the head has none."""
        name = f"{module}.bias".removeprefix("model.")
        return self._head.array(name) if name in self._head else None

    def dense(self, parameter: str) -> np.ndarray:
        """float32 value. Of an output layer that the head has not, the target's rows of the draft vocabulary."""
        name, kept = parameter.removeprefix("model."), self._head.d2t
        if name != "lm_head.weight" or name in self._head:
            return self._head.array(name)
        weight = self._target.dense(name)
        return weight if kept is None else weight[np.arange(len(kept)) + kept]

    def embedding(self) -> np.ndarray:
        """float32 [V, H]: the head's own table, or the target's."""
        own = "embed_tokens.weight"
        return self._head.array(own) if own in self._head else self._target.embedding()

    def target_norm(self) -> np.ndarray:
        """float32 [Ht]: gain of the target's final norm."""
        return self._target.array("model.norm.weight")

    def _output_layer(self) -> Linear:
        """The head's own, or the target's with the rows of the draft vocabulary."""
        if "lm_head.weight" in self._head:
            return self._own(["lm_head"])
        if self._head.d2t is None and not self._target.shares_head:
            linear = self._target.linear(["lm_head"])
            self.least_rows = max(self.least_rows, self._target.least_rows)
            return linear
        return self._product(self.dense("lm_head.weight"))


class HeadGraph(DecoderGraph):
    """The walk over a head's layers. target_epsilon: of the target's final norm."""

    def __init__(
        self,
        writer: GraphWriter,
        spec: DecoderSpec,
        weights: HeadWeights,
        options: GraphOptions,
        head: Head,
        target_epsilon: float,
    ) -> None:
        super().__init__(writer, spec, weights, options)
        self.head, self.target_epsilon = head, target_epsilon

    def write(self) -> None:
        """Add all nodes and weights and write the files."""
        self._tables()
        normed, residual = self._enter(self._features())
        branch: str | None = None
        for layer in range(self.spec.layers):
            prefix = f"model.layers.{layer}"
            if layer:
                normed, residual = self._add_and_norm(f"{prefix}.input_layernorm", residual, branch)
            attended = self._attention(layer, normed)
            normed, residual = self._add_and_norm(f"{prefix}.post_attention_layernorm", residual, attended)
            branch = self._mlp(f"{prefix}.mlp", normed)
        self._leave(residual, branch)
        self.writer.save(self._inputs(), self._outputs(True), self._functions())

    def _features(self) -> str:
        """The state of every row [N, H]."""
        node = self.writer.node
        node("Concat", [self._fused("captured"), "recycled"], "states", axis=0)
        return node("Gather", ["states", "feature_rows"], "features")

    def _fused(self, captured: str) -> str:
        """The target's states [·, W] as the head reads them, [·, H]."""
        if not self.head.captured_layers:  # the last state, as the target's output layer reads it
            return self._target_norm(captured)
        if "input_norm.weight" in self.head:
            captured = self._norm("input_norm", captured)
        if self.head.config["fc_norm"]:
            captured = self._norm_each(captured)
        return self._linear("fc", captured, ["fc"])

    def _target_norm(self, state: str) -> str:
        gamma = self.writer.constant("target.norm.weight", self.weights.target_norm())
        return rms_norm(self.writer, state, gamma, self.target_epsilon, "target.norm")

    def _norm_each(self, captured: str) -> str:
        """A norm of its own for each captured layer."""
        parts = [f"captured.{i}" for i in range(len(self.head.captured_layers))]
        self.writer.node("Split", [captured], parts, axis=-1, num_outputs=len(parts))
        normed = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)]
        return self.writer.node("Concat", normed, "captured.normed", axis=-1)

    def _enter(self, features: str) -> tuple[str, str]:
        """What the first layer's attention reads, and the residual stream it adds to."""
        concat, first = self._concat, "model.layers.0"
        if self.head.method == "mtp":
            pair = [self._norm(f"{first}.enorm", "embedded"), self._norm(f"{first}.hnorm", features)]
            residual = self._linear("eh_proj", concat(*pair), [f"{first}.eh_proj"])
            return self._norm(f"{first}.input_layernorm", residual), residual
        if self.head.method in eagle.THREE:
            embedded = self._norm(f"{first}.input_layernorm", "embedded")
            normed = self._norm(f"{first}.hidden_norm", features)
            residual = normed if self.head.config["norm_before_residual"] else features
            return concat(embedded, normed), residual
        residual = self._linear("fc", concat("embedded", features), ["fc"])
        if f"{first}.input_layernorm.weight".removeprefix("model.") not in self.head:
            return residual, residual
        return self._norm(f"{first}.input_layernorm", residual), residual

    def _leave(self, residual: str, branch: str) -> None:
        """Logits, and what is recycled."""
        norm = {"mtp": "layers.0.shared_head.norm"}.get(self.head.method, "norm")
        if f"{norm}.weight" not in self.head:
            scored = kept = self.writer.node("Add", [residual, branch], "last")
        else:
            scored, kept = self._add_and_norm(f"model.{norm}", residual, branch)
        after = self.head.method == "mtp" or bool(self.head.config.get("norm_output"))
        self._hidden([scored if after else kept])
        self._head(scored)

    def _norm(self, name: str, source: str) -> str:
        name = name.removeprefix("model.")
        gamma = self.writer.constant(f"{name}.weight", self.weights.array(f"{name}.weight"))
        return rms_norm(self.writer, source, gamma, self.spec.norm_epsilon, f"{name}.out")

    def _concat(self, embedded: str, state: str) -> str:
        return self.writer.node("Concat", [embedded, state], "pair", axis=-1)

    def _step_inputs(self) -> list[onnx.ValueInfoProto]:
        hidden = self.spec.hidden_size
        pairs = [
            tensor("embedded", TensorProto.FLOAT, ["N", hidden]),
            tensor("captured", TensorProto.FLOAT, ["C", captured_width(self.head)]),
            tensor("recycled", TensorProto.FLOAT, ["R", hidden]),
            tensor("feature_rows", TensorProto.INT64, ["N"]),
        ]
        return pairs + [given for given in super()._step_inputs() if given.name != "input_ids"]

    def _outputs(self, tapped: bool) -> list[onnx.ValueInfoProto]:
        return [*super()._outputs(False), tensor("hidden", TensorProto.FLOAT, ["N", self.spec.hidden_size])]
