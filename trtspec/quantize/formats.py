"""The quantization formats by name: what each stores, who can run it, and whether it fits a model's widths.

Everything here is data and arithmetic; planning reads it without torch or ModelOpt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trtspec.errors import ConfigError, PlanInfeasible

Execution = Literal["float32", "int8 kernel", "int4 kernel", "dequantized at compile time"]


@dataclass(frozen=True, slots=True)
class Format:
    """One post-training format.

    config: name of ModelOpt's configuration constant, None for "none". qformat, old_qformat: what ModelOpt's
    command line calls it from 0.45 on, and before. weight_bits: bits of one stored weight, scales not counted.
    activations: what a GPU kernel quantizes inputs to. quant_algo: the label in hf_quant_config.json.
    block_size: inputs per weight scale; None for one scale per tensor or channel. fixed_block: no other block
    exists. onnxruntime: how the CPU engine runs it. min_sm: lowest NVIDIA compute capability with kernels
    (89 is Ada, 90 Hopper, 100 Blackwell). calibrated: activations are measured, so calibration text runs.
    """

    name: str
    config: str | None
    qformat: str | None
    old_qformat: str | None
    weight_bits: float
    activations: Literal["none", "fp8", "int8", "nvfp4"]
    quant_algo: str | None
    block_size: int | None
    fixed_block: bool
    onnxruntime: Execution
    min_sm: int
    calibrated: bool

    @property
    def bits_per_weight(self) -> float:
        """Bits moved per weight with its block scales: float32 for INT4, one e4m3 byte for NVFP4 (4.5)."""
        if self.block_size is None:
            return self.weight_bits
        return self.weight_bits + (8 if self.fixed_block else 32) / self.block_size


def _format(
    name: str,
    config: str | None,
    qformat: str | None,
    old_qformat: str | None,
    bits: float,
    activations: Literal["none", "fp8", "int8", "nvfp4"],
    algo: str | None,
    execution: Execution,
    min_sm: int,
    *,
    block: int | None = None,
    fixed: bool = False,
    calibrated: bool = True,
) -> Format:
    return Format(
        name,
        config,
        qformat,
        old_qformat,
        bits,
        activations,
        algo,
        block,
        fixed,
        execution,
        min_sm,
        calibrated,
    )


_DEQUANTIZED: Execution = "dequantized at compile time"
FORMATS: Mapping[str, Format] = {
    item.name: item
    for item in (
        _format("none", None, None, None, 16, "none", None, "float32", 70, calibrated=False),
        _format("fp8", "FP8_DEFAULT_CFG", "fp8", "fp8", 8, "fp8", "FP8", _DEQUANTIZED, 89),
        _format(
            "int8_weight_only", "INT8_WEIGHT_ONLY_CFG", "int8_weight_only", "int8_wo", 8, "none", "W8A16",
            "int8 kernel", 80, calibrated=False,
        ),
        _format(
            "int8_smoothquant", "INT8_SMOOTHQUANT_CFG", "int8_smoothquant", "int8_sq", 8, "int8",
            "W8A8_SQ_PER_CHANNEL", "int8 kernel", 80,
        ),
        _format(
            "int4_weight_only", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "int4_blockwise_weight_only",
            "int4_blockwise_weight_only", 4, "none", "W4A16", "int4 kernel", 80, block=128, calibrated=False,
        ),
        _format(
            "int4_awq", "INT4_AWQ_CFG", "int4_awq", "int4_awq", 4, "none", "W4A16_AWQ", "int4 kernel", 80,
            block=128,
        ),
        _format(
            "w4a8_awq", "W4A8_AWQ_BETA_CFG", "w4a8_awq_beta", "w4a8_awq", 4, "fp8", "W4A8_AWQ", "int4 kernel",
            89, block=128,
        ),
        _format(
            "nvfp4", "NVFP4_DEFAULT_CFG", "nvfp4", "nvfp4", 4, "nvfp4", "NVFP4", _DEQUANTIZED, 100, block=16,
            fixed=True,
        ),
        _format(
            "w4a16_nvfp4", "W4A16_NVFP4_CFG", "w4a16_nvfp4", None, 4, "none", "W4A16_NVFP4", _DEQUANTIZED, 100,
            block=16, fixed=True, calibrated=False,
        ),
    )
}  # fmt: skip

_SMALLEST_BLOCK = 16  # of the int4 kernels; blocks are powers of two


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """How a format is applied to one model.

    block_size: inputs per weight scale, None where the format has no blocks. quantized: modules that are
    quantized. excluded: modules left at 16 bits because no block divides their width. notes: for the reader.
    """

    name: str
    block_size: int | None
    quantized: tuple[str, ...]
    excluded: tuple[str, ...]
    notes: tuple[str, ...]


def get_format(name: str) -> Format:
    """The format called `name`; ConfigError naming the known ones otherwise."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"unknown quantization format {name!r}", hint=f"choose one of: {', '.join(FORMATS)}"
        ) from None


def qformat_name(name: str, modelopt_version: str) -> str:
    """What the ModelOpt of `modelopt_version` ("0.37.0") calls a format on its command line.

    PlanInfeasible when that version does not have it.
    """
    chosen = get_format(name)
    major, minor = (int(part) for part in modelopt_version.split(".")[:2])
    found = chosen.qformat if (major, minor) >= (0, 45) else chosen.old_qformat
    if found is None:
        raise PlanInfeasible(
            f"ModelOpt {modelopt_version} has no format {name!r}", hint="use ModelOpt 0.47, or another format"
        )
    return found


def check_format(name: str, widths: Mapping[str, int], block_size: int | None = None) -> FormatPlan:
    """Fit format `name` to the Linear modules it would quantize, before anything runs.

    widths: module name → input width (in_features). block_size: what the config asks for; None takes the
    format's own, or the largest smaller power of two that divides every width. A module that even the smallest
    block does not divide stays at 16 bits and is listed. Raises PlanInfeasible, naming the blocks that work,
    for a block size that was asked for and does not fit, and where no module can be quantized.
    """
    chosen = get_format(name)
    if chosen.block_size is None:
        if block_size is not None:
            blocked = ", ".join(
                other for other, item in FORMATS.items() if item.block_size and not item.fixed_block
            )
            raise PlanInfeasible(
                f"{name} has no block size: one scale covers a whole "
                + ("tensor" if name == "fp8" else "output channel"),
                hint=f"remove `block_size`, or use a format with blocks: {blocked}",
            )
        return FormatPlan(name, None, tuple(widths), (), ())
    if chosen.fixed_block and block_size not in (None, chosen.block_size):
        raise PlanInfeasible(
            f"{name} always has blocks of {chosen.block_size}, not {block_size}", hint="remove `block_size`"
        )

    smallest = chosen.block_size if chosen.fixed_block else _SMALLEST_BLOCK
    excluded = tuple(module for module, width in widths.items() if width % smallest)
    quantized = {module: width for module, width in widths.items() if module not in excluded}
    if not quantized:
        raise PlanInfeasible(
            f"{name}: no layer's input width is a multiple of {smallest}, the smallest block",
            hint="use a format without blocks: int8_weight_only or fp8",
        )
    notes = []
    if excluded:
        shown = ", ".join(f"{module} ({widths[module]})" for module in excluded[:4])
        more = f" and {len(excluded) - 4} more" if len(excluded) > 4 else ""
        notes.append(f"{name}: left at 16 bits, blocks of {smallest} do not divide the width: {shown}{more}")

    block = block_size or chosen.block_size
    common = math.gcd(*quantized.values())
    fitting = [size for size in (256, 128, 64, 32, 16) if common % size == 0]
    if block not in fitting:
        module, width = next(
            ((m, w) for m, w in quantized.items() if w % block), next(iter(quantized.items()))
        )
        fault = f"{name}: a block of {block} does not divide the width {width} of {module}"
        if block_size is not None:
            if width % block == 0:
                fault = f"{name}: blocks are powers of two from {_SMALLEST_BLOCK} to 256, not {block}"
            works = ", ".join(map(str, fitting))
            raise PlanInfeasible(fault, hint=f"these divide every layer: block_size {works}")
        block = max(size for size in fitting if size <= block)
        notes.append(f"{fault}: {block} is used")
    return FormatPlan(name, block, tuple(quantized), excluded, tuple(notes))
