"""Random numbers keyed by (seed, stream, position): the same wherever, whenever and with whomever a token is
drawn.

Nothing is consumed in order. The number for output position t is a pure function of the request's seed, of
what it is for (its *stream*) and of t, so a result depends on neither draft length, batch-mates nor the
borders of steps. Philox4x64 (Salmon et al., SC'11) is such a function: a keyed permutation of a counter.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_UINT64 = (1 << 64) - 1
_TO_UNIT = 2.0**-53


class Stream(IntEnum):
    """What a random number is for; numbers of different streams are independent."""

    TARGET = 0  # the target's own draw of the token at a position
    ACCEPT = 1  # accept or reject a draft sampled from q
    RESIDUAL = 2  # the draw from the residual distribution after a rejection
    DRAFT = 3  # the drafter's draw from q


class PositionRandom:
    """Uniform numbers of one request. seed: any integer, taken modulo 2^64."""

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        self._seed = seed & _UINT64

    def uniform(self, stream: Stream, position: int, index: int = 0) -> float:
        """The `index`-th number in [0, 1) for output position `position` (0 is the prefill token)."""
        key = np.array((self._seed, stream), np.uint64)
        counter = np.array((0, position, index, 0), np.uint64)
        return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * _TO_UNIT
