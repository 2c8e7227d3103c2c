"""Checks an exported folder against its own label by reading the tensors back.

ModelOpt's exporter labels some formats as others (plain INT8 as SmoothQuant, plain INT4 blocks as AWQ), and
exporters of several kinds have shipped quantized tensors for excluded modules and 16-bit tensors for
quantized ones. A server believes the label; only the tensors tell.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.errors import StageFailed

_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
_SIXTEEN_BIT = ("BF16", "F16")
_FLOATS = (*_SIXTEEN_BIT, "F32")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What one quant_algo stores per Linear. `smoothed`: which Linears carry a pre_quant_scale."""

    weight: str
    scale: str
    scales: tuple[str, ...]
    smoothed: str = "none"  # none | some | all


_LAYOUTS = {
    "FP8": _Layout("F8_E4M3", "F32", ("weight_scale", "input_scale")),
    "W8A16": _Layout("I8", "F32", ("weight_scale",)),
    "W8A8_SQ_PER_CHANNEL": _Layout("I8", "F32", ("weight_scale", "input_scale"), "all"),
    "W4A16": _Layout("U8", "F32", ("weight_scale",)),
    "W4A16_AWQ": _Layout("U8", "F32", ("weight_scale",), "some"),
    "W4A8_AWQ": _Layout("U8", "F32", ("weight_scale", "weight_scale_2", "input_scale"), "some"),
    "NVFP4": _Layout("U8", "F8_E4M3", ("weight_scale", "weight_scale_2", "input_scale")),
    "W4A16_NVFP4": _Layout("U8", "F8_E4M3", ("weight_scale", "weight_scale_2")),
}


def can_verify(folder: Path) -> bool:
    """Whether the folder's label is one `verify_export` knows; exports of others have many more."""
    label = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))
    return label.get("quantization", {}).get("quant_algo") in _LAYOUTS


def verify_export(
    folder: Path,
    *,
    quantized: Sequence[str] | None = None,
    kept: Sequence[str] = (),
    kv_cache: str | None = None,
) -> None:
    """StageFailed unless the tensors of `folder` are what its hf_quant_config.json says.

    quantized, kept: modules that must and must not be quantized; with `quantized` every exclude entry must match
    a module too. None takes what the tensors show (an export made elsewhere). kv_cache: the KV label to expect;
    None accepts the file's own.
    """
    where = str(folder)
    label = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
    algo, excluded = label.get("quant_algo"), label.get("exclude_modules") or []
    tensors = TensorFolder(folder)
    found = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    if algo is not None and algo not in _LAYOUTS:
        raise StageFailed(f"quant_algo {algo!r} is not one this version can check", where=where)
    if (algo is None) != (not found):
        raise StageFailed(f"quant_algo is {algo}, but {len(found)} modules have a weight_scale", where=where)
    if missing := sorted(set(quantized or ()) - set(found)):
        raise StageFailed(
            f"{missing[0]} was not quantized in the export ({len(missing)} in all)", where=where
        )
    if extra := sorted(set(kept) & set(found)):
        raise StageFailed(f"{extra[0]} is quantized in the export, but must not be", where=where)
    for name in found:
        if glob := next((glob for glob in excluded if fnmatch.fnmatchcase(name, glob)), None):
            raise StageFailed(f"{name} is quantized although exclude_modules lists {glob!r}", where=where)
        _check_linear(tensors, name, algo, where)
    _check_smoothing(tensors, found, algo, where)
    for name in tensors:
        _check_plain(tensors, name, set(found), where)
    if quantized is not None:
        _check_excluded(tensors, excluded, where)
    _check_kv(tensors, label, kv_cache, where)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    repeated = (config.get("quantization_config") or {}).get("quant_algo")
    if repeated != algo:
        raise StageFailed(f"config.json says quant_algo {repeated}, hf_quant_config.json {algo}", where=where)
    if config.get("tie_word_embeddings") is True and any(name.startswith("lm_head.") for name in tensors):
        raise StageFailed("lm_head has tensors of its own, but config.json says it is tied", where=where)


def _check_linear(tensors: TensorFolder, name: str, algo: str, where: str) -> None:
    layout = _LAYOUTS[algo]
    weight = tensors.info(f"{name}.weight")
    if weight.dtype != layout.weight:
        raise StageFailed(f"{name}.weight is {weight.dtype}, {algo} stores {layout.weight}", where=where)
    for part in layout.scales:
        if f"{name}.{part}" not in tensors:
            hint = "calibration did not run" if part == "input_scale" else None
            raise StageFailed(f"{name} has no {part}, which {algo} needs", where=where, hint=hint)
    if (dtype := tensors.info(f"{name}.weight_scale").dtype) != layout.scale:
        raise StageFailed(f"{name}.weight_scale is {dtype}, {algo} stores {layout.scale}", where=where)
    allowed = {*layout.scales, *(() if layout.smoothed == "none" else ("pre_quant_scale",))}
    for part in _SCALES:
        if f"{name}.{part}" not in tensors:
            continue
        if part not in allowed:
            raise StageFailed(f"{name} has a {part}, which {algo} does not have", where=where)
        values = tensors.array(f"{name}.{part}")
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise StageFailed(f"{name}.{part} is not finite and positive", where=where)


def _check_smoothing(tensors: TensorFolder, found: Sequence[str], algo: str | None, where: str) -> None:
    """SmoothQuant smooths every Linear and AWQ some (it folds the rest into norms): without, the label is wrong."""
    if algo is None:
        return
    smoothed = [name for name in found if f"{name}.pre_quant_scale" in tensors]
    wanted = _LAYOUTS[algo].smoothed
    if (wanted == "all" and len(smoothed) < len(found)) or (wanted == "some" and not smoothed):
        raise StageFailed(
            f"the export is labelled {algo}, but {len(found) - len(smoothed)} of its {len(found)} quantized "
            "modules have no pre_quant_scale: it is plain rounding under another name",
            where=where,
            hint="name the format that was really applied",
        )


def _check_plain(tensors: TensorFolder, name: str, found: set[str], where: str) -> None:
    """What is not quantized is finite, and a weight matrix is 16 bits."""
    module, _, part = name.rpartition(".")
    info = tensors.info(name)
    if module in found and part == "weight":
        if info.dtype == "F8_E4M3" and not np.isfinite(tensors.array(name)).all():
            raise StageFailed(f"{name} holds NaN", where=where)
        return
    if part in _SCALES:
        if module not in found:
            raise StageFailed(f"{name} exists, but {module} is not quantized", where=where)
        return
    if part in ("k_scale", "v_scale"):
        return
    if info.dtype not in (_SIXTEEN_BIT if part == "weight" and len(info.shape) > 1 else _FLOATS):
        raise StageFailed(
            f"{name} is {info.dtype}, but {module} is not quantized: it must be 16 bits", where=where
        )
    if not np.isfinite(tensors.array(name)).all():
        raise StageFailed(f"{name} holds values that are not finite", where=where)


def _check_excluded(tensors: TensorFolder, excluded: Sequence[str], where: str) -> None:
    """Every exclude entry names a module of the file (lm_head may be tied, and then has no tensor)."""
    modules = {name.rpartition(".")[0] for name in tensors}
    for glob in excluded:
        if glob != "lm_head" and not any(
            fnmatch.fnmatchcase(module, glob) or module.startswith(f"{glob}.") for module in modules
        ):
            raise StageFailed(f"exclude_modules entry {glob!r} matches no module of the export", where=where)


def _check_kv(tensors: TensorFolder, label: dict, expected: str | None, where: str) -> None:
    stated = label.get("kv_cache_quant_algo")
    scales = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    if expected is not None and stated != expected:
        raise StageFailed(f"the KV cache is labelled {stated}, not {expected}", where=where)
    if (stated == "FP8") != bool(scales):
        raise StageFailed(f"the KV cache is labelled {stated}, with {len(scales)} scale tensors", where=where)
    for kind in ("k", "v") if scales else ():
        for name in tensors:
            module = name.removesuffix(".weight")
            if name.endswith(f".{kind}_proj.weight") and f"{module}.{kind}_scale" not in tensors:
                raise StageFailed(f"{module} has no {kind}_scale, which an FP8 KV cache needs", where=where)
    for name in scales:
        value = tensors.array(name)
        if not (np.isfinite(value).all() and (value > 0).all()):
            raise StageFailed(f"{name} is not finite and positive", where=where)
