"""Attention of each valid row over exactly the keys it sees, row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]


def verify_attention(
    q: Array,
    k: Array,
    v: Array,
    kv_len: Ints,
    q_len: Ints,
    mask: Ints | None = None,
    block_table: Ints | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale: float | None = None,
) -> Array:
    """Output float64 [B, T, Hq, d]; arguments as the kernel's, elements of k and v as real numbers.

    mask: int32 words [B, T, ⌈T/32⌉] of a token tree; None for a chain. block_table: with pages. scale: of the
    scores, d^−1/2 by default.
    """
    out = np.zeros(q.shape)
    heads, kv_heads, dim = q.shape[2], k.shape[1], q.shape[3]
    scale = dim**-0.5 if scale is None else scale
    for batch in range(q.shape[0]):
        keys, rows = int(kv_len[batch]), int(q_len[batch])
        for head in range(heads):
            h = head // (heads // kv_heads)
            key = _sequence(k, batch, h, keys, block_table) * (1.0 if k_scale is None else float(k_scale[h]))
            value = _sequence(v, batch, h, keys, block_table) * (
                1.0 if v_scale is None else float(v_scale[h])
            )
            for t in range(rows):
                seen = np.arange(keys) <= keys - rows + t
                if mask is not None:
                    seen[keys - rows :] = unpack_bits(mask[batch, t], rows)
                scores = key[seen] @ q[batch, t, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[batch, t, head] = weights @ value[seen] / weights.sum()
    return out


def unpack_bits(words: Ints, count: int) -> npt.NDArray[np.bool_]:
    """The first `count` bits of int32 words, lowest first."""
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), bitorder="little")
    return bits[:count].astype(bool)


def _sequence(cache: Array, batch: int, head: int, keys: int, block_table: Ints | None) -> Array:
    """float64 [keys, d]: one sequence's rows of one KV head, gathered from its pages where it has them."""
    if block_table is None:
        return cache[batch, head, :keys].astype(np.float64)
    page = cache.shape[2]
    pages = block_table[batch, : -(-keys // page)]
    return cache[pages, head].reshape(-1, cache.shape[3])[:keys].astype(np.float64)
