"""A reduced draft vocabulary: the tokens the target really writes, so that a head scores fewer rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtspec.train.texts import Text


def frequencies(texts: Sequence[Text], vocab_size: int) -> npt.NDArray[np.int64]:
    """int64 [vocab_size]: how often each token occurs in the responses."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.tokens[text.start :], minlength=vocab_size)
    return counts


def frequent_tokens(counts: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """int64 [size]: the most frequent ids, ascending. Among equals, such as those never seen, lower ids: tokenizers
    number common pieces first."""
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size]).astype(np.int64)


def offsets(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """d2t of ascending target ids: target id = draft id + d2t[draft id]."""
    return ids - np.arange(len(ids))


def target_ids(d2t: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The inverse of `offsets`."""
    return np.arange(len(d2t)) + d2t


def coverage(ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> float:
    """The share of counted tokens that are among `ids`: the most a head may have right. 0 where none is counted."""
    total = int(counts.sum())
    return float(counts[ids].sum() / total) if total else 0.0
