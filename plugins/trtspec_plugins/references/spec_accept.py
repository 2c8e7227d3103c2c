"""Acceptance with the kernel's random numbers, in float64, token by token."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Words = npt.NDArray[np.uint32]
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class Stream(IntEnum):
    """What a random number is for, as in `trtspec.verify.randomness`."""

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2


def philox(key: tuple[int, int], counter: tuple[npt.ArrayLike, ...]) -> tuple[Words, ...]:
    """Philox4x32-10: four words for each counter (four words, broadcast). Salmon et al., SC'11, section 4."""
    words = [np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter)]
    low, high = key
    for _ in range(10):
        first, second = words[0] * np.uint64(_MULTIPLY[0]), words[2] * np.uint64(_MULTIPLY[1])
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ np.uint64(low),
            second & np.uint64(_WORD),
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(high),
            first & np.uint64(_WORD),
        ]
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return tuple(word.astype(np.uint32) for word in words)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that the draft for an output position is accepted by, of 24 bits."""
    return int(philox(_key(seed), (0, position, Stream.ACCEPT, 0))[0]) // 256 * 2.0**-24


def times(seed: int, position: int, stream: Stream, vocabulary: int) -> npt.NDArray[np.float64]:
    """Unit exponential variates [V], one for each token of the vocabulary."""
    bits = philox(_key(seed), (np.arange(vocabulary), position, stream, 0))[0]
    return -np.log1p(-(bits + 0.5) * 2.0**-32)


def race(weights: Array, seed: int, position: int, stream: Stream) -> int:
    """A token drawn in proportion to weights [V] ≥ 0: the first of exponential times divided by them."""
    with np.errstate(divide="ignore"):
        return int(np.argmin(times(seed, position, stream, len(weights)) / weights.astype(np.float64)))


def spec_accept(
    p: Array, q: Array | None, tokens: npt.NDArray[np.integer], q_len: int, seed: int, position: int
) -> list[int]:
    """Tokens one sequence emits: its accepted drafts and one more. Empty for q_len = 0.

    p [T, V]; q [T, V] or None for deterministic drafts; tokens [T], column 0 committed.
    """
    emitted: list[int] = []
    for t in range(q_len):
        here, draft = position + t, int(tokens[t + 1]) if t + 1 < q_len else None
        if q is None or draft is None:
            emitted.append(race(p[t], seed, here, Stream.TARGET))
            if emitted[-1] != draft:
                break
        elif uniform(seed, here) * q[t, draft] < p[t, draft]:
            emitted.append(draft)
        else:
            residual = np.maximum(p[t].astype(np.float64) - q[t], 0)
            residual[draft] = 0
            if not residual.any():  # p = q up to rounding: a rejection exact arithmetic does not have
                residual = p[t].astype(np.float64)
                residual[draft] = 0
            emitted.append(race(residual, seed, here, Stream.RESIDUAL))
            break
    return emitted


def _key(seed: int) -> tuple[int, int]:
    return seed & _WORD, seed >> 32 & _WORD
