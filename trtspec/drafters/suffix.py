"""Suffix matching of any length with an online suffix automaton (SAM decoding, 2411.10666).

The automaton of the text so far (Blumer et al. 1985) grows by one token in amortised constant time. The
suffix link of its newest state is the longest suffix of the text that also occurs earlier, whatever its
length, so finding the match costs nothing extra. Most states have one outgoing transition, which is kept in
flat arrays; only branching states own a dictionary.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any

from trtspec.drafters.ngram import CopyDrafter, Match, copy_from

_NONE = -1


class SuffixAutomaton:
    """All substrings of one growing token sequence, at most 2 states and 3 transitions a token.

    special_ids end a turn: each occurrence is a symbol of its own, so that no match contains one.
    min_match: shorter matches do not count. max_match: longer ones count as this long.
    operations: transitions read or written so far, the measure of its cost.
    """

    __slots__ = (
        "_end", "_last", "_length", "_link", "_many", "_max", "_min", "_next", "_special", "_symbol",
        "match", "operations", "tokens",
    )  # fmt: skip

    def __init__(self, min_match: int = 1, max_match: int = 64, special_ids: Collection[int] = ()) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"match lengths {min_match} to {max_match}: must be 1 ≤ shortest ≤ longest")
        self._min, self._max = min_match, max_match
        self._special = frozenset(special_ids)
        self._length = array("q", [0])  # of a state's longest string
        self._link = array("q", [_NONE])
        self._end = array("q", [0])  # position after the latest known occurrence of the state's strings
        self._symbol = array("q", [0])  # the state's first transition, _next _NONE while it has none …
        self._next = array("q", [_NONE])
        self._many: dict[int, dict[int, int]] = {}  # … and its others
        self._last = 0
        self.tokens: list[int] = []
        self.match: Match | None = None  # of the current suffix, never with itself
        self.operations = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; `match` is then the longest for the new suffix."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            self._append(-end if token in self._special else token, end)
            state = self._link[self._last]
            length, following = self._length[state], self._end[state]
            self.match = Match(min(length, self._max), following) if length >= self._min else None
            # This occurrence is now the latest one of the strings just matched. Their own suffixes keep an
            # older position: as good a place to copy from, and refreshing them all would cost time by match
            # length.
            self._end[state] = end

    def continuation(self, following: int, count: int) -> list[int]:
        """As `NgramIndex.continuation`."""
        return copy_from(self.tokens, following, count, self._special)

    def _append(self, symbol: int, end: int) -> None:
        new = self._state(self._length[self._last] + 1, end)
        state = self._last
        while state != _NONE and (target := self._go(state, symbol)) == _NONE:
            self._set(state, symbol, new)
            state = self._link[state]
        if state == _NONE:
            self._link[new] = 0
        elif self._length[target] == self._length[state] + 1:
            self._link[new] = target
        else:
            self._link[new] = self._link[target] = clone = self._clone(target, self._length[state] + 1)
            while state != _NONE and self._go(state, symbol) == target:
                self._set(state, symbol, clone)
                state = self._link[state]
        self._last = new

    def _state(self, length: int, end: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._end.append(end)
        self._symbol.append(0)
        self._next.append(_NONE)
        return len(self._length) - 1

    def _clone(self, state: int, length: int) -> int:
        clone = self._state(length, self._end[state])
        self._link[clone] = self._link[state]
        self._symbol[clone], self._next[clone] = self._symbol[state], self._next[state]
        if state in self._many:
            self._many[clone] = dict(self._many[state])
            self.operations += len(self._many[state])
        return clone

    def _go(self, state: int, symbol: int) -> int:
        self.operations += 1
        if self._symbol[state] == symbol and self._next[state] != _NONE:
            return self._next[state]
        others = self._many.get(state)
        return _NONE if others is None else others.get(symbol, _NONE)

    def _set(self, state: int, symbol: int, target: int) -> None:
        self.operations += 1
        if self._next[state] == _NONE or self._symbol[state] == symbol:
            self._symbol[state], self._next[state] = symbol, target
        else:
            self._many.setdefault(state, {})[symbol] = target


class SuffixDrafter(CopyDrafter):
    """The `Drafter` of method suffix: copies what followed the longest earlier occurrence of the text's
    suffix.

    max_match: longer matches count as this long. special_ids: as of `NgramDrafter`. options: those of `CopyDrafter`,
    among them max_spec_factor, SuffixDecoding's bound (2411.04975).
    """

    method = "suffix"

    def __init__(
        self,
        *,
        min_match: int = 1,
        max_match: int = 64,
        special_ids: Collection[int] = (),
        **options: Any,
    ) -> None:
        SuffixAutomaton(min_match, max_match)  # refuses impossible lengths
        super().__init__(lambda: SuffixAutomaton(min_match, max_match, special_ids), **options)
