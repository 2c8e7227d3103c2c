"""What every layer of a decoder is: its attention shape and its FFN, one `LayerSpec` each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtspec.checkpoints.config_view import HIDDEN_KEYS, ConfigView
from trtspec.checkpoints.layer_pattern import (
    LETTERS,
    MAX_LAYERS,
    Ffn,
    Kind,
    hybrid_pattern,
    kinds_by_rule,
    listed_kinds,
)
from trtspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. heads, kv_heads: query and cache heads (MLA: one latent cache head). head_dim: width of a query/key
    head (MLA: of the absorbed latent key, rank plus rope). window: tokens a sliding or chunked layer sees."""

    kind: Kind
    ffn: Ffn
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None

    @property
    def group(self) -> int | None:
        """Query heads that share one cache head: G."""
        return self.heads // self.kv_heads if self.heads and self.kv_heads else None


def read_layers(view: ConfigView, warnings: list[str]) -> tuple[LayerSpec, ...] | None:
    """One spec per decoder layer, in order; None (and a warning) where the file does not say how many there are.

    Raises ConfigError for a pattern shorter than the model and for query heads that KV heads do not divide.
    """
    blocks = view.get("block_configs")
    if isinstance(blocks, list) and blocks and isinstance(blocks[0], dict):
        return tuple(_nas_layer(view, block) for block in blocks)
    kinds = listed_kinds(view, warnings)
    count = view.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
    if count is None:
        count = len(kinds) if kinds is not None else None
    if count is None:
        warnings.append("the file does not say how many layers there are (num_hidden_layers)")
        return None
    if count > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {count}, more than {MAX_LAYERS}", where=view.where)
    if kinds is not None and len(kinds) < count:
        raise ConfigError(
            f"the per-layer pattern names {len(kinds)} layers, num_hidden_layers is {count}",
            where=view.where,
            hint="one of the two keys is wrong",
        )
    if kinds is None:
        kinds = kinds_by_rule(view, count, warnings)
    return tuple(
        _with_heads(view, index, kind, window, _ffn(view, index, count))
        for index, (kind, window) in enumerate(kinds[:count])
    )


def summarize(layers: Sequence[LayerSpec]) -> list[tuple[LayerSpec, int]]:
    """Distinct attention shapes with their layer counts, in order of first appearance (the FFN does not count)."""
    counts: dict[LayerSpec, int] = {}
    for layer in layers:
        shape = replace(layer, ffn="none")
        counts[shape] = counts.get(shape, 0) + 1
    return list(counts.items())


def check_division(heads: int | None, kv_heads: int | None, where: str) -> None:
    """Raise ConfigError where KV heads do not divide query heads: no kernel can group them."""
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads are not a multiple of {kv_heads} KV heads ({heads} % {kv_heads} = "
            f"{heads % kv_heads})",
            where=where,
            hint="num_attention_heads or num_key_value_heads is wrong",
        )


def expert_count(view: ConfigView) -> int:
    """Routed experts of a mixture layer; 0 for dense models. A per-layer list gives its largest entry."""
    names = (
        "n_routed_experts",
        "num_local_experts",
        "num_experts",
        "moe_num_experts",
        "num_moe_experts",
        "ffn_config.moe_num_experts",
    )
    listed = view.integers(*names)
    found = max(listed) if listed else view.integer(*names)
    return found if found and found > 1 else 0


def _ffn(view: ConfigView, index: int, count: int) -> Ffn:
    """Whether layer `index` has a mixture of experts, a dense FFN, or none of its own."""
    pattern = hybrid_pattern(view)
    if pattern:
        letters = pattern.replace("|", "")
        return LETTERS.get(letters[index], ("none", "none"))[1] if index < len(letters) else "none"
    blocks = view.get("layers_block_type")
    if isinstance(blocks, list) and {"moe", "mlp"} & set(map(str, blocks)):
        return {"moe": "moe", "mlp": "dense"}.get(str(blocks[index]), "none")  # type: ignore[return-value]
    if view.string("model_type") in ("mamba", "mamba2", "falcon_mamba"):
        return "none"
    if not expert_count(view):
        return "dense"
    return "moe" if _is_moe_layer(view, index, count) else "dense"


def _is_moe_layer(view: ConfigView, index: int, count: int) -> bool:
    frequency = view.integers("moe_layer_freq")
    if frequency:
        return index < len(frequency) and bool(frequency[index])
    listed = view.integers("moe_layers", "moe_layers_enum")
    if listed:
        return index in listed
    text = view.string("moe_layers_enum")
    if text:
        return str(index) in text.replace(" ", "").split(",")
    dense = view.integer("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "first_k_dense") or 0
    if index < dense or index in (view.integers("mlp_only_layers") or ()):
        return False
    start, end = view.integer("moe_layer_start_index"), view.integer("moe_layer_end_index")
    if (start is not None and index < start) or (end is not None and index > end):
        return False
    step = view.integer("interleave_moe_layer_step", "moe_layer_interval", minimum=1)
    if step:
        return (index + 1) % step == 0
    step = view.integer("decoder_sparse_step", minimum=1)
    if step:
        return (index + 1) % step == 0
    step = view.integer("expert_layer_period", "moe_layer_freq", minimum=1)
    if step:
        return index % step == (view.integer("expert_layer_offset") or 0)
    return True


def _with_heads(view: ConfigView, index: int, kind: Kind, window: int | None, ffn: Ffn) -> LayerSpec:
    """Attach head counts; MLA replaces full attention where a latent rank is given."""
    spec = LayerSpec(kind, ffn, window=window)
    if kind in ("linear", "none"):
        return spec
    heads = _per_layer(
        view, index, "num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"
    )
    rank = view.integer("kv_lora_rank", minimum=1)
    if rank:
        rope = view.integer("qk_rope_head_dim") or 0
        return replace(
            spec, kind="mla" if kind == "full" else kind, heads=heads, kv_heads=1, head_dim=rank + rope
        )
    head_dim = _head_dim(view, index, heads)
    kv_heads = _kv_heads(view, index, heads)
    if kind == "sliding":
        heads = (
            view.integer("swa_num_attention_heads", "attention_other_setting.num_attention_heads") or heads
        )
        kv_heads = (
            view.integer("swa_num_key_value_heads", "attention_other_setting.num_attention_groups")
            or kv_heads
        )
        head_dim = view.integer("swa_head_dim") or head_dim
    else:
        kv_heads = view.integer("num_global_key_value_heads") or kv_heads
        head_dim = view.integer("global_head_dim") or head_dim
    check_division(heads, kv_heads, view.where)
    return replace(spec, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def _kv_heads(view: ConfigView, index: int, heads: int | None) -> int | None:
    """Cache heads; models that name none have one per query head (MHA), multi-query models have one."""
    if view.flag("multi_query") and not view.flag("new_decoder_architecture"):
        return 1
    if view.string("attn_config.attn_type") == "multiquery_attention":
        return 1
    if view.flag("multi_query_attention"):
        return view.integer("multi_query_group_num") or 1
    names = (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "kv_n_heads",
        "attn_config.kv_n_heads",
        "num_attention_groups",
        "num_query_groups",
        "multi_query_group_num",
    )
    return _per_layer(view, index, *names) or heads


def _head_dim(view: ConfigView, index: int, heads: int | None) -> int | None:
    """Stated head width; hidden/heads only where the file states none (the class default)."""
    stated = _per_layer(view, index, "head_dim", "attention_head_dim", "kv_channels", "head_size", "d_kv")
    if stated:
        return stated
    hidden = view.integer(*HIDDEN_KEYS)
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


def _per_layer(view: ConfigView, index: int, *names: str) -> int | None:
    for name in names:
        listed = view.integers(name)
        if listed:
            return listed[min(index, len(listed) - 1)] or None
        single = view.integer(name)
        if single:
            return single
    return None


def _nas_layer(view: ConfigView, block: dict[str, object]) -> LayerSpec:
    """A block of a searched architecture (DeciLM, Nemotron NAS): attention and FFN may each be absent."""
    attention, ffn = block.get("attention"), block.get("ffn")
    attention = attention if isinstance(attention, dict) else {}
    ffn = ffn if isinstance(ffn, dict) else {}
    kind_ffn: Ffn = "none" if ffn.get("no_op") else ("moe" if ffn.get("moe") else "dense")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return LayerSpec("none", kind_ffn)
    if attention.get("mamba"):
        return LayerSpec("linear", kind_ffn)
    heads = view.integer("num_attention_heads")
    group, kv_heads = attention.get("n_heads_in_group"), attention.get("num_key_value_heads")
    if not kv_heads and isinstance(group, int) and group and heads:
        check_division(heads, heads // group if heads % group == 0 else group, view.where)
        kv_heads = heads // group
    kv_heads = kv_heads if isinstance(kv_heads, int) and kv_heads else heads
    check_division(heads, kv_heads, view.where)
    window = attention.get("window_length") or attention.get("sliding_window_length")
    return LayerSpec(
        "sliding" if window else "full",
        kind_ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(view, 0, heads),
        window=window if isinstance(window, int) else None,
    )
