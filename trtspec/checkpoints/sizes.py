"""Widths and counts that a configuration states under many names."""

from __future__ import annotations

from trtspec.checkpoints.config_view import HIDDEN_KEYS, ConfigView

# Classes whose mixture always has a shared expert, stated or not.
_ALWAYS_SHARED_EXPERT = frozenset(
    ["qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "llama4", "llama4_text"]
)


def hidden_size(view: ConfigView) -> int | None:
    """Width of the residual stream."""
    return view.integer(*HIDDEN_KEYS, minimum=1)


def ffn_size(view: ConfigView, index: int = 0) -> int | None:
    """Width of a dense FFN layer (per-layer lists are honoured)."""
    listed = view.integers("intermediate_size")
    if listed:
        return listed[min(index, len(listed) - 1)]
    names = (
        "intermediate_size",
        "ffn_hidden_size",
        "n_inner",
        "ffn_dim",
        "ffn_config.ffn_hidden_size",
        "inner_dim",
    )
    stated = view.integer(*names)
    if view.string("model_type") == "granitemoehybrid":  # its dense layers are called shared
        stated = view.integer("shared_intermediate_size") or stated
    hidden = hidden_size(view)
    if stated or hidden is None:
        return stated
    ratio = view.number("expansion_ratio", "mlp_ratio")
    if ratio:
        return int(ratio * hidden)
    # GPT-2, GPT-J, BLOOM and Falcon leave 4·hidden unsaid.
    return (
        4 * hidden
        if view.string("model_type") in ("gpt2", "gptj", "bloom", "falcon", "gpt_bigcode", "mpt")
        else None
    )


def expert_size(view: ConfigView) -> int | None:
    """Width of one routed expert."""
    names = (
        "moe_intermediate_size",
        "moe_ffn_hidden_size",
        "expert_ffn_hidden_size",
        "expert_intermediate_size",
    )
    listed = view.integers(*names)
    return (max(listed) if listed else view.integer(*names)) or view.integer(
        "intermediate_size", "ffn_config.ffn_hidden_size"
    )


def experts_per_token(view: ConfigView) -> int | None:
    """Routed experts each token visits."""
    names = (
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "moe_top_k",
        "moe_topk",
        "moe_k",
    )
    listed = view.integers(*names)
    more = ("top_k_experts", "num_selected_experts", "ffn_config.moe_top_k")
    return max(listed) if listed else view.integer(*names, *more, minimum=1)


def shared_expert_size(view: ConfigView, assumed: list[str]) -> int:
    """Width of the always-active expert, all shared experts together; 0 where there is none."""
    stated = view.integer(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    )
    count = view.integer(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"
    )
    width = expert_size(view) or 0
    model_type = view.string("model_type") or ""
    if stated:
        return stated * (count or 1) if model_type == "nemotron_h" else stated
    if count:
        if model_type == "nemotron_h":
            assumed.append("moe_shared_expert_intermediate_size")
        return count * width
    if model_type in ("llama4", "llama4_text"):
        return width
    if count is None and model_type in _ALWAYS_SHARED_EXPERT:
        assumed.append("shared_expert_intermediate_size")
        return width
    return 0


def nas_ffn_size(view: ConfigView, index: int, hidden: int) -> int | None:
    """FFN width of a searched block: stated, or ffn_mult·2/3·hidden rounded up to 256 (DeciLM)."""
    blocks = view.get("block_configs")
    if not isinstance(blocks, list) or index >= len(blocks):
        return None
    ffn = blocks[index].get("ffn") or {}
    if ffn.get("intermediate_size"):
        return int(ffn["intermediate_size"])
    multiplier = ffn.get("ffn_mult")
    return None if not multiplier else -(-int(2 * multiplier * hidden / 3) // 256) * 256
