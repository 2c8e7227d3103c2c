"""What the graph builder must know of a decoder: read from `config.json`, for the Llama family only.

Llama, SmolLM, SmolLM3, Qwen2, Qwen3 and Mistral differ in a handful of switches; they are the fields of
`DecoderSpec`. Anything else is refused by name: a graph that is almost right is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtspec.checkpoints.config_view import ConfigView, load_view
from trtspec.checkpoints.rope import read_rope
from trtspec.compile.rope import Rope
from trtspec.errors import PlanInfeasible

FAMILIES = ("llama", "smollm3", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A Llama-family decoder.

    Sizes in elements: hidden_size H, intermediate_size F, head_dim d (not always H / heads).
    Biases and a head of its own are where the folder has tensors for them.
    windows: per layer, the number of keys a row sees (itself included), None for full attention.
    rotates: per layer, whether RoPE is applied (SmolLM3 leaves it out of some layers).
    """

    family: str
    vocab_size: int
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    qk_norm: bool
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    rope: Rope


def read_decoder(folder: Path) -> DecoderSpec:
    """The decoder a model folder declares.

    Raises PlanInfeasible for another architecture, an option the graph does not implement or a size the config
    does not state, naming it.
    """
    view = load_view(folder)

    def refuse(what: str, hint: str | None = None) -> PlanInfeasible:
        return PlanInfeasible(f"{what} is not implemented in the graph", where=view.where, hint=hint)

    def size(name: str) -> int:
        value = view.integer(name, minimum=1)
        if value is None:
            raise PlanInfeasible(f"the config does not state {name}", where=view.where)
        return value

    family = view.string("model_type")
    if family not in FAMILIES:
        raise refuse(
            f"model_type {family!r}",
            f"the onnxruntime and tensorrt backends build {', '.join(FAMILIES)}; "
            "use backend tensorrt_llm for other architectures",
        )
    if (activation := view.string("hidden_act") or "silu") != "silu":
        raise refuse(f"hidden_act {activation!r}")
    rope = read_rope(view)
    if rope.partial not in (None, 1.0):
        raise refuse("partial rotary embedding")
    layers, heads, hidden = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
    kv_heads = view.integer("num_key_value_heads", minimum=1) or heads
    head_dim = view.integer("head_dim", minimum=1) or hidden // heads
    if heads % kv_heads:
        raise refuse(f"{heads} query heads over {kv_heads} KV heads (not divisible)")
    if head_dim % 16:
        raise refuse(f"head_dim {head_dim} (the attention kernel takes multiples of 16)")
    positions = view.integer("max_position_embeddings", minimum=1) or 2048
    return DecoderSpec(
        family=family,
        vocab_size=size("vocab_size"),
        layers=layers,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=view.number("rms_norm_eps") or 1e-6,
        qk_norm=family == "qwen3",
        max_position_embeddings=positions,
        windows=_windows(view, family, layers),
        rotates=_rotates(view, family, layers),
        rope=Rope.of(rope, head_dim, positions, where=view.where),
    )


def _windows(view: ConfigView, family: str, layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer: Mistral slides everywhere, Qwen and SmolLM3 only where they say so."""
    window = view.integer("sliding_window")
    if family != "mistral" and not view.flag("use_sliding_window"):
        window = None
    if window is None:
        return (None,) * layers
    if kinds := view.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0 if family == "mistral" else (view.integer("max_window_layers") or 0)
    return tuple(window if layer >= first else None for layer in range(layers))


def _rotates(view: ConfigView, family: str, layers: int) -> tuple[bool, ...]:
    """SmolLM3's `no_rope_layers` holds 1 for layers that do rotate (the name says the opposite)."""
    if family != "smollm3":
        return (True,) * layers
    if flags := view.integers("no_rope_layers"):
        return tuple(bool(flag) for flag in flags)
    interval = view.integer("no_rope_layer_interval", minimum=1) or 4
    return tuple((layer + 1) % interval != 0 for layer in range(layers))
