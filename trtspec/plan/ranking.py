"""Every mechanism at its best, side by side, with what speaks for and against it."""

from __future__ import annotations

from collections.abc import Callable

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.errors import ConfigError
from trtspec.plan.mechanisms import FREE, NOTES
from trtspec.plan.request import PlanRequest
from trtspec.plan.result import Ranked
from trtspec.plan.search import Workpoint, best_of, curve_points
from trtspec.trtllm.contract import contract_for, default_version


def rank(
    at: Callable[[str, int], Workpoint], facts: ArchitectureFacts, request: PlanRequest
) -> tuple[Ranked, ...]:
    """Mechanisms the backend runs, best predicted speed-up first; those without known acceptance last.

    What the version of TensorRT-LLM does not run, the configured one or the default, is not available.
    """
    ranked = [_one(at, method, facts, request) for method in NOTES if runs(method, request.backend)]
    return tuple(sorted(ranked, key=lambda r: (r.speedup is None, -(r.speedup or 0.0), not r.available)))


def runs(method: str, backend: str) -> bool:
    """Whether an engine backend runs a mechanism, by the drafter catalogue."""
    from trtspec.drafters.catalog import spec_of

    return backend in spec_of(method).backends


def _not_in_version(method: str, request: PlanRequest) -> str | None:
    """Why the version of TensorRT-LLM that is planned for lacks a mechanism; None where it runs it."""
    if request.backend != "tensorrt_llm":
        return None
    version = request.version or default_version("none")[0]
    return f"not in TensorRT-LLM {version}" if contract_for(version).type_of(method) is None else None


def _one(
    at: Callable[[str, int], Workpoint], method: str, facts: ArchitectureFacts, request: PlanRequest
) -> Ranked:
    notes = NOTES[method]
    absent = _not_in_version(method, request)
    free = method in FREE and (method != "mtp" or facts.mtp_layers > 0) and absent is None
    available = method == request.method or free
    batch = request.batch_sizes[0]
    if absent and request.version:
        return Ranked(method, False, None, None, None, None, None, notes.training, absent)
    if method == "mtp" and facts.mtp_layers == 0:
        return Ranked(
            method, False, None, None, None, None, None, notes.training, "the checkpoint has no MTP layers"
        )
    try:
        work = at(method, batch)
    except ConfigError:
        reason = "no published acceptance: measure or declare it"
        return Ranked(method, available, None, None, None, None, None, notes.training, reason)
    points = [p for p in curve_points(work, batch, request.context) if p.draft_length]
    best = best_of(points, request.max_itl_ms) or best_of(points)
    if best is None:
        return Ranked(method, available, None, None, None, None, None, notes.training, "drafts nothing")
    plain = best.tokens_per_s / best.speedup
    reason = [
        f"{best.acceptance_length:.2f} tokens a step",
        f"drafting {best.step.draft / best.step.total:.0%} of it",
    ]
    if not available and method not in FREE:
        reason.append(f"needs {notes.ships}")
    if absent:
        reason.append(absent)
    if notes.retrain and method != "mtp":
        reason.append("retrained with every change of the target")
    if best.tokens_per_s < plain:
        reason.append("slower than plain decoding")
    return Ranked(
        method=method,
        available=available,
        draft_length=best.draft_length,
        acceptance_length=best.acceptance_length,
        speedup=best.speedup,
        draft_ms=best.step.draft * 1e3,
        memory_bytes=work.drafter.memory_bytes,
        training=notes.training,
        reason=", ".join(reason),
    )
