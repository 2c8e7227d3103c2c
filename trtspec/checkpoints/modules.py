"""The linear modules of a decoder, from its configuration alone: names, widths, classes, copies.

Everything about size derives from this one list: parameter counts, bytes under a quantization with its
exclusions, the widths a block size must divide. Names are canonical (`layers.3.self_attn.q_proj`, experts
once as `layers.3.mlp.experts.*.up_proj` with `copies`), whatever the checkpoint's prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.layers import LayerSpec, expert_count
from trtspec.checkpoints.sizes import expert_size, ffn_size, hidden_size, nas_ffn_size, shared_expert_size

WeightClass = Literal[
    "embedding", "lm_head", "attention", "linear_attention", "ffn", "expert", "shared_expert", "router"
]

# FFNs of two matrices (up, down) instead of three (gate, up, down).
_UNGATED = frozenset(
    [
        "nemotron_h",
        "nemotron",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "starcoder2",
        "codegen",
        "arcee",
    ]
)
# Classes with a bias on q, k and v that their configuration does not mention.
_QKV_BIAS = frozenset(["qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "gpt2", "gpt_bigcode", "opt", "bloom"])
_QK_NORM = frozenset(
    ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma3", "gemma3_text"]
)
_FOUR_NORMS = frozenset(["gemma2", "gemma3", "gemma3_text", "gemma4_text"])


@dataclass(frozen=True, slots=True)
class Module:
    """A weight of `out_features` × `in_features` (plus `extra` elements: biases, norms), `copies` times."""

    name: str
    kind: WeightClass
    in_features: int
    out_features: int
    copies: int = 1
    extra: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all copies."""
        return (self.in_features * self.out_features + self.extra) * self.copies


class Missing(Exception):
    """A key that a size depends on is absent; `key` names it. Never leaves this package."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def layer_modules(view: ConfigView, index: int, layer: LayerSpec, assumed: list[str]) -> Iterator[Module]:
    """The modules of one decoder layer. `assumed` collects keys that were filled in; raises Missing."""
    yield from _mixer(view, index, layer, assumed)
    yield from _ffn(view, index, layer, assumed)


def embedding_modules(view: ConfigView, tied: bool | None) -> Iterator[Module]:
    """Embedding table and, unless tied, the output layer. `tied` None counts both (the larger reading)."""
    vocab, hidden = (
        _need(view.integer("vocab_size", "padded_vocab_size", minimum=1), "vocab_size"),
        _hidden(view),
    )
    yield Module("embed_tokens", "embedding", hidden, vocab)
    learned = (
        view.integer("n_positions", "n_ctx") if view.string("model_type") in ("gpt2", "gpt_bigcode") else None
    )
    if learned:
        yield Module("embed_positions", "embedding", hidden, learned)
    if tied is not True:
        yield Module("lm_head", "lm_head", hidden, vocab)


def _mixer(view: ConfigView, index: int, layer: LayerSpec, assumed: list[str]) -> Iterator[Module]:
    if layer.kind == "none":
        return
    hidden = _hidden(view)
    prefix = f"layers.{index}.self_attn"
    norm = hidden * (2 if view.string("model_type") in _FOUR_NORMS else 1)
    if layer.kind == "linear":
        yield from _recurrent(view, index, hidden, assumed)
        return
    heads = _need(layer.heads, "num_attention_heads")
    if view.integer("kv_lora_rank"):
        yield from _latent(view, prefix, hidden, heads, norm)
        return
    head_dim = _need(layer.head_dim, "head_dim")
    kv_heads = _need(layer.kv_heads, "num_key_value_heads")
    value_dim = view.integer("v_head_dim") or head_dim
    bias = view.flag("attention_bias", "qkv_bias", "use_qkv_bias")
    bias = bias if bias is not None else view.string("model_type") in _QKV_BIAS
    sinks = heads if view.string("model_type") == "gpt_oss" else 0
    qk_norm = view.string("model_type") in _QK_NORM or bool(view.flag("use_qk_norm", "qk_norm"))
    query = heads * head_dim
    query_rank = view.integer("q_lora_rank")
    if query_rank:
        yield Module(f"{prefix}.q_a_proj", "attention", hidden, query_rank, extra=query_rank)
        yield Module(f"{prefix}.q_b_proj", "attention", query_rank, query)
        assumed.append("the shape of the attention output")  # DeepSeek-V4 factors it; its keys do not say how
    else:
        gate = 2 if view.flag("attn_output_gate") or view.string("model_type") == "qwen3_next" else 1
        yield Module(
            f"{prefix}.q_proj",
            "attention",
            hidden,
            query * gate,
            extra=query * bias + sinks + qk_norm * 2 * head_dim,
        )
    yield Module(
        f"{prefix}.k_proj", "attention", hidden, kv_heads * head_dim, extra=kv_heads * head_dim * bias
    )
    if not (view.flag("attention_k_eq_v") and layer.kind == "full"):
        yield Module(
            f"{prefix}.v_proj", "attention", hidden, kv_heads * value_dim, extra=kv_heads * value_dim * bias
        )
    out_bias = (
        hidden
        if bias and view.string("model_type") in ("gpt_oss", "gpt2", "gpt_bigcode", "opt", "bloom")
        else 0
    )
    yield Module(f"{prefix}.o_proj", "attention", heads * value_dim, hidden, extra=norm + out_bias)


def _latent(view: ConfigView, prefix: str, hidden: int, heads: int, norm: int) -> Iterator[Module]:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1)."""
    rank = _need(view.integer("kv_lora_rank"), "kv_lora_rank")
    rope = view.integer("qk_rope_head_dim") or 0
    nope = _need(view.integer("qk_nope_head_dim"), "qk_nope_head_dim")
    value = _need(view.integer("v_head_dim"), "v_head_dim")
    query_rank = view.integer("q_lora_rank")
    if query_rank:
        yield Module(f"{prefix}.q_a_proj", "attention", hidden, query_rank, extra=query_rank)
        yield Module(f"{prefix}.q_b_proj", "attention", query_rank, heads * (nope + rope))
    else:
        yield Module(f"{prefix}.q_proj", "attention", hidden, heads * (nope + rope))
    yield Module(f"{prefix}.kv_a_proj_with_mqa", "attention", hidden, rank + rope, extra=rank)
    yield Module(f"{prefix}.kv_b_proj", "attention", rank, heads * (nope + value))
    yield Module(f"{prefix}.o_proj", "attention", heads * value, hidden, extra=norm)
    index_heads, index_dim = view.integer("index_n_heads"), view.integer("index_head_dim")
    if index_heads and index_dim and query_rank:  # DeepSeek sparse attention
        yield Module(f"{prefix}.indexer.wq_b", "attention", query_rank, index_heads * index_dim)
        yield Module(f"{prefix}.indexer.wk", "attention", hidden, index_dim, extra=2 * index_dim)
        yield Module(f"{prefix}.indexer.weights_proj", "attention", hidden, index_heads)


def _recurrent(view: ConfigView, index: int, hidden: int, assumed: list[str]) -> Iterator[Module]:
    """Projections of a recurrent layer: Gated DeltaNet (Qwen3-Next, Qwen3.5), Mamba-2 or Mamba."""
    prefix = f"layers.{index}.linear_attn"
    if view.integer("linear_num_value_heads") and view.integer("linear_num_key_heads"):
        yield from _delta_net(view, prefix, hidden)
    elif view.integer("mamba_num_heads", "mamba_n_heads") or view.string("model_type") == "mamba2":
        yield from _mamba2(view, prefix, hidden, assumed)
    elif view.integer("mamba_dt_rank", "time_step_rank"):
        yield from _mamba(view, prefix, hidden)
    else:
        raise Missing("the widths of its recurrent layers")


def _delta_net(view: ConfigView, prefix: str, hidden: int) -> Iterator[Module]:
    key_heads, value_heads = (
        view.integer("linear_num_key_heads") or 0,
        view.integer("linear_num_value_heads") or 0,
    )
    keys = key_heads * _need(view.integer("linear_key_head_dim"), "linear_key_head_dim")
    value_dim = _need(view.integer("linear_value_head_dim"), "linear_value_head_dim")
    values = value_heads * value_dim
    conv = (2 * keys + values) * (view.integer("linear_conv_kernel_dim") or 4)
    yield Module(f"{prefix}.in_proj_qkvz", "linear_attention", hidden, 2 * keys + 2 * values, extra=conv)
    yield Module(f"{prefix}.in_proj_ba", "linear_attention", hidden, 2 * value_heads, extra=2 * value_heads)
    yield Module(f"{prefix}.out_proj", "linear_attention", values, hidden, extra=hidden + value_dim)


def _mamba2(view: ConfigView, prefix: str, hidden: int, assumed: list[str]) -> Iterator[Module]:
    heads = _need(view.integer("mamba_num_heads", "mamba_n_heads", "num_heads"), "mamba_num_heads")
    head_dim = view.integer("mamba_head_dim", "mamba_d_head") or view.integer("head_dim")
    if view.string("mamba_d_head") == "auto" or head_dim is None:
        head_dim = _need(view.integer("mamba_expand", "expand"), "mamba_head_dim") * hidden // heads
    state = _need(view.integer("ssm_state_size", "mamba_d_state", "state_size"), "ssm_state_size")
    groups = view.integer("n_groups", "mamba_n_groups")
    if groups is None:
        groups = 8
        assumed.append("n_groups")
    inner = heads * head_dim
    mixed = inner + 2 * groups * state
    conv = mixed * ((view.integer("conv_kernel", "mamba_d_conv") or 4) + 1)
    yield Module(f"{prefix}.in_proj", "linear_attention", hidden, inner + mixed + heads, extra=conv)
    yield Module(f"{prefix}.out_proj", "linear_attention", inner, hidden, extra=hidden + inner + 3 * heads)


def _mamba(view: ConfigView, prefix: str, hidden: int) -> Iterator[Module]:
    inner = view.integer("mamba_expand", "expand")
    inner = inner * hidden if inner else _need(view.integer("intermediate_size"), "mamba_expand")
    rank = _need(view.integer("mamba_dt_rank", "time_step_rank"), "mamba_dt_rank")
    state = _need(view.integer("mamba_d_state", "state_size"), "mamba_d_state")
    conv = inner * ((view.integer("mamba_d_conv", "conv_kernel") or 4) + 1)
    yield Module(f"{prefix}.in_proj", "linear_attention", hidden, 2 * inner, extra=conv)
    yield Module(f"{prefix}.x_proj", "linear_attention", inner, rank + 2 * state)
    yield Module(f"{prefix}.dt_proj", "linear_attention", rank, inner, extra=inner * (state + 2))
    yield Module(f"{prefix}.out_proj", "linear_attention", inner, hidden, extra=hidden)


def _ffn(view: ConfigView, index: int, layer: LayerSpec, assumed: list[str]) -> Iterator[Module]:
    if layer.ffn == "none":
        return
    hidden = _hidden(view)
    gated = view.string("model_type") not in _UNGATED
    norm = hidden * (2 if view.string("model_type") in _FOUR_NORMS else 1)
    if layer.ffn == "dense":
        width = (
            nas_ffn_size(view, index, hidden)
            or view.integer("intermediate_size_mlp")
            or ffn_size(view, index)
        )
        yield from _mlp(f"layers.{index}.mlp", "ffn", hidden, _need(width, "intermediate_size"), gated, norm)
        return
    experts = expert_count(view)
    yield Module(f"layers.{index}.mlp.gate", "router", hidden, experts, extra=norm)
    width = _need(expert_size(view), "moe_intermediate_size")
    bias = view.string("model_type") == "gpt_oss"
    inner = view.integer("moe_latent_size", minimum=1) or hidden
    if inner != hidden:  # Nemotron 3: experts work in a narrower space that all of them share
        yield Module(f"layers.{index}.mlp.fc1_latent_proj", "shared_expert", hidden, inner)
        yield Module(f"layers.{index}.mlp.fc2_latent_proj", "shared_expert", inner, hidden)
    yield from _mlp(f"layers.{index}.mlp.experts.*", "expert", inner, width, gated, 0, experts, bias)
    shared = shared_expert_size(view, assumed)
    if shared:
        yield from _mlp(f"layers.{index}.mlp.shared_experts", "shared_expert", hidden, shared, gated, 0)


def _mlp(
    prefix: str,
    kind: WeightClass,
    hidden: int,
    width: int,
    gated: bool,
    extra: int,
    copies: int = 1,
    bias: bool = False,
) -> Iterator[Module]:
    for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield Module(f"{prefix}.{name}", kind, hidden, width, copies, extra=width * bias)
    yield Module(f"{prefix}.down_proj", kind, width, hidden, copies, extra=extra + hidden * bias)


def input_widths(modules: Sequence[Module]) -> dict[str, int]:
    """Module name without its layer number → input width, for checking block sizes."""
    widths: dict[str, int] = {}
    for module in modules:
        if module.kind not in ("embedding", "router"):
            widths.setdefault(
                module.name.split(".", 2)[-1] if module.name.startswith("layers.") else module.name,
                module.in_features,
            )
    return widths


def _hidden(view: ConfigView) -> int:
    return _need(hidden_size(view), "hidden_size")


def _need(value: int | None, key: str) -> int:
    if value is None:
        raise Missing(key)
    return value
