"""How many drafts are worth verifying: the number that maximises expected tokens per millisecond of the
coming step.

*What a draft is worth.* A copied draft rests on a match of m tokens. If its first i − 1 tokens are accepted,
the match has grown to m + i − 1 tokens when token i is judged, so one curve says it all: a(ℓ), the
probability that the next token agrees after a match of length ℓ. Draft i is reached and accepted with
probability s_i = Π_{j<i} a(m + j). Each request learns its own a(ℓ) as the mean of a Beta posterior, from a
prior worth a few observations.

*What it costs.* A step of R rows takes cost(R) milliseconds, all sequences of the batch together.

*The choice.* Over the whole batch the drafts are added in order of falling s (within one proposal s falls, so
prefixes stay prefixes) and the count k with the largest (sequences + Σ s) / cost(rows + k) is taken. On a
curve with steps, such as an engine that never runs fewer than two rows, a free row is used and a dear one is
not.

Draft lengths change how fast a text arrives, never the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Upper ends of the match-length classes; the last class is open. Prior means: how often copied drafts agreed
# with SmolLM2-135M-Instruct's greedy answers over chat prompts of 13 kinds; any weight from 2 to 64 serves as
# well.
_CLASS_ENDS = (1, 2, 3, 4, 6, 9, 15)
_PRIOR_MEANS = (0.22, 0.5, 0.62, 0.68, 0.74, 0.8, 0.87, 0.95)
_PRIOR_WEIGHT = 8.0
_CLASS_OF = tuple(next(c for c, end in enumerate((*_CLASS_ENDS, 16)) if n <= end) for n in range(1, 17))


def match_class(length: int) -> int:
    """Index of the class that a match of `length` ≥ 1 tokens belongs to."""
    return _CLASS_OF[min(length, 16) - 1]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tokens that could be drafted, resting on a match of `match` tokens (0 when there are none)."""

    tokens: tuple[int, ...]
    match: int

    def cut(self, length: int) -> Candidate:
        return Candidate(self.tokens[:length], self.match)


class Acceptance:
    """a(ℓ) of one request: P(the next token agrees | the match is ℓ tokens long), a Beta posterior per class
    of ℓ.
    """

    __slots__ = ("_agreed", "_tried")

    def __init__(self) -> None:
        self._tried = [_PRIOR_WEIGHT] * len(_PRIOR_MEANS)
        self._agreed = [_PRIOR_WEIGHT * mean for mean in _PRIOR_MEANS]

    def estimate(self, length: int) -> float:
        """Posterior mean of a(length)."""
        c = match_class(length)
        return self._agreed[c] / self._tried[c]

    def learn(self, proposed: Candidate, committed: Sequence[int]) -> None:
        """Take in which of the proposed tokens were committed; those after the first difference were never
        judged.
        """
        for index, (guess, truth) in enumerate(zip(proposed.tokens, committed)):
            c = match_class(proposed.match + index)
            self._tried[c] += 1
            if guess != truth:
                return
            self._agreed[c] += 1

    def survival(self, candidate: Candidate) -> list[float]:
        """s_i for each token of the candidate: the probability that it and all before it are accepted."""
        survival, s = [], 1.0
        for index in range(len(candidate.tokens)):
            s *= self.estimate(candidate.match + index)
            survival.append(s)
        return survival


@dataclass(frozen=True, slots=True)
class StepCost:
    """cost(R): milliseconds of one step with R rows, linear between measured points and beyond the last two.

    rows: ascending, from 1. ms: of a step with that many rows, ascending or equal. Raises ValueError
    otherwise.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:]))
        costs = all(0 < a <= b for a, b in zip(self.ms, self.ms[1:]))
        if len(self.rows) < 2 or len(self.rows) != len(self.ms) or not rising or not costs:
            raise ValueError("a step cost needs two or more points, rows rising and milliseconds not falling")

    def __call__(self, first: int, last: int) -> np.ndarray:
        """float64 milliseconds for each number of rows from `first` to `last`."""
        wanted = np.arange(first, last + 1, dtype=np.float64)
        slope = (self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2])
        beyond = np.maximum(wanted - self.rows[-1], 0.0) * slope
        return np.interp(wanted, self.rows, self.ms) + beyond


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Chooses draft lengths. cost: the engine's step cost, None drafts all that was proposed.

    min_probability: a proposal stops where the estimated a(ℓ) falls below it.
    """

    cost: StepCost | None = None
    min_probability: float = 0.0

    def lengths(
        self, candidates: Sequence[Candidate], acceptance: Sequence[Acceptance], rows: int
    ) -> list[int]:
        """How many tokens of each candidate to draft. rows: of the step without any draft."""
        full = [self._likely(c, a) for c, a in zip(candidates, acceptance, strict=True)]
        if self.cost is None or not any(full):
            return full
        offers = [
            (s, owner)
            for owner, (candidate, a) in enumerate(zip(candidates, acceptance, strict=True))
            for s in a.survival(candidate.cut(full[owner]))
        ]
        offers.sort(
            key=lambda offer: -offer[0]
        )  # stable: equal survivals keep their order within a candidate
        lengths = [0] * len(candidates)
        for _, owner in offers[: self.worth([s for s, _ in offers], len(candidates), rows)]:
            lengths[owner] += 1
        return lengths

    def worth(self, survivals: Sequence[float], sequences: int, rows: int) -> int:
        """How many of these drafts to verify. survivals: of all sequences' drafts together, falling."""
        if self.cost is None:
            return len(survivals)
        gained = sequences + np.concatenate(([0.0], np.cumsum(survivals)))
        return int(np.argmax(gained / self.cost(rows, rows + len(survivals))))

    def _likely(self, candidate: Candidate, acceptance: Acceptance) -> int:
        if not self.min_probability:
            return len(candidate.tokens)
        for index in range(len(candidate.tokens)):
            if acceptance.estimate(candidate.match + index) < self.min_probability:
                return index
        return len(candidate.tokens)
