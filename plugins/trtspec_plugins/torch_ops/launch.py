"""Launching a kernel on tensors, with the tile that its architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trtspec_plugins.interpreter import MODULES, launch_of
from trtspec_plugins.variants import ARCHITECTURES, Architecture, arch_of


def launch(
    kernel: str,
    values: Mapping[str, int],
    tensors: Mapping[str, Tensor | None],
    constants: Mapping[str, Any],
    warps: int = 4,
    stages: int = 1,
) -> None:
    """Run a kernel; tensors it writes are among `tensors`. On CPU tensors only where Triton interprets.

    values: dimensions and scalars by name. Raises ValueError for a tensor that is not contiguous.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if strided := [name for name, tensor in given.items() if not tensor.is_contiguous()]:
        raise ValueError(f"{kernel}: {', '.join(strided)} must be contiguous")
    module = import_module(f"trtspec_plugins.kernels.{MODULES.get(kernel, kernel)}")
    call = launch_of(kernel, values, given, constants)
    device = next(iter(given.values())).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(module, kernel)[call.grid](*call.arguments, **constants, num_warps=warps, num_stages=stages)


def architecture(device: torch.device) -> Architecture:
    """What a GPU's kernels are compiled for; the interpreter takes Hopper's."""
    return ARCHITECTURES[
        arch_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "sm_90a"
    ]


def tile_of(queries: Tensor, tile_rows: int) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, launch options) of an attention kernel over queries [B, T, HQ, d]."""
    arch, dim = architecture(queries.device), queries.shape[-1]
    interpreted = queries.device.type == "cpu"
    constants = {
        "HEAD_DIM": dim,
        "BLOCK_M": tile_rows,
        "BLOCK_N": arch.key_block,
        "SM_SCALE": dim**-0.5,
        "UPCAST": int(interpreted and queries.dtype == torch.bfloat16),
    }
    return constants, {"warps": tile_rows // 16, "stages": arch.stages}
