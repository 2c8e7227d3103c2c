"""Ancestors of every row, one climb at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


def tree_mask(parents: Ints, q_len: Ints) -> tuple[Ints, Ints]:
    """(mask int32 [B, T, ⌈T/32⌉], depth int32 [B, T]) of parents [B, T], of which q_len [B] rows are valid."""
    batch, rows = parents.shape
    seen = np.zeros((batch, rows, -(-rows // 32) * 32), bool)
    depth = np.zeros((batch, rows), np.int32)
    for b in range(batch):
        for t in range(int(q_len[b])):
            at = t
            while at >= 0:
                seen[b, t, at] = True
                at = int(parents[b, at])
            depth[b, t] = seen[b, t].sum() - 1
    return np.packbits(seen, axis=2, bitorder="little").view("<i4"), depth
