"""ModelOpt's list of quantizer rules for one format and one model: the order of its entries decides."""

from __future__ import annotations

import copy
import fnmatch
import importlib.metadata
from collections.abc import Sequence

import modelopt.torch.quantization as mtq
from torch import nn

from trtspec.errors import ConfigError, SetupError
from trtspec.quantize.formats import Format, FormatPlan

_TESTED_MODELOPT = "0.47.0"


def modelopt_config(chosen: Format) -> dict:
    """A copy of ModelOpt's configuration of a format ("none": everything disabled)."""
    version = importlib.metadata.version("nvidia-modelopt")
    name = chosen.config or "FP8_DEFAULT_CFG"
    found = getattr(mtq, name, None)
    if not isinstance(found, dict) or not isinstance(found.get("quant_cfg"), list):
        raise SetupError(
            f"nvidia-modelopt {version} has no {name} of the form known here",
            hint=f"run: pip install nvidia-modelopt=={_TESTED_MODELOPT}",
        )
    config = copy.deepcopy(found)
    first, *rest = config["quant_cfg"]
    if first != {"quantizer_name": "*", "enable": False}:
        raise SetupError(
            f"{name} of nvidia-modelopt {version} does not begin by disabling everything",
            hint=f"run: pip install nvidia-modelopt=={_TESTED_MODELOPT}",
        )
    if chosen.config is None:
        config["quant_cfg"] = [first, *(entry for entry in rest if entry.get("enable") is False)]
    return config


def default_disabled(config: dict, keep: str | None) -> list[str]:
    """Globs of the quantizers ModelOpt leaves off (output layer, routers, vision, mtp …), less those of `keep`."""
    globs = [
        entry["quantizer_name"]
        for entry in config["quant_cfg"][1:]
        if entry.get("enable") is False
        and "parent_class" not in entry
        and not _is_kind(entry["quantizer_name"])
    ]
    return [glob for glob in globs if not (keep and fnmatch.fnmatchcase(f"{keep}.weight_quantizer", glob))]


def _is_kind(glob: str) -> bool:
    """Whether a glob means one kind of quantizer everywhere ("*input_quantizer"), not some modules."""
    return glob in ("*input_quantizer", "*weight_quantizer", "*output_quantizer")


def excluded_by_request(patterns: Sequence[str], linears: dict[str, nn.Linear]) -> tuple[str, ...]:
    """Linears whose name matches a pattern; ConfigError for a pattern that matches none."""
    for pattern in patterns:
        if not fnmatch.filter(linears, pattern):
            known = ", ".join(list(linears)[:3])
            raise ConfigError(
                f"exclude: {pattern!r} matches no module of the model", hint=f"modules are named like {known}"
            )
    return tuple(name for name in linears if any(fnmatch.fnmatchcase(name, p) for p in patterns))


def odd_outputs(chosen: Format, names: Sequence[str], linears: dict[str, nn.Linear]) -> tuple[str, ...]:
    """INT4 packs two outputs into a byte: a Linear with an odd number of them cannot be packed."""
    if chosen.weight_bits != 4 or chosen.fixed_block:
        return ()
    return tuple(name for name in names if linears[name].out_features % 2)


def assemble(
    config: dict, plan: FormatPlan, disabled: list[str], keep: Sequence[str], *, fp8_kv: bool
) -> dict:
    """The final quantizer list. Later entries win: everything off, KV, the format, and what stays off last."""
    first, *rest = config["quant_cfg"]
    by_class = [entry for entry in rest if "parent_class" in entry]
    formats = [
        entry for entry in rest if "parent_class" not in entry
        and (entry.get("enable") is not False or _is_kind(entry["quantizer_name"]))
    ]  # fmt: skip
    for entry in formats:
        stages = entry.get("cfg") or []
        for stage in [stages] if isinstance(stages, dict) else stages:
            if "block_sizes" in stage:
                stage["block_sizes"][-1] = plan.block_size
    kv = copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"]) if fp8_kv else []
    off = [{"quantizer_name": glob, "enable": False} for glob in (*disabled, *(f"{name}.*" for name in keep))]
    return {**config, "quant_cfg": [first, *kv, *formats, *by_class, *off]}
