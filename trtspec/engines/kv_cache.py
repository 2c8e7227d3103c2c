"""The KV of the CPU engine's sequences, with as many copies of each as a token tree may have branches.

    data float32 [layers, 2 (keys, values), slots · branches, KV heads, capacity, head_dim]

Lane 0 of a slot holds the sequence. The other lanes exist for trees: every branch is computed in a lane of its own,
where it lies as contiguously as a chain would, so that the attention kernel sums in the same order and the logits
are the chain's bit for bit. (Hiding the other branches with a mask is not enough: a hidden key still takes a place
in the kernel's vectorised sums.) Lanes are brought up to date when a tree needs them, by the rows they lack.

Pages that nothing touches are never committed by the operating system: capacity costs address space, not memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class KvCache:
    """All sequences' keys and values. Rows of a slot are positions of its sequence."""

    def __init__(
        self, layers: int, slots: int, branches: int, kv_heads: int, capacity: int, head_dim: int
    ) -> None:
        self.capacity = capacity
        self._branches = branches
        self.data = np.zeros((layers, 2, slots * branches, kv_heads, capacity, head_dim), np.float32)
        # Rows from 0 in which each lane equals lane 0 of its slot.
        self._in_step = np.zeros((slots, branches), np.int64)

    def lane(self, slot: int, branch: int = 0) -> int:
        """Index of a lane among all of them."""
        return slot * self._branches + branch

    def write_from(self, slot: int, start: int) -> None:
        """The next step overwrites rows from `start` on in lane 0."""
        np.minimum(self._in_step[slot], start, out=self._in_step[slot])

    def spread(self, slot: int, branches: int, start: int) -> None:
        """Give lanes 1 … branches − 1 of a slot the first `start` rows of lane 0."""
        for branch in range(1, branches):
            known = self._in_step[slot, branch]
            self._copy(self.lane(slot), self.lane(slot, branch), known, start)
            self._in_step[slot, branch] = start

    def adopt(self, slot: int, branch: int, start: int, count: int) -> None:
        """Rows start … start + count − 1 of a branch's lane become the sequence's."""
        if branch:
            self._copy(self.lane(slot, branch), self.lane(slot), start, start + count)
            self._in_step[slot, branch] = start + count

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Rows start + rows[i] of lane 0 become rows start + i."""
        lane = self.data[:, :, self.lane(slot)]
        lane[:, :, :, start : start + len(rows)] = lane[:, :, :, start + np.asarray(rows)]

    def copy(self, source: int, destination: int, length: int) -> None:
        """The first `length` rows of one slot's sequence become another slot's."""
        self._copy(self.lane(source), self.lane(destination), 0, length)
        self._in_step[destination] = 0

    def _copy(self, source: int, destination: int, first: int, last: int) -> None:
        self.data[:, :, destination, :, first:last] = self.data[:, :, source, :, first:last]
