"""The search: predicted tokens per second for every draft length, batch size and context; what decides; what is best.

Nothing here knows a mechanism: a `Workpoint` holds the step times, the drafter's cost and the acceptance curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trtspec.plan.acceptance import AcceptanceCurve, co_design_speedup
from trtspec.plan.deployment import Deployment
from trtspec.plan.drafter import Drafter
from trtspec.plan.roofline import compute_bound_draft_length
from trtspec.plan.step_time import StepCost, StepTimes
from trtspec.plan.tiles import draft_lengths_by_tiles, tile_draft_length
from trtspec.plan.tree import TreeModel

MAX_DRAFT_LENGTH = 64
# Tile multiples past the first that are listed as candidates.
_TILE_MULTIPLES = 4
# Draft lengths up to this are always listed.
_LISTED = 16


@dataclass(frozen=True, slots=True)
class Workpoint:
    """Everything tokens per second depend on, apart from batch, context and D. tree: what D drafted tokens make;
    None for chains, and where the curve is of a tree's levels as they were measured."""

    deployment: Deployment
    times: StepTimes
    drafter: Drafter
    curve: AcceptanceCurve
    plain_s: float | None = None
    tree: TreeModel | None = None

    def accepted(self, draft_length: int) -> tuple[float, int]:
        """(acceptance length, tokens one after the other) of a draft of `draft_length` tokens."""
        if self.tree is not None:
            return self.tree.expected(self.curve, draft_length)
        depth = self.drafter.deepest(draft_length)
        return (self.curve.acceptance_length(depth) if depth else 1.0), depth

    def draft_s(self, batch: int, draft_length: int, context: int) -> float:
        """Seconds that drafting adds to a step; a head that is run again makes a level of a tree in one pass."""
        drafter = self.drafter
        if self.tree is not None and drafter.shape == "serial":
            drafter = replace(drafter, depth=self.accepted(draft_length)[1])
        return drafter.seconds(self.deployment, batch, draft_length, context)


@dataclass(frozen=True, slots=True)
class Point:
    """One draft length at one batch and context. names: guidelines that propose it. step: seconds by term, the mean
    over the lengths a lookup really finds; full: of a step that verifies all `draft_length` drafts.

    tokens_per_s: of all sequences together. speedup: over the plain step. rows: query rows per KV head in the
    binding attention layer; tiles of tile_rows; tile_fill: share of them that is used.
    """

    draft_length: int
    batch: int
    context: int
    acceptance_length: float
    step: StepCost
    full: StepCost
    tokens_per_s: float
    speedup: float
    rows: int
    tiles: int
    tile_rows: int
    tile_fill: float
    extrapolated: bool = False
    names: tuple[str, ...] = field(default=())

    @property
    def itl_ms(self) -> float:
        """Mean milliseconds between two tokens of one sequence."""
        return self.step.total / self.acceptance_length * 1e3

    def as_json(self) -> dict[str, object]:
        """The stable candidate fields, and the rest."""
        return {
            "draft_length": self.draft_length,
            "acceptance_length": round(self.acceptance_length, 4),
            "step_ms": round(self.step.total * 1e3, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "speedup": round(self.speedup, 4),
            "rows": self.rows,
            "tiles": self.tiles,
            "tile_fill": round(self.tile_fill, 4),
            "tile_rows": self.tile_rows,
            "itl_ms": round(self.itl_ms, 4),
            "terms_ms": {name: round(value * 1e3, 4) for name, value in self.full.terms().items()},
            "extrapolated": self.extrapolated,
            "names": list(self.names),
        }


def evaluate(work: Workpoint, batch: int, draft_length: int, context: int) -> Point:
    """Predict one point. A lookup drafter's steps are a mix of the lengths it finds; others always draft D."""
    al, depth = work.accepted(draft_length)
    draft = work.draft_s(batch, draft_length, context)
    beside = work.drafter.probe_rows if draft_length else 0
    full = replace(work.times.step(batch, draft_length + beside, context), draft=draft)
    step = replace(_mean_step(work, batch, draft_length, context), draft=draft)
    plain = work.plain_s or work.times.step(batch, 0, context).total
    rows, tiles, tile_rows = _binding_tiles(work.deployment, draft_length + beside)
    return Point(
        draft_length=draft_length,
        batch=batch,
        context=context,
        acceptance_length=al,
        step=step,
        full=full,
        tokens_per_s=batch * al / step.total,
        speedup=al * plain / step.total,
        rows=rows,
        tiles=tiles,
        tile_rows=tile_rows,
        tile_fill=rows / (tiles * tile_rows),
        extrapolated=work.curve.extrapolated(depth),
    )


def _mean_step(work: Workpoint, batch: int, draft_length: int, context: int) -> StepCost:
    """The target's part of a step, averaged over the lengths that are drafted."""
    terms: dict[str, float] = {}
    beside = work.drafter.probe_rows if draft_length else 0
    for length, share in work.curve.draft_lengths(draft_length):
        for name, seconds in work.times.step(batch, length + beside, context).terms().items():
            terms[name] = terms.get(name, 0.0) + share * seconds
    return StepCost(**terms)


def _binding_tiles(deployment: Deployment, draft_length: int) -> tuple[int, int, int]:
    """(rows, tiles, tile rows) per KV head in the attention shape with the largest group on a rank."""
    best = (draft_length + 1, 1, draft_length + 1)
    group = 0
    for shape in deployment.attention:
        found = shape.group_per_rank(deployment.head_ranks)
        if found and found > group:
            group = found
            _, tile_rows, tiles = deployment.tile_of(shape, draft_length)
            best = (found * (draft_length + 1), tiles, tile_rows)
    return best


def draft_length_cap(work: Workpoint) -> int:
    """The longest draft worth looking at: the drafter's own limit or 64."""
    return (
        min(work.drafter.limit or MAX_DRAFT_LENGTH, MAX_DRAFT_LENGTH) if work.drafter.shape != "none" else 0
    )


def curve_points(work: Workpoint, batch: int, context: int) -> tuple[Point, ...]:
    """Every draft length from 0 to the cap."""
    return tuple(evaluate(work, batch, d, context) for d in range(draft_length_cap(work) + 1))


def best_of(points: Sequence[Point], max_itl_ms: float | None = None) -> Point | None:
    """The point with the most tokens per second that keeps the latency limit; None where none does.

    Points that rest on acceptance nobody measured are listed, never chosen. Of points within 0.1 % the shortest
    draft wins: it costs less memory and relies on less acceptance.
    """
    allowed = [p for p in points if not p.extrapolated and (max_itl_ms is None or p.itl_ms <= max_itl_ms)]
    if not allowed:
        return None
    top = max(p.tokens_per_s for p in allowed)
    return min((p for p in allowed if p.tokens_per_s >= top * 0.999), key=lambda p: p.draft_length)


def guideline_candidates(work: Workpoint, batch: int) -> dict[int, list[str]]:
    """Draft lengths that guidelines 1 to 4 propose, with their names; all within the drafter's cap.

    Guideline 5, the choice of the mechanism, is the ranking.
    """
    d = work.deployment
    cap = draft_length_cap(work)
    names: dict[int, list[str]] = {0: ["plain decoding"]}

    def propose(length: int | None, name: str) -> None:
        if length is not None and 0 < length <= cap:
            names.setdefault(length, []).append(name)

    propose(compute_bound_draft_length(d.ridge_rows, batch), "G1 compute-bound linear layers")
    shape = max(d.attention, key=lambda g: g.group_per_rank(d.head_ranks) or 0, default=None)
    if shape is not None:
        group = shape.group_per_rank(d.head_ranks) or 1
        kernel, tile_rows, _ = d.tile_of(shape, cap)
        if tile_rows > 1:
            propose(tile_draft_length(group, tile_rows, rows=kernel.rows), f"G2 one tile of {tile_rows} rows")
            first = kernel.count(group, 0, tile_rows)
            for tiles, length in draft_lengths_by_tiles(group, tile_rows, kernel.rows, cap):
                if first < tiles <= first + _TILE_MULTIPLES:
                    propose(length, f"G3 {tiles} tiles")
    propose(latency_optimal_draft_length(work), "G4 latency-optimal")
    return names


def latency_optimal_draft_length(work: Workpoint) -> int:
    """Guideline 4: D with the largest AL / (1 + ρD) within the acceptance data.

    ρ is the draft's depth over the target's for drafters that pass once per token, and 0 for all others.
    """
    layers = work.deployment.facts.layers or 1
    ratio = work.drafter.layers / layers if work.drafter.shape == "serial" else 0.0
    lengths = [
        d for d in range(draft_length_cap(work) + 1) if not work.curve.extrapolated(work.accepted(d)[1])
    ]

    def speedup(draft_length: int) -> float:
        length, depth = work.accepted(draft_length)
        return co_design_speedup(length, ratio, depth if work.tree else draft_length)

    return max(lengths, key=speedup)


def candidates(
    work: Workpoint, batch: int, points: Sequence[Point], best: Point, chosen: Point
) -> tuple[Point, ...]:
    """Named candidates, short lengths, the best and the chosen one, in order of draft length."""
    names = guideline_candidates(work, batch)
    names.setdefault(best.draft_length, []).append("best")
    if chosen.draft_length != best.draft_length:
        names.setdefault(chosen.draft_length, []).append("chosen")
    lengths = sorted({*names, *range(min(_LISTED, draft_length_cap(work)) + 1)})
    return tuple(replace(points[d], names=tuple(names.get(d, ()))) for d in lengths)


def binding_term(points: Sequence[Point], best: Point) -> str:
    """Why the best draft is not one token longer: the term whose growth outweighs the extra acceptance.

    `limit` where the drafter cannot draft more, `acceptance data` where nobody measured further; `acceptance`
    where a longer step would cost almost nothing and still not pay.
    """
    following = next((p for p in points if p.draft_length == best.draft_length + 1), None)
    if following is None:
        return "limit" if best.draft_length else "no drafter"
    if (
        following.extrapolated
        and not best.extrapolated
        and following.tokens_per_s > best.tokens_per_s * 1.001
    ):
        return "acceptance data"
    before, after = best.step.terms(), following.step.terms()
    growth = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after}}
    name = max(growth, key=lambda term: growth[term])
    if growth[name] < 0.002 * best.step.total:
        return "acceptance"
    return name


def crossover_batch(at: Callable[[int], Workpoint], context: int, largest: int) -> int | None:
    """The smallest batch up to `largest` from which plain decoding is at least as fast; None where there is none.

    Found by doubling, then bisection, on the assumption that speculation loses for good where it first loses.
    """

    def pays(batch: int) -> bool:
        best = best_of(curve_points(at(batch), batch, context))
        return best is not None and best.draft_length > 0

    low, high = 0, 1
    while high < largest and pays(high):
        low, high = high, min(2 * high, largest)
    if pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high
