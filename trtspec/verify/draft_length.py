"""How long a draft may be, decided anew at every step: by how many sequences decode, or by recent acceptance.

A policy never changes a text. The loop asks it only for requests whose text is the same with any drafts or none: all
greedy ones, and all whose drafts carry no q. Others keep the full draft length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trtspec.drafters.policy import StepCost
from trtspec.verify.tree import ROOT, TokenTree

Pace = Any  # what a policy keeps for one request; only the policy looks inside

# Recent acceptance: an observation counts for half after 14 more of the same position (0.95 ^ 14 = 0.49).
_DISCOUNT = 0.95
_PRIOR_WEIGHT = 4.0
_UNKNOWN_RATE = 0.5
# Steps between two full-length drafts of a request that drafts less: at first, and at most.
_FIRST_LOOK, _LAST_LOOK = 16, 256


class DraftLengthPolicy(Protocol):
    """Says, once a step, how long the drafts of its requests may be."""

    def open(self) -> Pace:
        """Start a request; never None."""

    def lengths(self, paces: Sequence[Pace], decoding: int, rows: int) -> list[int]:
        """For each request the most tokens of its coming draft; 0: the drafter is not asked and the step is plain.

        decoding: sequences of the step whose prompt is in. rows: rows of the step without these drafts.
        """

    def learn(self, pace: Pace, tree: TokenTree, path: Sequence[int]) -> None:
        """A request's draft was verified: `path` are the accepted nodes of `tree`."""


@dataclass(frozen=True, slots=True)
class ScheduledLength:
    """The draft length of a plan's schedule. at: decoding sequences → draft length."""

    at: Callable[[int], int]

    def open(self) -> tuple[()]:
        """Requests have nothing of their own."""
        return ()

    def lengths(self, paces: Sequence[Pace], decoding: int, rows: int) -> list[int]:
        """The same for all."""
        return [self.at(decoding)] * len(paces)

    def learn(self, pace: Pace, tree: TokenTree, path: Sequence[int]) -> None:
        """Acceptance plays no part."""


@dataclass(slots=True)
class _Recent:
    """Discounted trials of each node of a request's drafts, given that its parent was accepted. parents: of the nodes
    of the newest draft. waited, patience: steps since the last full-length draft, and until the next.
    """

    agreed: list[float]
    tried: list[float]
    parents: tuple[int, ...] = ()
    waited: int = 0
    patience: int = _FIRST_LOOK

    def survivals(self) -> list[float]:
        """Probability that each node is accepted, were the next draft shaped like the last; longer ones are chains.

        Drafters put likely nodes first, so a node that seems likelier than one before it is taken for as likely.
        """
        accepted: list[float] = []
        for node, (agreed, tried) in enumerate(zip(self.agreed, self.tried, strict=True)):
            parent = self.parents[node] if node < len(self.parents) else node - 1
            above = 1.0 if parent == ROOT else accepted[parent]
            accepted.append(above * agreed / tried)
        return np.minimum.accumulate(accepted).tolist()


class AdaptiveLength:
    """Of every request's draft as many tokens as bring the most expected tokens per millisecond of the step.

    Node i of a draft is accepted, if its parent was, as often as it was lately (an exponentially weighted mean, from
    the plan's rate at position i). Over all requests the likeliest tokens are taken, k of them with the largest
    (sequences + Σ survival) / (cost(rows + k) + draft_ms). A request for which that is none decodes plainly; now and
    then, ever more rarely, it drafts the full length, so that nothing is believed for good.

    longest: the full length. cost: of the target's step by rows. draft_ms: milliseconds of drafting 0, 1, … `longest`
    tokens. rates: expected conditional acceptance by position, the last one standing for those after it.
    """

    def __init__(
        self, longest: int, cost: StepCost, draft_ms: Sequence[float], rates: Sequence[float] = ()
    ) -> None:
        if longest < 1 or len(draft_ms) != longest + 1:
            raise ValueError(f"{len(draft_ms)} drafting times for draft lengths 0 to {longest}")
        self._longest = longest
        self._cost = cost
        self._draft_ms = tuple(draft_ms)
        known = [*rates[:longest]] or [_UNKNOWN_RATE]
        self._rates = known + [known[-1]] * (longest - len(known))
        # Within a stretch of equal drafting time only the longest is worth a look.
        self._reaches = [reach for reach in range(1, longest) if draft_ms[reach + 1] > draft_ms[reach]] + [
            longest
        ]

    def open(self) -> _Recent:
        return _Recent([_PRIOR_WEIGHT * rate for rate in self._rates], [_PRIOR_WEIGHT] * self._longest)

    def lengths(self, paces: Sequence[_Recent], decoding: int, rows: int) -> list[int]:
        """See `DraftLengthPolicy`; counts the step."""
        lengths = self._best([pace.survivals() for pace in paces], decoding, rows)
        return [self._look(pace, length) for pace, length in zip(paces, lengths, strict=True)]

    def learn(self, pace: _Recent, tree: TokenTree, path: Sequence[int]) -> None:
        """See `DraftLengthPolicy`. Nodes below a rejected one were never judged."""
        accepted = {ROOT, *path}
        pace.parents = tree.parents[: self._longest]
        for node, parent in enumerate(pace.parents):
            if parent in accepted:
                pace.tried[node] = _DISCOUNT * pace.tried[node] + 1
                pace.agreed[node] = _DISCOUNT * pace.agreed[node] + (node in accepted)

    def _best(self, survivals: Sequence[Sequence[float]], decoding: int, rows: int) -> list[int]:
        chosen: list[int] = [0] * len(survivals)
        best = decoding / self._cost(rows, rows)[0]
        for reach in self._reaches:
            offers = [(s, owner) for owner, own in enumerate(survivals) for s in own[:reach]]
            offers.sort(key=lambda offer: -offer[0])
            gained = decoding + np.cumsum([s for s, _ in offers])
            speeds = gained / (self._cost(rows + 1, rows + len(offers)) + self._draft_ms[reach])
            count = int(speeds.argmax()) + 1
            if speeds[count - 1] > best:
                best = speeds[count - 1]
                chosen = np.bincount([o for _, o in offers[:count]], minlength=len(survivals)).tolist()
        return chosen

    def _look(self, pace: _Recent, length: int) -> int:
        """`length`, or the full one when it is time."""
        if length == self._longest:
            pace.waited, pace.patience = 0, _FIRST_LOOK
            return length
        pace.waited += 1
        if pace.waited < pace.patience:
            return length
        pace.waited, pace.patience = 0, min(2 * pace.patience, _LAST_LOOK)
        return self._longest
