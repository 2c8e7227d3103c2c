"""Tensor values of a model folder's safetensors with numpy alone; 8- and 16-bit floats are widened to float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from trtspec.checkpoints.safetensors_header import TensorInfo, read_folder
from trtspec.errors import SetupError

# BF16 and FP8 have no numpy type: their bits are read and widened below.
_NUMPY = {
    "BOOL": "?",
    "I8": "i1",
    "U8": "u1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "BF16": "<u2",
    "F8_E4M3": "u1",
}


class TensorFolder:
    """Every tensor of a folder (or of the shards its index names), read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tensors = read_folder(folder)
        if tensors is None:
            raise SetupError("no .safetensors weights", where=str(folder))
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor. SetupError when the folder does not have it."""
        if name not in self._tensors:
            raise SetupError(f"no tensor {name}", where=str(self.folder))
        return self._tensors[name]

    def array(self, name: str) -> np.ndarray:
        """The tensor's values: BF16, F16 and F8_E4M3 as float32, every other dtype as it is stored."""
        info = self.info(name)
        if info.dtype not in _NUMPY:
            raise SetupError(f"{name} has dtype {info.dtype}, which is not read here", where=str(info.file))
        stored = np.fromfile(info.file, _NUMPY[info.dtype], info.elements, offset=info.offset)
        stored = stored.reshape(info.shape)
        if info.dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if info.dtype == "F8_E4M3":
            return e4m3_values()[stored]
        return stored.astype(np.float32) if info.dtype == "F16" else stored


@lru_cache(maxsize=1)
def e4m3_values() -> np.ndarray:
    """float32 [256]: the value of each FP8 E4M3 (finite variant) byte; 0x7f and 0xff are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(byte < 128, magnitude, -magnitude)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)
