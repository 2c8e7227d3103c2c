"""The latest longest earlier match of a text's last tokens, found by comparing slices."""

from __future__ import annotations

from collections.abc import Sequence


def ngram_lookup(
    tokens: Sequence[int], draft_length: int, min_ngram: int, max_ngram: int, stop: int = -1
) -> list[int]:
    """Up to `draft_length` tokens that followed the match; empty without one. stop: see the kernel."""
    end = len(tokens)
    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
        suffix = list(tokens[end - n :])
        if stop in suffix:
            continue
        for following in range(end - 1, n - 1, -1):
            if list(tokens[following - n : following]) == suffix:
                return _copy(tokens, following, draft_length, stop)
    return []


def _copy(tokens: Sequence[int], start: int, count: int, stop: int) -> list[int]:
    copied: list[int] = []
    text = list(tokens)
    while len(copied) < count:
        text.append(text[start + len(copied)])
        copied.append(text[-1])
        if copied[-1] == stop:
            break
    return copied
