"""How a checkpoint is quantized, from `hf_quant_config.json` or `quantization_config` in any of their forms.

The forms: ModelOpt's `{producer, quantization}` (a file of its own, or raw inside a draft's config.json),
ModelOpt's compressed-tensors style, compressed-tensors itself, and the `quant_method` families (fp8, mxfp4,
awq, gptq). Producer, group_size and exclude_modules may each be missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from trtspec.checkpoints.config_view import ConfigView
from trtspec.checkpoints.json_file import JsonObject

# algorithm → (bytes per weight with its scales, precision of the matrix multiply)
_ALGORITHMS: dict[str, tuple[float, str]] = {
    "FP8": (1.0, "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (1.0, "fp8"),
    "FP8_PB_WO": (1.0, "bf16"),
    "FP8_BLOCK": (1.0 + 4 / (128 * 128), "fp8"),
    "MXFP8": (1.0 + 1 / 32, "fp8"),
    "W8A8_SQ_PER_CHANNEL": (1.0, "int8"),
    "INT8": (1.0, "int8"),
    "W8A16": (1.0, "bf16"),
    "NVFP4": (0.5 + 1 / 16, "fp4"),
    "NVFP4_AWQ": (0.5 + 1 / 16, "fp4"),
    "NVFP4_SVD": (0.5 + 1 / 16, "fp4"),
    "W4A16_NVFP4": (0.5 + 1 / 16, "bf16"),
    "W4A8_NVFP4_FP8": (0.5 + 1 / 16, "fp8"),
    "MXFP4": (0.5 + 1 / 32, "bf16"),
    "W4A8_MXFP4_FP8": (0.5 + 1 / 32, "fp8"),
    "W4A16": (0.5 + 4 / 128, "bf16"),
    "W4A16_AWQ": (0.5 + 2 / 128, "bf16"),
    "W4A8_AWQ": (0.5 + 2 / 128, "fp8"),
}
_DTYPE_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float": 4.0,
    "half": 2.0,
    "float8_e4m3fn": 1.0,
}


@dataclass(frozen=True, slots=True)
class QuantizationFacts:
    """algorithm: ModelOpt's name, None for an unquantized checkpoint. weight_bytes: per weight, scales included.
    compute: precision of the matrix multiply (bf16, fp8, fp4, int8). kv_dtype: "fp8" or None (follow the activations).
    exclude: module names or globs that stay in 16 bit. only_experts: everything but the experts is 16 bit."""

    algorithm: str | None = None
    weight_bytes: float | None = None
    compute: str = "bf16"
    group_size: int | None = None
    kv_dtype: str | None = None
    exclude: tuple[str, ...] = ()
    only_experts: bool = False


def read_quantization(
    view: ConfigView, hf_quant: JsonObject | None, warnings: list[str]
) -> QuantizationFacts:
    """The quantization of a folder: `hf_quant_config.json` first, then `quantization_config`."""
    inline = view.root.get("quantization_config") or view.get("quantization_config")
    if hf_quant is not None:
        return _modelopt(_mapping(hf_quant.get("quantization")), warnings)
    if not isinstance(inline, Mapping):
        return QuantizationFacts()
    if isinstance(inline.get("quantization"), Mapping):
        return _modelopt(inline["quantization"], warnings)
    kv = _kv_dtype(inline.get("kv_cache_scheme") or inline.get("kv_cache_quant_algo"))
    keys = ("ignore", "exclude_modules", "modules_to_not_convert")
    exclude = tuple(name for key in keys for name in _names(inline.get(key)))
    method = str(inline.get("quant_method") or "")
    algorithm = inline.get("quant_algo")
    if isinstance(algorithm, str) and algorithm.upper() in _ALGORITHMS:
        size, compute = _ALGORITHMS[algorithm.upper()]
        return QuantizationFacts(algorithm.upper(), size, compute, None, kv, exclude)
    if isinstance(inline.get("config_groups"), Mapping):
        return _compressed(inline["config_groups"], kv, exclude, warnings)
    if method == "fp8":
        block = inline.get("weight_block_size")
        name = "FP8_BLOCK" if block else "FP8"
        return QuantizationFacts(name, _ALGORITHMS[name][0], "fp8", None, kv, exclude)
    if method == "mxfp4":
        return QuantizationFacts("MXFP4", _ALGORITHMS["MXFP4"][0], "bf16", 32, kv, exclude, only_experts=True)
    if method in ("awq", "gptq", "autoround", "auto-round"):
        bits = _integer(inline, "bits", "w_bit") or 4
        group = _integer(inline, "group_size", "q_group_size") or 128
        group = group if group > 0 else 4096
        return QuantizationFacts(
            f"W{bits}A16_{method.upper()}", bits / 8 + 2.5 / group, "bf16", group, kv, exclude
        )
    if method == "bitsandbytes":
        bits = 4 if inline.get("load_in_4bit") else 8
        return QuantizationFacts(
            f"BNB_{bits}BIT", bits / 8 + (4 / 64 if bits == 4 else 0), "bf16", None, kv, exclude
        )
    warnings.append(
        f"quantization {method or algorithm or 'without a name'!r} is not known: bytes per weight are not known"
    )
    return QuantizationFacts(str(algorithm or method or "unknown").upper(), None, "bf16", None, kv, exclude)


def dtype_bytes(dtype: str | None) -> float | None:
    """Bytes of one element of a `torch_dtype` name."""
    return None if dtype is None else _DTYPE_BYTES.get(dtype.removeprefix("torch."))


class ExcludeList:
    """Matches canonical module names against exclude_modules, ignore or modules_to_not_convert entries.

    An entry is a name, a glob, a `re:` pattern, or a run of name components; prefixes before `layers.` differ
    between exporters and are ignored.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._names: set[str] = set()
        patterns: list[str] = []
        for entry in entries:
            if entry.startswith("re:") and _compiles(entry[3:]):
                patterns.append(f"(?:.*\\.)?(?:{_strip(entry[3:])}).*")
            elif "*" in entry or "?" in entry:
                patterns.append(f"(?:.*\\.)?{translate(_strip(entry))[4:-3]}(?:\\..*)?")
            else:
                self._names.add(_strip(entry))
        self._pattern = re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None

    def matches(self, name: str) -> bool:
        """Whether `name` (canonical) stays unquantized."""
        parts = name.split(".")
        for start in range(len(parts)):
            for end in range(start + 1, len(parts) + 1):
                if ".".join(parts[start:end]) in self._names:
                    return True
        return bool(self._pattern and self._pattern.fullmatch(name))


def _compiles(pattern: str) -> bool:
    try:
        re.compile(_strip(pattern))
    except re.error:
        return False
    return True


def _strip(entry: str) -> str:
    """Drop whatever stands before `layers.`; drop a leading `model.` elsewhere."""
    found = re.search(r"layers\\?\.", entry)
    if found and entry[: found.start()].replace(".", "").replace("\\", "").replace("_", "").isalpha():
        return entry[found.start() :]
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if entry.startswith(prefix):
            return entry[len(prefix) :]
    return entry


def _modelopt(quantization: Mapping[str, Any], warnings: list[str]) -> QuantizationFacts:
    algorithm = quantization.get("quant_algo")
    kv = _kv_dtype(quantization.get("kv_cache_quant_algo"))
    exclude = quantization.get("exclude_modules")
    if exclude is None and algorithm:
        warnings.append(
            "hf_quant_config.json lists no exclude_modules: which modules stay 16 bit is not known"
        )
    group = quantization.get("group_size")
    if algorithm is None:
        return QuantizationFacts(kv_dtype=kv)
    name = str(algorithm).upper()
    if name == "MIXED_PRECISION":
        layers = _mapping(quantization.get("quantized_layers"))
        used = [
            str(entry.get("quant_algo", "")).upper()
            for entry in layers.values()
            if isinstance(entry, Mapping)
        ]
        sizes = [_ALGORITHMS[algo][0] for algo in used if algo in _ALGORITHMS]
        warnings.append("mixed precision: bytes per weight are the mean over the listed layers")
        return QuantizationFacts(
            name, sum(sizes) / len(sizes) if sizes else None, "bf16", None, kv, _names(exclude)
        )
    if name not in _ALGORITHMS:
        warnings.append(f"quantization {name!r} is not known: bytes per weight are not known")
        return QuantizationFacts(name, None, "bf16", group, kv, _names(exclude))
    size, compute = _ALGORITHMS[name]
    return QuantizationFacts(name, size, compute, group, kv, _names(exclude))


def _compressed(
    groups: Mapping[str, Any], kv: str | None, exclude: tuple[str, ...], warnings: list[str]
) -> QuantizationFacts:
    group = next((g for g in groups.values() if isinstance(g, Mapping)), {})
    weights, activations = _mapping(group.get("weights")), _mapping(group.get("input_activations"))
    bits, size = _integer(weights, "num_bits"), _integer(weights, "group_size")
    if not bits:
        warnings.append(
            "the quantization's config_groups do not say num_bits: bytes per weight are not known"
        )
        return QuantizationFacts("COMPRESSED", None, "bf16", None, kv, exclude)
    if len(groups) > 1:
        warnings.append("several quantization groups: the first one's bytes per weight are used")
    scale = (1.0 if bits == 4 and weights.get("type") == "float" else 2.0) / size if size else 0.0
    inputs = _integer(activations, "num_bits") or 16
    eight = "fp8" if weights.get("type") == "float" else "int8"
    compute = {4: "fp4", 8: eight}.get(inputs, "bf16")
    name = f"W{bits}A{inputs}_{str(weights.get('type') or 'int').upper()}"
    return QuantizationFacts(name, bits / 8 + scale, compute, size, kv, exclude)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(source: Mapping[str, Any], *names: str) -> int | None:
    """The first of `names` that holds an integer."""
    values = (source.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, list) else ()


def _kv_dtype(scheme: Any) -> str | None:
    if isinstance(scheme, Mapping):
        return "fp8" if scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float" else None
    if isinstance(scheme, str) and scheme:
        upper = scheme.upper()
        return (
            "fp8" if "FP8" in upper else "nvfp4" if "NVFP4" in upper else "int8" if "INT8" in upper else None
        )
    return None
