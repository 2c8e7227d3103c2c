"""Lookahead decoding (2402.02057): the target drafts for itself, by Jacobi iteration over a window of positions.

*Lookahead branch* (section 3.2). Guesses at the next positions are refined by running them: a window of W columns
holds N - 1 levels of them, each level what the target said after the level before. Column j is a trajectory that
starts at the j-th token after the last known one, so a column and what the target says after it are an n-gram of N
tokens: they go to the request's pool, the oldest level is dropped and the newest moves in.

    level 0       ●  ─▶ o1 ─▶ o2 ─▶ o3       ● the last known token, o the oldest guesses
                  │     │     │     │
    level 1       g1    g2    g3    g4       each sees its own column and level 0 up to it
                  ┆     ┆     ┆     ┆
    said         r2    r3    r4    r5        n-grams (●, g1, r2), (o1, g2, r3), …

So the window is a tree below the last known token, and the whole branch a probe (see `Draft`).

*Verification branch* (section 3.3). N-grams of the pool that begin with the last known token are the draft, up to G
of them merged into one token tree. Both branches run in the same forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import NO_TREE, Ask, Draft, DrafterSpec
from trtspec.drafters.catalog import spec_of
from trtspec.values import GenerationRequest
from trtspec.verify.tree import ROOT, TokenTree

Ngram = tuple[int, ...]  # without its first token, by which the pool has it


@dataclass(slots=True)
class _State:
    """levels[0]: W - 1 guesses (the last known token is column 0's); the others: W. Fewer than N - 1 at first.

    pool: by first token the n-grams seen last, in order, at most G of them.
    """

    last: int
    levels: list[list[int]]
    pool: dict[int, list[Ngram]] = field(default_factory=dict)


class LookaheadDrafter:
    """The `Drafter` of method lookahead. window_size: columns W. ngram_size: N. verification_set_size: G.

    The window starts from tokens of the prompt and is full after N - 1 steps. It is run where it fits into the
    step beside a draft, so an engine for it takes W + G branches. Raises ValueError for sizes that never draft.
    """

    def __init__(self, *, window_size: int = 4, ngram_size: int = 3, verification_set_size: int = 4) -> None:
        if window_size < 2 or ngram_size < 2 or verification_set_size < 1:
            raise ValueError(
                f"window {window_size}, n-grams of {ngram_size}, {verification_set_size} of them: "
                "must be at least 2, 2 and 1"
            )
        self.spec: DrafterSpec = spec_of("lookahead")
        self._window = window_size
        self._levels = ngram_size - 1
        self._most = verification_set_size

    def open(self, request: GenerationRequest, seed: int) -> _State:
        guesses = islice(cycle(request.prompt), self._window - 1)
        return _State(request.prompt[0], [list(guesses)])

    def observe(self, state: _State, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        state.last = tokens[-1]

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        return [self._propose(ask) for ask in asks]

    def learn(self, state: _State, following: Sequence[int]) -> None:
        """See `Probing.learn`. Adds the columns' n-grams to the pool and moves the window on."""
        said = _said(state.levels, following)
        if len(state.levels) < self._levels:
            state.levels.append(said)
            return
        starts = [state.last, *state.levels[0]]
        for column, first in enumerate(starts):
            self._remember(state, first, (*(level[column] for level in state.levels[1:]), said[column]))
        oldest, *newer = [*state.levels[1:], said]
        state.levels = [oldest[1:], *newer]

    def release(self, state: _State) -> None:
        """Nothing is shared: the state goes with its last reference."""

    def close(self) -> None:
        """Nothing to release."""

    def _propose(self, ask: Ask) -> Draft:
        probe = _window_tree(ask.state.levels)
        if len(probe) >= ask.rows or len(probe.leaves()) >= ask.branches:
            probe = NO_TREE
        nodes = min(ask.nodes, ask.rows - len(probe))
        branches = ask.branches - len(probe.leaves())
        chains: list[Ngram] = []
        for ngram in reversed(ask.state.pool.get(ask.state.last, ())):
            chain = ngram[: min(ask.depth, nodes)]
            wider = TokenTree.merge([*chains, chain])
            if len(wider) <= nodes and len(wider.leaves()) <= branches:
                chains.append(chain)
        return Draft(TokenTree.merge(chains), probe=probe)

    def _remember(self, state: _State, first: int, ngram: Ngram) -> None:
        known = state.pool.setdefault(first, [])
        if ngram in known:
            known.remove(ngram)
        known.append(ngram)
        del known[: -self._most]


def _window_tree(levels: Sequence[Sequence[int]]) -> TokenTree:
    """Level 0 as a chain, then column by column the newer levels, below the column's token of level 0."""
    oldest, *newer = levels
    tokens, parents = list(oldest), list(range(ROOT, len(oldest) - 1))
    for column in range(len(oldest) + 1 if newer else 0):
        parent = column - 1  # column 0 begins with the root
        for level in newer:
            parents.append(parent)
            parent = len(tokens)
            tokens.append(level[column])
    return TokenTree(tuple(tokens), tuple(parents))


def _said(levels: Sequence[Sequence[int]], following: Sequence[int]) -> list[int]:
    """What the target said after each column's newest token, from its answers for the root and `_window_tree`."""
    oldest, *newer = levels
    if not newer:
        return list(following)
    return list(following[1 + len(oldest) :][len(newer) - 1 :: len(newer)])
