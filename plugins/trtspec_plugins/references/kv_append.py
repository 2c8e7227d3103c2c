"""The e4m3 code nearest to each new element, by looking through all of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

_CODES = np.arange(0x7F)  # of e4m3's values from 0 to 448; 0x7F is no number
_EXPONENTS, _MANTISSAS = _CODES >> 3, _CODES & 7
VALUES = np.where(
    _EXPONENTS > 0, (8 + _MANTISSAS) * 2.0 ** (_EXPONENTS - 10), _MANTISSAS * 2.0**-9
)  # float64, ascending


def kv_append(
    cache: Bytes, new: npt.NDArray[np.float32], start: Ints, q_len: Ints, scale: npt.NDArray[np.float32]
) -> Bytes:
    """A copy of `cache` [B, HKV, S, d] with each sequence's first q_len rows of `new` [B, T, HKV, d] from start on.

    scale [HKV]: value of a stored 1. The quotient is rounded to float32, as the kernel's is.
    """
    written = cache.copy()
    for b, count in enumerate(q_len):
        rows = e4m3(new[b, :count].astype(np.float32) / scale.astype(np.float32)[:, None])
        written[b, :, start[b] : start[b] + count] = rows.transpose(1, 0, 2)
    return written


def e4m3(values: npt.NDArray[np.floating]) -> Bytes:
    """Codes of the nearest e4m3 numbers, of two equally near the even code; numbers past ±448 are that."""
    magnitude = np.minimum(np.abs(values).astype(np.float64), VALUES[-1])
    upper = np.clip(np.searchsorted(VALUES, magnitude), 1, len(VALUES) - 1)
    below, above = magnitude - VALUES[upper - 1], VALUES[upper] - magnitude
    nearest_below = (below < above) | ((below == above) & (upper % 2 == 1))
    return (np.where(nearest_below, upper - 1, upper) | np.signbit(values) << 7).astype(np.uint8)
