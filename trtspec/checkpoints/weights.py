"""Parameters and bytes of a decoder by weight class, from its module list and, where present, its files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.layers import LayerSpec, expert_count
from trtspec.checkpoints.modules import (
    Missing,
    Module,
    WeightClass,
    embedding_modules,
    input_widths,
    layer_modules,
)
from trtspec.checkpoints.quant_metadata import ExcludeList, QuantizationFacts
from trtspec.checkpoints.safetensors_header import TensorInfo
from trtspec.checkpoints.sizes import experts_per_token, hidden_size

# Never quantized whatever the format says: tables that are looked up, and routers.
_ALWAYS_16_BIT = frozenset({"embedding", "router"})
# `expert_dtype`: bytes per weight of the experts, block scales included.
_EXPERT_DTYPES = {"fp4": 0.5 + 1 / 32, "fp8": 1.0, "bf16": 2.0}


@dataclass(frozen=True, slots=True)
class ClassWeights:
    """All weights of one class. bytes: as stored, scales included."""

    kind: WeightClass
    parameters: int
    bytes: float


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Sizes of a decoder without its MTP layers.

    experts, experts_per_token, moe_layers: of the routed mixture (0 for dense models). assumed: keys the
    configuration lacks and a class default stood in for; sizes are then an estimate, not a fact.
    widths: input width of each kind of linear module. mtp: weights of one MTP layer, by class.
    """

    classes: tuple[ClassWeights, ...]
    experts: int = 0
    experts_per_token: int = 0
    moe_layers: int = 0
    assumed: tuple[str, ...] = ()
    widths: tuple[tuple[str, int], ...] = ()
    mtp: tuple[ClassWeights, ...] = ()

    def of(self, kind: WeightClass) -> ClassWeights:
        """The weights of one class (zero where it has none)."""
        return next((c for c in self.classes if c.kind == kind), ClassWeights(kind, 0, 0.0))

    @property
    def parameters(self) -> int:
        """All parameters, MTP layers not counted."""
        return sum(c.parameters for c in self.classes)

    @property
    def active_parameters(self) -> int:
        """Parameters one token uses: of the routed experts only those it visits; of the embedding none."""
        total = 0.0
        for c in self.classes:
            share = self.experts_per_token / self.experts if c.kind == "expert" and self.experts else 1.0
            total += 0 if c.kind == "embedding" else c.parameters * share
        return round(total)

    @property
    def bytes(self) -> float:
        """All bytes as stored, MTP layers not counted."""
        return sum(c.bytes for c in self.classes)


def read_weights(
    view: ConfigView,
    layers: Sequence[LayerSpec] | None,
    tied: bool | None,
    quantization: QuantizationFacts,
    dtype_bytes: float,
    tensors: Mapping[str, TensorInfo] | None,
    warnings: list[str],
) -> WeightFacts | None:
    """Sizes by class; None (and a warning naming the key) where the file does not say enough."""
    if layers is None:
        return None
    assumed: list[str] = []
    try:
        modules = [m for i, layer in enumerate(layers) for m in layer_modules(view, i, layer, assumed)]
        modules += embedding_modules(view, tied)
        mtp = _mtp_modules(view, layers, assumed)
    except Missing as missing:
        if tensors and quantization.algorithm is None:
            warnings.append(f"the file does not state {missing.key}: sizes are those of the stored tensors")
            return WeightFacts(classes=_from_tensors(tensors, len(layers)), assumed=(missing.key,))
        warnings.append(f"the file does not state {missing.key}: sizes are not known")
        return None
    has_experts = any(layer.ffn == "moe" for layer in layers)
    per_token = experts_per_token(view) if has_experts else 0
    if per_token is None:
        warnings.append("the file does not state num_experts_per_tok: sizes are not known")
        return None
    if (
        view.string("model_type") in ("llama4", "llama4_text")
        and view.integer("interleave_moe_layer_step") is None
    ):
        assumed.append("interleave_moe_layer_step")
    assumed = sorted(set(assumed))
    if assumed:
        warnings.append(
            f"the file does not state {', '.join(assumed)}: parameters are not known; "
            "the planner uses the model class's usual value and says so"
        )
    exclude = ExcludeList(quantization.exclude)
    expert_bytes = _EXPERT_DTYPES.get(view.string("expert_dtype") or "")
    classes = _by_class(modules, quantization, exclude, dtype_bytes, hidden_size(view) or 0, expert_bytes)
    if tensors:
        classes = _stored_bytes(classes, tensors, len(layers))
    return WeightFacts(
        classes=classes,
        experts=expert_count(view) if has_experts else 0,
        experts_per_token=per_token or 0,
        moe_layers=sum(layer.ffn == "moe" for layer in layers),
        assumed=tuple(assumed),
        widths=tuple(input_widths(modules).items()),
        mtp=_by_class(mtp, QuantizationFacts(), ExcludeList(()), dtype_bytes) if mtp else (),
    )


def _mtp_modules(view: ConfigView, layers: Sequence[LayerSpec], assumed: list[str]) -> list[Module]:
    """One MTP module (DeepSeek-V3, 2412.19437, section 2.2): a layer like the last one and a 2H → H projection."""
    last = next((layer for layer in reversed(layers) if layer.kind not in ("none", "linear")), None)
    hidden = hidden_size(view)
    if last is None or hidden is None:
        return []
    ffn = (
        layers[-1].ffn
        if layers[-1].ffn != "none"
        else next((x.ffn for x in reversed(layers) if x.ffn != "none"), "none")
    )
    spec = LayerSpec(last.kind, ffn, last.heads, last.kv_heads, last.head_dim, last.window)
    index = len(layers) - 1
    return [
        *layer_modules(view, index, spec, assumed),
        Module("mtp.eh_proj", "attention", 2 * hidden, hidden, extra=3 * hidden),
    ]


def _by_class(
    modules: Sequence[Module],
    quantization: QuantizationFacts,
    exclude: ExcludeList,
    dtype_bytes: float,
    final_norm: int = 0,
    expert_bytes: float | None = None,
) -> tuple[ClassWeights, ...]:
    totals: dict[WeightClass, list[float]] = {}
    for module in modules:
        quantized = (
            quantization.weight_bytes is not None
            and module.kind not in _ALWAYS_16_BIT
            and (module.kind == "expert" or not quantization.only_experts)
            and not exclude.matches(module.name)
        )
        size = quantization.weight_bytes if quantized else dtype_bytes
        if module.kind == "expert" and expert_bytes is not None:
            size = expert_bytes
        entry = totals.setdefault(module.kind, [0, 0.0])
        entry[0] += module.parameters
        entry[1] += module.parameters * (size or dtype_bytes)
    if final_norm and "embedding" in totals:
        totals["embedding"][0] += final_norm
        totals["embedding"][1] += final_norm * dtype_bytes
    return tuple(ClassWeights(kind, int(count), size) for kind, (count, size) in totals.items())


# First match wins; the order matters (shared experts before experts, experts before mlp).
_TENSOR_CLASSES: tuple[tuple[re.Pattern[str], WeightClass | None], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(^|\.)(mtp|nextn|eh_proj|visual|vision|audio)|vision_tower|multi_modal_projector", None),
        (r"lm_head|output_layer", "lm_head"),
        (r"embed_tokens|word_embeddings|\bwte\b|\bwpe\b|embeddings\.weight", "embedding"),
        (r"shared_expert", "shared_expert"),
        (r"\.experts\.", "expert"),
        (r"\.(gate|router|ffn_gate_inp)\.(weight|bias|e_score)|\.router\.", "router"),
        (
            r"linear_attn|\.mamba\.|\.ssm|\.mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|norm)",
            "linear_attention",
        ),
        (r"self_attn|self_attention|\.attn\.|\.attention\.|\.mixer\.[qkvo]_proj", "attention"),
        (r"\.(mlp|feed_forward|ffn|mixer)\.", "ffn"),
    )
)


def classify_tensor(name: str, layer_count: int) -> WeightClass | None:
    """The class of a stored tensor; None for MTP layers (numbered past the last layer, or named), vision and norms."""
    layer = re.search(r"layers\.(\d+)\.", name)
    if layer and int(layer.group(1)) >= layer_count:
        return None
    return next((kind for pattern, kind in _TENSOR_CLASSES if pattern.search(name)), None)


def _stored_bytes(
    classes: tuple[ClassWeights, ...], tensors: Mapping[str, TensorInfo], layer_count: int
) -> tuple[ClassWeights, ...]:
    """Replace computed bytes by the files' own, class by class, where the files have that class."""
    stored: dict[WeightClass, int] = {}
    for tensor in tensors.values():
        kind = classify_tensor(tensor.name, layer_count)
        if kind is not None:
            stored[kind] = stored.get(kind, 0) + tensor.nbytes
    return tuple(ClassWeights(c.kind, c.parameters, float(stored.get(c.kind, c.bytes))) for c in classes)


def _from_tensors(tensors: Mapping[str, TensorInfo], layer_count: int) -> tuple[ClassWeights, ...]:
    """Classes of an unquantized checkpoint whose configuration does not give its shapes."""
    totals: dict[WeightClass, list[int]] = {}
    for tensor in tensors.values():
        kind = classify_tensor(tensor.name, layer_count)
        if kind is not None:
            entry = totals.setdefault(kind, [0, 0])
            entry[0] += tensor.elements
            entry[1] += tensor.nbytes
    return tuple(ClassWeights(kind, count, float(size)) for kind, (count, size) in totals.items())
