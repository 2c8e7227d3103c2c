"""Prompt lookup, or n-gram drafting (Saxena 2023; LLMA, 2304.04487): copy what followed the last n tokens
before.

The longest suffix of prompt and output, from max_ngram down to min_ngram tokens, is looked up among earlier
n-grams; what followed its most recent occurrence is the draft. The index is a dictionary per n from n-gram to
the position after its last occurrence, extended token by token: a step costs O(new tokens · max_ngram),
whatever the context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import Ask, Draft, DrafterSpec
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.policy import Acceptance, Candidate, DraftPolicy
from trtspec.drafters.pool import NgramPool
from trtspec.values import GenerationRequest

_ID_BITS = 32  # n-grams are packed into one Python integer, 32 bits a token: exact, no collisions


@dataclass(frozen=True, slots=True)
class Match:
    """`length` last tokens occurred before; `following` is the position of the token that came next then."""

    length: int
    following: int


class NgramIndex:
    """n-grams of one growing token sequence, min_ngram ≤ n ≤ max_ngram.

    special_ids (end of text, turn markers) are part of no n-gram, so that no match reaches across a turn.
    operations: dictionary accesses so far, the measure of its cost.
    """

    __slots__ = ("_after", "_min", "_special", "_turn", "match", "operations", "tokens")

    def __init__(self, min_ngram: int, max_ngram: int, special_ids: Collection[int] = ()) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-gram lengths {min_ngram} to {max_ngram}: must be 1 ≤ min_ngram ≤ max_ngram")
        self._min = min_ngram
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in range(min_ngram, max_ngram + 1))
        self._special = frozenset(special_ids)
        self._turn = 0  # position after the last special token
        self.tokens: list[int] = []
        self.match: Match | None = None  # of the current suffix, never with itself
        self.operations = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; `match` is then the longest for the new suffix."""
        history, last = self.tokens, len(tokens) - 1
        for index, token in enumerate(tokens):
            history.append(token)
            end = len(history)
            self.match = None
            if token in self._special:
                self._turn = end
                continue
            longest = min(self._min + len(self._after) - 1, end - self._turn)
            gram = 0
            for n in range(1, longest + 1):
                gram |= history[end - n] << (_ID_BITS * (n - 1))
                if n < self._min:
                    continue
                after = self._after[n - self._min]
                # read before writing: the entry is an earlier occurrence, never this suffix itself
                if index == last and (following := after.get(gram)) is not None:
                    self.match = Match(n, following)
                after[gram] = end
                self.operations += 1

    def continuation(self, following: int, count: int) -> list[int]:
        """Up to `count` tokens from position `following` on, ending with the first special one.

        Past the end of the sequence it goes on through itself, as an overlapping LZ77 copy does: text that
        repeats with period k is continued for as long as asked, not for k tokens only.
        """
        return copy_from(self.tokens, following, count, self._special)


def copy_from(tokens: Sequence[int], start: int, count: int, special: Collection[int]) -> list[int]:
    """Overlapping copy of up to `count` tokens from `start`, ending with the first special one."""
    copied: list[int] = []
    period = len(tokens) - start
    for index in range(count):
        token = tokens[start + index] if index < period else copied[index - period]
        copied.append(token)
        if token in special:
            break
    return copied


class CopyIndex(Protocol):
    """What a `CopyDrafter` copies from: one sequence, and the longest earlier match of its suffix."""

    match: Match | None
    tokens: list[int]

    def extend(self, tokens: Sequence[int]) -> None: ...
    def continuation(self, following: int, count: int) -> list[int]: ...


@dataclass(slots=True)
class _State:
    index: CopyIndex
    acceptance: Acceptance
    prompt_length: int
    proposed: Candidate | None = None


class CopyDrafter:
    """A `Drafter` that copies what followed the longest match its index finds; subclasses name the index.

    min_draft_length: shorter proposals are dropped. max_spec_factor: at most this many tokens for each
    matched one. policy: how long a proposal is worth being; the default proposes all it is asked for. pool: of ended
    requests, copied from where its match is longer than the sequence's own; None keeps requests apart. pool_prompts:
    whether prompts go to it, besides what was generated.
    """

    method: str

    def __init__(
        self,
        open_index: Callable[[], CopyIndex],
        *,
        min_draft_length: int = 1,
        max_spec_factor: float | None = None,
        policy: DraftPolicy | None = None,
        pool: NgramPool | None = None,
        pool_prompts: bool = False,
    ) -> None:
        self.spec: DrafterSpec = spec_of(self.method)
        self._open_index = open_index
        self._min_draft = min_draft_length
        self._factor = max_spec_factor
        self._policy = policy or DraftPolicy()
        self._pool = pool
        self._pool_prompts = pool_prompts

    def open(self, request: GenerationRequest, seed: int) -> _State:
        state = _State(self._open_index(), Acceptance(), len(request.prompt))
        state.index.extend(request.prompt[:1])
        return state

    def observe(self, state: _State, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        if state.proposed is not None:
            state.acceptance.learn(state.proposed, tokens)
            state.proposed = None
        state.index.extend(tokens)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        candidates = [self._candidate(ask) for ask in asks]
        lengths = self._policy.lengths(candidates, [ask.state.acceptance for ask in asks], rows)
        drafts = []
        for ask, candidate, length in zip(asks, candidates, lengths, strict=True):
            chosen = candidate.cut(length if length >= self._min_draft else 0)
            ask.state.proposed = chosen
            drafts.append(Draft.chain(chosen.tokens))
        return drafts

    def release(self, state: _State) -> None:
        """The index goes with the last reference to the state, its tokens to the pool, if there is one."""
        if self._pool is not None:
            text = state.index.tokens[0 if self._pool_prompts else state.prompt_length :]
            if text:
                self._pool.add(text)

    def close(self) -> None:
        """Nothing to release."""

    def _candidate(self, ask: Ask) -> Candidate:
        index, count = ask.state.index, min(ask.nodes, ask.depth)
        length, tokens = (0, []) if self._pool is None else self._pool.find(index.tokens, count)
        if index.match is not None and (index.match.length >= length or not tokens):
            length, tokens = index.match.length, index.continuation(index.match.following, count)
        if self._factor is not None:
            tokens = tokens[: int(self._factor * length)]
        return Candidate(tuple(tokens), length)


class NgramDrafter(CopyDrafter):
    """The `Drafter` of method ngram. special_ids: never matched, and a draft ends with the first one it
    copies.

    options: those of `CopyDrafter`. Raises ValueError for lengths that could never match.
    """

    method = "ngram"

    def __init__(
        self,
        *,
        max_ngram: int = 3,
        min_ngram: int = 2,
        special_ids: Collection[int] = (),
        **options: Any,
    ) -> None:
        NgramIndex(min_ngram, max_ngram)  # refuses impossible lengths
        super().__init__(lambda: NgramIndex(min_ngram, max_ngram, special_ids), **options)
