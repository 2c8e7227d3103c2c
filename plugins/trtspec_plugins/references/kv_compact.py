"""The accepted rows, copied one sequence at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


def kv_compact(
    cache: npt.NDArray[np.generic], path: Ints, path_len: Ints, start: Ints, block_table: Ints | None = None
) -> npt.NDArray[np.generic]:
    """A copy of `cache` with each sequence's rows start + path moved to start + 1 and on.

    cache [B, HKV, S, d], or [pages, HKV, PAGE, d] with block_table [B, pages of a sequence].
    """
    moved = cache.copy()
    for b, count in enumerate(path_len):
        for i, row in enumerate(path[b, :count]):
            source, target = int(start[b]) + int(row), int(start[b]) + 1 + i
            if block_table is None:
                moved[b, :, target] = cache[b, :, source]
            else:
                page = cache.shape[2]
                into, out_of = block_table[b, target // page], block_table[b, source // page]
                moved[into, :, target % page] = cache[out_of, :, source % page]
    return moved
