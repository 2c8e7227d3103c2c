"""What would change a decision: nearby assumptions under which another draft length wins, and the break-even."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trtspec.plan.request import PlanRequest
from trtspec.plan.result import BatchPlan
from trtspec.plan.search import MAX_DRAFT_LENGTH, Point, Workpoint, best_of, curve_points


def what_would_change(
    at: Callable[[str, int], Workpoint], method: str, request: PlanRequest, first: BatchPlan, chosen: Point
) -> tuple[str, ...]:
    """One line for each nearby assumption that moves the best draft length, and the acceptance that breaks even."""
    work = at(method, first.batch)
    asked = [
        ("acceptance 20 % lower at every position", _scaled(work, 0.8), first.batch, request.context),
        ("acceptance 15 % higher at every position", _scaled(work, 1.15), first.batch, request.context),
        ("the last measured acceptance held at longer drafts", _trusting(work), first.batch, request.context),
        (f"batch {first.batch * 8}", at(method, first.batch * 8), first.batch * 8, request.context),
        (f"batch {first.batch * 32}", at(method, first.batch * 32), first.batch * 32, request.context),
        (f"context {request.context * 8:,}", work, first.batch, request.context * 8),
    ]
    changes = []
    for words, other, batch, context in asked:
        best = best_of(curve_points(other, batch, context))
        if best is not None and best.draft_length != first.best.draft_length:
            changes.append(f"{words}: draft length {best.draft_length} ({best.speedup:.2f}×)")
    if chosen.draft_length:
        changes.append(
            f"an acceptance length under {chosen.acceptance_length / chosen.speedup:.2f} at draft length "
            f"{chosen.draft_length} would be slower than plain decoding"
        )
    return tuple(changes)


def _scaled(work: Workpoint, factor: float) -> Workpoint:
    rates = tuple(min(1.0, rate * factor) for rate in work.curve.rates(max(1, work.curve.measured_to)))
    return replace(work, curve=replace(work.curve, conditional=rates, runs=()))


def _trusting(work: Workpoint) -> Workpoint:
    return replace(work, curve=replace(work.curve, measured_to=MAX_DRAFT_LENGTH, runs=()))
