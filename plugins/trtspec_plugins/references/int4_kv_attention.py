"""QuantSpec's two-nibble cache: what its planes stand for, and attention over it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtspec.engines import hierarchical_kv
from trtspec_plugins.references.verify_attention import verify_attention

Array = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Quantized:
    """upper, lower: packed codes uint8 [..., N, d/2]. scale, zero: shaped to broadcast over [..., N, d]."""

    upper: Bytes
    lower: Bytes
    scale: Array
    zero: Array

    def values(self, both: bool) -> npt.NDArray[np.float64]:
        """float64 [..., N, d]: what the target (both) or the draft reads."""
        codes = 16.0 * unpack(self.upper)
        if both:
            codes += unpack(self.lower) - 8.0
        return codes * self.scale + self.zero


def quantize(values: Array, axis: int, dtype: npt.DTypeLike = np.float16) -> Quantized:
    """Codes of values [..., N, d] with one scale along `axis`: −2 for keys (per channel), −1 for values (per token).

    They are those of the CPU engine's cache, its bytes parted into planes; scale and zero are rounded to dtype.
    """
    codes, scale, low = hierarchical_kv.quantize(values.astype(np.float32), axis)
    zero = low + hierarchical_kv.HALF * scale  # the kernel's lower code is signed, the engine's byte is not
    stored = (part.astype(dtype).astype(np.float64) for part in (scale, zero))
    return Quantized(pack(codes >> 4), pack(codes & 15), *stored)


def pack(codes: Array) -> Bytes:
    """uint8 [..., d/2] of codes 0..15 [..., d]: dim i in the low nibble of byte i, dim i + d/2 in the high one."""
    half = codes.shape[-1] // 2
    return (codes[..., :half].astype(np.uint8) | codes[..., half:].astype(np.uint8) << 4).astype(np.uint8)


def unpack(packed: Bytes) -> npt.NDArray[np.float64]:
    """float64 codes 0..15 [..., d] of packed bytes [..., d/2]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float64)


def int4_kv_attention(
    q: Array, keys: Array, values: Array, k_recent: Array, v_recent: Array,
    quant_len: npt.NDArray[np.integer], recent_len: npt.NDArray[np.integer], q_len: npt.NDArray[np.integer],
) -> npt.NDArray[np.float64]:  # fmt: skip
    """Output float64 [B, T, Hq, d] over dequantized keys and values [B, HKV, S, d], then the recent ones."""
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        old, new = int(quant_len[b]), int(recent_len[b])
        key = np.concatenate([keys[b, :, :old], k_recent[b, :, :new]], axis=1)[None]
        value = np.concatenate([values[b, :, :old], v_recent[b, :, :new]], axis=1)[None]
        out[b] = verify_attention(q[b : b + 1], key, value, np.array([old + new]), q_len[b : b + 1])[0]
    return out
