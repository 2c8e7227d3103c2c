"""NVFP4 rounding in plain PyTorch: ModelOpt's own fake quantization of it runs on CUDA only.

A block of 16 values shares one E4M3 scale, and the tensor one float32 scale; values are E2M1
(0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2
# Halfway between two levels the one with an even code wins (IEEE round half to even); bucketize goes down.
_TIES_UP = _MIDDLES[1::2]
_E2M1_MAX, _E4M3_MAX, _E4M3_TINY = 6.0, 448.0, 2.0**-9


def nvfp4_round(x: torch.Tensor, block_size: int, global_scale: float | torch.Tensor) -> torch.Tensor:
    """`x` on the NVFP4 grid, same shape and dtype; the last dimension is a multiple of `block_size`.

    global_scale: amax of the tensor / (6 · 448), as exported in `input_scale` and `weight_scale_2`.
    """
    blocks = x.float().reshape(-1, block_size)
    amax = blocks.abs().amax(1, keepdim=True)
    ratio = torch.where(amax == 0, 1.0, amax / (_E2M1_MAX * global_scale))
    scale = ratio.clamp(_E4M3_TINY, _E4M3_MAX).to(torch.float8_e4m3fn).float() * global_scale
    scaled = (blocks / scale).abs()
    index = torch.bucketize(scaled, _MIDDLES.to(x.device))
    index += torch.isin(scaled, _TIES_UP.to(x.device))
    return (_LEVELS.to(x.device)[index] * blocks.sign() * scale).reshape(x.shape).to(x.dtype)


@contextlib.contextmanager
def nvfp4_on_cpu() -> Iterator[None]:
    """Let ModelOpt's dynamic-block quantizers run without CUDA while the context is open."""
    if torch.cuda.is_available():
        yield
        return
    from modelopt.torch.quantization import tensor_quant

    def dynamic_block_quantize(
        x: torch.Tensor, block_size: int, amax: torch.Tensor | None = None, *_formats: object
    ) -> torch.Tensor:
        largest = x.abs().amax() if amax is None else amax.max()
        return nvfp4_round(x, block_size, largest.float() / (_E2M1_MAX * _E4M3_MAX))

    original = tensor_quant.dynamic_block_quantize_op
    tensor_quant.dynamic_block_quantize_op = dynamic_block_quantize
    try:
        yield
    finally:
        tensor_quant.dynamic_block_quantize_op = original
