"""How many tokens a verify step emits, from acceptance by position.

Conditional rate AR_i = P(draft i accepted | drafts before it accepted). Marginal m_i = Π_{j≤i} AR_j.
Acceptance length AL = 1 + Σ m_i: the bonus token is counted. Every law is a small pure function; where two
of them describe the same case they agree, and the tests hold them to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from operator import mul


def expected_tokens(alpha: float, draft_length: int) -> float:
    """E[N] of a chain with constant acceptance α and γ = draft_length: (1 − α^(γ+1)) / (1 − α) (2211.17192, eq. 1)."""
    return float(draft_length + 1) if alpha == 1 else (1 - alpha ** (draft_length + 1)) / (1 - alpha)


def leviathan_speedup(alpha: float, draft_length: int, cost: float) -> float:
    """S = E[N] / (γc + 1), c the draft's step over the target's, verification free (2211.17192, theorem 3.8)."""
    return expected_tokens(alpha, draft_length) / (draft_length * cost + 1)


def co_design_speedup(acceptance_length: float, depth_ratio: float, draft_length: int) -> float:
    """S = AL / (1 + ρD), ρ draft depth over target depth (NVIDIA's co-design guide; exact form unconfirmed)."""
    return acceptance_length / (1 + depth_ratio * draft_length)


def projected_speedup(acceptance_length: float, plain_step: float, speculative_step: float) -> float:
    """S = AL · t_ar / t_sd (SPEED-Bench, 2604.09557)."""
    return acceptance_length * plain_step / speculative_step


def marginals(conditional: Sequence[float]) -> tuple[float, ...]:
    """P(at least i drafts accepted) for i = 1…, from conditional rates."""
    return tuple(accumulate(conditional, mul))


def acceptance_length(conditional: Sequence[float], draft_length: int | None = None) -> float:
    """AL of a chain of `draft_length` drafts (default: all positions given)."""
    used = conditional if draft_length is None else conditional[:draft_length]
    return 1 + sum(marginals(used))


def conditional_rates(marginal: Sequence[float]) -> tuple[float, ...]:
    """The inverse of `marginals`; a position that is never reached has rate 0."""
    before = (1.0, *marginal)
    return tuple(now / last if last > 0 else 0.0 for last, now in zip(before, marginal, strict=False))


def tree_acceptance_length(parents: Sequence[int], rates: Sequence[float]) -> float:
    """AL of a draft tree: 1 + Σ over nodes of the product of rates on the path from the root (2401.15077, 2305.09781).

    parents: of each node, −1 for children of the committed token; parents come first. rates: probability that the
    node is accepted given that its parent is; of siblings at most one is, so their rates sum to at most 1.
    """
    reached: list[float] = []
    for parent, rate in zip(parents, rates, strict=True):
        reached.append(rate * (reached[parent] if parent >= 0 else 1.0))
    return 1 + sum(reached)


def alpha_from_acceptance_length(target: float, draft_length: int) -> float:
    """The constant rate whose E[N] at `draft_length` is `target` (bisection; 1 ≤ target ≤ D+1)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, draft_length) < target else (low, middle)
    return (low + high) / 2


def replayed_steps(runs: Sequence[tuple[int, int, int]], draft_length: int) -> dict[int, float]:
    """Steps of a *retrieval* drafter capped at a shorter draft length, from its recorded ones: drafted → steps.

    runs: (drafted, accepted, count). A run of a accepted drafts and its bonus token is a+1 tokens; capped at D the
    lookup finds the same continuation again, so the run takes ceil((a+1)/(D+1)) steps. (A model drafter does not
    resume like that: its conditional rates simply stop at D, see `acceptance_length`.)
    """
    steps: dict[int, float] = {}
    for drafted, accepted, count in runs:
        length = min(drafted, draft_length)
        steps[length] = steps.get(length, 0.0) + ceil((accepted + 1) / (length + 1)) * count
    return steps


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Acceptance by position with where it came from.

    conditional: AR_1, AR_2, …; positions past its end use the last rate and are marked extrapolated.
    measured_to: the longest draft length the source covers. kind: declared, measured, trained (on the held-out
    text of the draft's training) or published.
    runs: (drafted, accepted, count) of a retrieval drafter's steps, which are replayed instead.
    """

    conditional: tuple[float, ...]
    source: str
    measured_to: int
    kind: str = "published"
    runs: tuple[tuple[int, int, int], ...] = ()

    def acceptance_length(self, draft_length: int) -> float:
        """AL at `draft_length` (0 gives 1)."""
        if self._replays(draft_length):
            tokens = sum((accepted + 1) * count for _, accepted, count in self.runs)
            return tokens / sum(replayed_steps(self.runs, draft_length).values())
        return acceptance_length(self.rates(draft_length))

    def draft_lengths(self, draft_length: int) -> tuple[tuple[int, float], ...]:
        """(drafted, share of steps) when capped at `draft_length`: lookups often find less, or nothing."""
        if not self._replays(draft_length):
            return ((draft_length, 1.0),)
        steps = replayed_steps(self.runs, draft_length)
        total = sum(steps.values())
        return tuple((length, count / total) for length, count in sorted(steps.items()))

    def rates(self, draft_length: int) -> tuple[float, ...]:
        """Conditional rates of positions 1…draft_length, the last one repeated past the data."""
        if draft_length <= len(self.conditional):
            return self.conditional[:draft_length]
        last = self.conditional[-1] if self.conditional else 0.0
        return (*self.conditional, *([last] * (draft_length - len(self.conditional))))

    def extrapolated(self, draft_length: int) -> bool:
        """Whether AL at this length rests on positions nobody measured."""
        return draft_length > self.measured_to

    def _replays(self, draft_length: int) -> bool:
        return bool(self.runs) and draft_length > 0


def curve_from_points(
    points: Sequence[tuple[int, float]], source: str, kind: str = "published"
) -> AcceptanceCurve:
    """A curve through published (draft length, AL) points.

    One point: a constant rate. More: a first rate and a constant later one (the shape of lookups, whose first
    draft often misses), by least squares over a grid. Raises ValueError where AL is outside 1…1+D.
    """
    for length, value in points:
        if not 1 <= value <= length + 1:
            raise ValueError(f"acceptance length {value} at draft length {length} is outside 1…{length + 1}")
    longest = max(length for length, _ in points)
    if len(points) == 1:
        alpha = alpha_from_acceptance_length(points[0][1], longest)
        return AcceptanceCurve((alpha,) * longest, f"{source} (constant rate fitted)", longest, kind)
    best = min(
        ((first / 100, later / 100) for first in range(101) for later in range(101)),
        key=lambda rates: sum(
            (1 + rates[0] * expected_tokens(rates[1], d - 1) - al) ** 2 for d, al in points if d
        ),
    )
    return AcceptanceCurve(
        (best[0], *([best[1]] * (longest - 1))), f"{source} (two rates fitted)", longest, kind
    )
