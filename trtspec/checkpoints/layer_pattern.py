"""Which layers of a decoder are full, sliding, recurrent or without attention.

Published files say it in a dozen ways: a list of names, a string of letters, a period, a list of indices, a
window alone. What the file leaves to the model class's published default is used and said; what nobody can know
is said and counted as full attention, which never understates memory.
"""

from __future__ import annotations

from typing import Literal

from trtspec.checkpoints.config_view import ConfigView

Kind = Literal["full", "sliding", "mla", "linear", "none"]
Ffn = Literal["dense", "moe", "none"]
KindAndWindow = tuple[Kind, int | None]

# More layers than any model has: a larger number is a damaged file.
MAX_LAYERS = 4096

_FULL: KindAndWindow = ("full", None)
_LINEAR: KindAndWindow = ("linear", None)
# Names found in layer_types, layers_block_type, block_types.
_NAMES: dict[str, Kind] = {
    **dict.fromkeys(
        ("full_attention", "attention", "global", "global_attention", "self_attention", "full", "hybrid"),
        "full",
    ),
    **dict.fromkeys(
        ("sliding_attention", "sliding_window_attention", "local_attention", "local", "sliding", "swa"),
        "sliding",
    ),
    **dict.fromkeys(("chunked_attention",), "sliding"),
    **dict.fromkeys(
        (
            "linear_attention",
            "mamba",
            "mamba2",
            "recurrent",
            "conv",
            "short_conv",
            "gated_deltanet",
            "kda",
            "lightning_attention",
            "rwkv",
            "ssm",
        ),
        "linear",
    ),
    **dict.fromkeys(("moe", "mlp", "ffn", "identity", "skip", "no_op"), "none"),
}
# Letters of hybrid_override_pattern: (attention, FFN). Each letter is a whole block of one kind.
LETTERS: dict[str, tuple[Kind, Ffn]] = {
    "M": ("linear", "none"),
    "*": ("full", "none"),
    "-": ("none", "dense"),
    "E": ("none", "moe"),
}
# Every n-th layer is full attention by the class's published default when the file has a window but no pattern.
_DEFAULT_PERIOD = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "cohere2": 4,
    "gpt_oss": 2,
    "olmo3": 4,
    "exaone4": 4,
}
# Classes whose window, when set, covers every layer.
_ALL_SLIDING = frozenset(
    {"mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral", "ministral3", "mistral3", "pixtral"}
)
_RECURRENT_TYPES = frozenset(
    {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "retnet"}
)


def hybrid_pattern(view: ConfigView) -> str | None:
    """The letter pattern of Nemotron-H style models (`M`, `*`, `-`, `E`)."""
    return view.string("hybrid_override_pattern", "hybrid_pattern")


def listed_kinds(view: ConfigView, warnings: list[str]) -> list[KindAndWindow] | None:
    """Per-layer (kind, window) where the file names it layer by layer."""
    window = view.integer("sliding_window", "sliding_window_size", "attention_window_size", "local_attention")
    pattern = hybrid_pattern(view)
    if pattern:
        unknown = sorted(set(pattern) - set(LETTERS) - {"|"})
        if unknown:
            warnings.append(
                f"hybrid pattern letters {unknown} are unknown: counted as layers without attention"
            )
        return [(LETTERS.get(letter, ("none", "none"))[0], None) for letter in pattern if letter != "|"]
    for key in (
        "layer_types",
        "layers_block_type",
        "layer_type",
        "layers_types",
        "block_types",
        "_block_types",
    ):
        names = view.get(key)
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return _named(view, names, window, warnings)
    hybrid = view.integers("hybrid_layer_pattern")
    if hybrid:
        return [("sliding", window) if flag else _FULL for flag in hybrid]
    attn_types = view.integers("attn_type_list", "layer_attn_types")
    if attn_types:
        return [_FULL if flag else _LINEAR for flag in attn_types]
    ratios = view.integers("compress_ratios")
    if ratios and window:
        return [_FULL if ratio else ("sliding", window) for ratio in ratios]
    return None


def _named(
    view: ConfigView, names: list[str], window: int | None, warnings: list[str]
) -> list[KindAndWindow]:
    count = view.integer("num_hidden_layers", "n_layer", "num_layers")
    repeated = (
        view.get("block_types", "_block_types") == names
    )  # RecurrentGemma: a short pattern, local attention
    if repeated and count and count <= MAX_LAYERS:
        names = [names[index % len(names)] for index in range(count)]
    kinds: list[KindAndWindow] = []
    unknown = sorted({name for name in names if name not in _NAMES})
    if unknown:
        warnings.append(f"unknown layer types {unknown}: counted as full attention")
    for name in names:
        kind = _NAMES.get(name, "full")
        if kind == "sliding" or (kind == "full" and repeated and window):
            span = view.integer("attention_chunk_size") if name == "chunked_attention" else window
            if span is None:
                warnings.append("sliding layers without a window size: counted at full context")
            kinds.append(("sliding", span))
        else:
            kinds.append((kind, None))
    return kinds


def kinds_by_rule(view: ConfigView, count: int, warnings: list[str]) -> list[KindAndWindow]:
    """Per-layer (kind, window) from a period, a list of indices, or the model class's default."""
    model_type = view.string("model_type") or ""
    if model_type in _RECURRENT_TYPES:
        return [_LINEAR] * count
    if model_type == "nemotron_h":
        warnings.append("the file has no layer pattern: all layers are counted as full attention")
    linear = view.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        full = {int(layer) - 1 for layer in linear["full_attn_layers"]}  # counted from 1
        return [_FULL if index in full else _LINEAR for index in range(count)]
    indices = view.integers("attn_layer_indices", "full_attn_idxs", "full_attention_layers")
    if indices:
        return [_FULL if index in indices else _LINEAR for index in range(count)]
    period = view.integer("full_attention_interval", minimum=1)
    if period:
        return [_FULL if (index + 1) % period == 0 else _LINEAR for index in range(count)]
    period = view.integer("attn_layer_period", minimum=1)
    if period:
        offset = view.integer("attn_layer_offset") or 0
        return [_FULL if index % period == offset else _LINEAR for index in range(count)]
    return _windows_by_rule(view, count, model_type, warnings)


def _windows_by_rule(
    view: ConfigView, count: int, model_type: str, warnings: list[str]
) -> list[KindAndWindow]:
    chunk = view.integer("attention_chunk_size")
    if chunk:
        local = view.integers(
            "no_rope_layers"
        )  # Llama 4: 1 = rope and chunks, 0 = full attention without rope
        if local is None or len(local) < count:
            step = view.integer("no_rope_layer_interval") or 4
            local = tuple(int((index + 1) % step != 0) for index in range(count))
            warnings.append(
                f"chunked attention ({chunk} tokens): the file does not list no_rope_layers; "
                f"the class default is used, every {step}th layer full"
            )
        return [("sliding", chunk) if flag else _FULL for flag in local[:count]]
    window = view.integer("sliding_window", "sliding_window_size", "attention_window_size", "local_attention")
    if window is None or view.flag("use_sliding_window") is False:
        return [_FULL] * count
    period = view.get("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    if isinstance(period, str) and period:  # EXAONE: "LLLG"
        return [("sliding", window) if period[i % len(period)] == "L" else _FULL for i in range(count)]
    if view.flag("use_sliding_window") and view.integer("max_window_layers") is not None:
        first = view.integer("max_window_layers") or 0  # Qwen2: layers from this one on slide
        return [("sliding", window) if index >= first else _FULL for index in range(count)]
    if not isinstance(period, int):
        period = _DEFAULT_PERIOD.get(model_type)
        if period:
            warnings.append(
                f"sliding window {window} without a layer pattern in the file: {model_type}'s class default is used, "
                f"every {period}{'nd' if period == 2 else 'th'} layer full"
            )
    if period:
        return [_FULL if (index + 1) % period == 0 else ("sliding", window) for index in range(count)]
    if model_type in _ALL_SLIDING:
        return [("sliding", window)] * count
    warnings.append(
        f"sliding window {window} without a layer pattern: which layers slide is not known, "
        "all are counted as full attention"
    )
    return [_FULL] * count
