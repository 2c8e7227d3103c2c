"""`make_plan` and `plan_bare`: facts → deployment → search → schedule → plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.errors import PlanInfeasible
from trtspec.plan.deployment import HIERARCHICAL, Deployment, deploy
from trtspec.plan.devices import Device, load_device
from trtspec.plan.drafting import Draft
from trtspec.plan.feasibility import (
    check_draft,
    check_latency,
    check_request,
    choose_method,
    format_plan,
    smallest_fitting,
)
from trtspec.plan.layout import choose_layout
from trtspec.plan.measured import RETRIEVAL, Measured, read_measured
from trtspec.plan.memory import plan_memory, refuse_misfit
from trtspec.plan.position import kernel_warnings, roofline_of
from trtspec.plan.ranking import rank
from trtspec.plan.request import DraftLengthPolicy, PlanRequest, request_from
from trtspec.plan.result import BatchPlan, Plan
from trtspec.plan.schedule import Schedule, monotone, tensorrt_llm_schedule
from trtspec.plan.search import (
    MAX_DRAFT_LENGTH,
    Point,
    Workpoint,
    best_of,
    binding_term,
    candidates,
    crossover_batch,
    curve_points,
    draft_length_cap,
)
from trtspec.plan.sensitivity import what_would_change
from trtspec.plan.workpoints import Workpoints
from trtspec.trtllm.contract import default_version

if TYPE_CHECKING:
    from trtspec.config import Config

# Mechanisms whose drafter decides at every step how many of its drafts are worth verifying (drafters/policy.py).
_WEIGHED = RETRIEVAL - {"lookahead"}


def make_plan(
    config: Config,
    facts: ArchitectureFacts,
    *,
    draft: Draft | None = None,
    others: Sequence[Draft] = (),
    measured: Measured | None = None,
    device: Device | None = None,
) -> Plan:
    """Plan a config. others: SpecInfer's drafts after the first. measured replaces priors and the step-time model;
    device replaces the config's.

    Raises ConfigError (files that do not fit together, sizes missing) and PlanInfeasible with the nearest
    feasible change.
    """
    if measured is None and config.workload.measured is not None:
        measured = read_measured(Path(config.workload.measured))
    return solve(request_from(config), facts, draft=draft, others=others, measured=measured, device=device)


def plan_bare(
    facts: ArchitectureFacts,
    *,
    device: str = "h200-sxm",
    backend: str | None = None,
    method: str = "auto",
    tensor_parallel: int | None = None,
    batch_sizes: Sequence[int] = (1, 8, 32),
    context: int = 4096,
    output_length: int = 256,
    draft: Draft | None = None,
    measured: Measured | None = None,
    **settings: Any,
) -> Plan:
    """Plan a model without a config: an exploration, so a plan that does not fit is said rather than refused.

    backend: None takes TensorRT-LLM on a GPU and ONNX Runtime on a CPU. tensor_parallel: None takes the smallest
    size whose ranks hold the weights. settings: any further field of `PlanRequest`.
    """
    chosen = load_device(device)
    ranks = tensor_parallel or smallest_fitting(facts, chosen, settings.get("quantization", "none"))
    defaults = {"max_batch_size": max(batch_sizes), "must_fit": False, "only_free": False}
    request = PlanRequest(
        device=device,
        backend=backend or ("onnxruntime" if chosen.kind == "cpu" else "tensorrt_llm"),
        method=method,
        tensor_parallel=ranks,
        batch_sizes=tuple(sorted(batch_sizes)),
        context=context,
        output_length=output_length,
        **defaults | settings,
    )
    return solve(request, facts, draft=draft, measured=measured)


def solve(
    request: PlanRequest,
    facts: ArchitectureFacts,
    *,
    draft: Draft | None = None,
    others: Sequence[Draft] = (),
    measured: Measured | None = None,
    device: Device | None = None,
) -> Plan:
    """Plan one request; see `make_plan`."""
    on = device or load_device(request.device)
    irrelevant = facts.tile_warnings if on.kind == "cpu" else ()
    warnings, notes = [w for w in facts.warnings if w not in irrelevant], list[str]()
    check_request(request, facts, has_draft=draft is not None)
    quantization = format_plan(request, facts, notes)

    def lay(tensor_parallel: int, attention_dp: bool) -> Deployment:
        return deploy(
            facts,
            on,
            backend=request.backend,
            quantization=request.quantization,
            quantize_lm_head=request.quantize_lm_head,
            kv_cache=_kv_cache(request),
            tensor_parallel=tensor_parallel,
            pipeline_parallel=request.pipeline_parallel,
            attention_dp=attention_dp,
            exact=request.exact,
        )

    deployment, parallelism = choose_layout(request, lay)
    captured = check_draft(request, facts, draft, warnings, notes)
    for other in others:
        check_draft(request, facts, other, warnings, notes)
    works = Workpoints(request, deployment, draft, measured, warnings, others)
    ranking = rank(works.at, facts, request)
    method = choose_method(request, ranking, facts, warnings, notes)

    best = {batch: _plan_batch(works, method, request, batch) for batch in _batch_sizes(request)}
    batches = tuple(best[batch] for batch in request.batch_sizes)
    first = batches[0]
    work = works.at(method, first.batch)
    version, version_reason = _version(request, method)
    schedule = _schedule(request, method, best, version)
    policy = _draft_length_policy(request, method, schedule)
    draft_length = _draft_length(request, method, batches, schedule, policy, version)
    if draft_length > draft_length_cap(work):
        raise PlanInfeasible(
            f"draft length {draft_length} is longer than this {method} draft can make ({draft_length_cap(work)})",
            hint=f"speculation.draft_length: {draft_length_cap(work)} or auto",
        )
    chosen = first.at(draft_length)
    fixed = request.draft_length != "auto"
    check_latency(request, works.at, method, [b.at(draft_length) if fixed else b.best for b in batches])
    memory = plan_memory(
        deployment,
        work.drafter,
        batch=max(request.batch_sizes),
        sequence_tokens=request.context + request.output_length,
        draft_length=draft_length,
    )
    warnings += refuse_misfit(
        memory, deployment, must_fit=request.must_fit, max_batch_size=request.max_batch_size
    )
    warnings += kernel_warnings(deployment, draft_length)
    warnings += _second_thoughts(method, first, chosen, work.curve.measured_to)
    drafts, speculates = method != "none", draft_length > 0
    if speculates and work.tree is not None:
        notes.append(work.tree.said(work.curve, draft_length))
    return Plan(
        method=method if speculates else "none",
        configured_method=request.method,
        draft_length=draft_length,
        candidates=candidates(work, first.batch, first.points, first.best, chosen),
        binding=binding_term(first.points, chosen),
        schedule=schedule,
        memory=memory,
        warnings=tuple(dict.fromkeys(warnings)),
        deployment=deployment,
        drafter=work.drafter,
        curve=work.curve if drafts else None,
        batches=batches,
        roofline=roofline_of(deployment, first.batch, request.context),
        ranking=ranking,
        crossover=_crossover(works, method, request),
        notes=tuple(dict.fromkeys((*notes, *work.drafter.notes))),
        changes=what_would_change(works.at, method, request, first, chosen) if drafts else (),
        step_source=work.times.source,
        verify_step_ms=tuple(
            work.times.step(1, length, request.context).total * 1e3 for length in range(MAX_DRAFT_LENGTH + 1)
        ),
        quantization=quantization,
        draft_ms=tuple(_beside_s(work, request.context, d) * 1e3 for d in range(MAX_DRAFT_LENGTH + 1)),
        draft_length_policy=policy if speculates else "fixed",
        runtime_schedule=_runtime_schedule(request, schedule, version)
        if speculates and policy == "schedule"
        else None,
        backend_version=version,
        captured_layers=captured,
        version_reason=version_reason,
        parallelism=parallelism,
    )


def _version(request: PlanRequest, method: str) -> tuple[str | None, str | None]:
    """(version of TensorRT-LLM, why it was taken where none is named)."""
    if request.backend != "tensorrt_llm":
        return request.version, None
    return (request.version, None) if request.version else default_version(method)


def _kv_cache(request: PlanRequest) -> str:
    """As configured; trtspec's own engines keep QuantSpec's for both the draft and the target."""
    shared = request.method == "quantspec" and request.backend in ("onnxruntime", "tensorrt")
    return HIERARCHICAL if shared else request.kv_cache


def _batch_sizes(request: PlanRequest) -> list[int]:
    """Powers of two up to the largest batch, and the workload's own sizes."""
    largest = max(request.max_batch_size, *request.batch_sizes)
    powers = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
    return sorted({*powers, *request.batch_sizes, largest})


def _plan_batch(works: Workpoints, method: str, request: PlanRequest, batch: int) -> BatchPlan:
    """Where no draft length keeps the latency limit, the fastest one stands in and `check_latency` refuses it."""
    points = curve_points(works.at(method, batch), batch, request.context)
    best = best_of(points, request.max_itl_ms) or min(points, key=lambda p: p.itl_ms)
    return BatchPlan(batch, best, points)


def _schedule(request: PlanRequest, method: str, best: dict[int, BatchPlan], version: str | None) -> Schedule:
    """The best length for each batch size, never above a configured one, never rising."""
    ceiling = None if request.draft_length == "auto" else int(request.draft_length)
    if (
        version is not None and method == "ngram"
    ):  # TensorRT-LLM's n-gram drafter has one length for all batches
        length = (
            ceiling if ceiling is not None else _compromise([best[batch] for batch in request.batch_sizes])
        )
        return Schedule(((max(best), length),))
    ceilings = request.backend != "tensorrt_llm" and method in RETRIEVAL
    lengths = {b: _ceiling([plan]) if ceilings else plan.best.draft_length for b, plan in best.items()}
    return monotone({b: length if ceiling is None else min(length, ceiling) for b, length in lengths.items()})


def _draft_length_policy(request: PlanRequest, method: str, schedule: Schedule) -> DraftLengthPolicy:
    """As configured. auto: the schedule where it varies, unless the length is configured or the drafter weighs every
    draft against the whole step by itself."""
    if method == "none":
        return "fixed"
    if request.draft_length_policy != "auto":
        return request.draft_length_policy
    varies = len(schedule.entries) > 1
    if request.backend != "tensorrt_llm":
        varies = varies and request.draft_length == "auto" and method not in _WEIGHED
    return "schedule" if varies else "fixed"


def _draft_length(
    request: PlanRequest,
    method: str,
    batches: Sequence[BatchPlan],
    schedule: Schedule,
    policy: DraftLengthPolicy,
    version: str | None,
) -> int:
    """The one draft length that is built: as configured; the longest of the schedule where the runtime follows one;
    for lookups in trtspec's own decode loop, which drafts less by itself where that pays, a ceiling; otherwise the
    best compromise over the workload's batch sizes."""
    if method == "none":
        return 0
    if request.draft_length != "auto":
        return int(request.draft_length)
    if request.backend != "tensorrt_llm":
        return schedule.longest if method in RETRIEVAL or policy == "schedule" else _compromise(batches)
    if policy == "schedule" and version is not None and tensorrt_llm_schedule(schedule, version) is not None:
        return max(schedule.at(batch) for batch in request.batch_sizes)
    return _compromise(batches)


def _ceiling(batches: Sequence[BatchPlan]) -> int:
    """The longest draft within 1 % of the best at some batch size: shortening it costs the runtime nothing."""
    return max(
        p.draft_length
        for plan in batches
        for p in plan.points
        if not p.extrapolated and p.tokens_per_s >= 0.99 * plan.best.tokens_per_s
    )


def _compromise(batches: Sequence[BatchPlan]) -> int:
    """Of the best lengths of all batch sizes the one with the highest geometric mean speed-up."""
    lengths = sorted({plan.best.draft_length for plan in batches})
    return max(lengths, key=lambda length: sum(log(plan.at(length).speedup) for plan in batches))


def _crossover(works: Workpoints, method: str, request: PlanRequest) -> int | None:
    if method == "none":
        return None
    largest = max(request.max_batch_size, *request.batch_sizes)
    return crossover_batch(lambda batch: works.at(method, batch), request.context, largest)


def _beside_s(work: Workpoint, context: int, draft_length: int) -> float:
    """Seconds of a step of one sequence that are neither the target's own row nor the drafts'."""
    if draft_length == 0:
        return 0.0
    drafting = work.draft_s(1, draft_length, context)
    with_probe = work.times.step(1, draft_length + work.drafter.probe_rows, context).total
    return drafting + with_probe - work.times.step(1, draft_length, context).total


def _runtime_schedule(request: PlanRequest, schedule: Schedule, version: str | None) -> dict[int, int] | None:
    if version is None or request.backend != "tensorrt_llm" or len(schedule.entries) < 2:
        return None
    return tensorrt_llm_schedule(schedule, version)


def _second_thoughts(method: str, first: BatchPlan, chosen: Point, measured_to: int) -> list[str]:
    """What a reader should know about the chosen length: it does not pay, gives something up, or is a guess."""
    said: list[str] = []
    drafting = [p for p in first.points if p.draft_length]
    if method != "none" and chosen.draft_length == 0 and drafting:
        most = best_of(drafting) or max(drafting, key=lambda p: p.tokens_per_s)
        said.append(
            f"do not speculate here: {method}'s best draft length {most.draft_length} gives {most.speedup:.2f} times "
            f"plain decoding ({most.acceptance_length:.2f} tokens per {most.step.total * 1e3:.1f} ms step)"
        )
    if chosen.draft_length and chosen.speedup < 1:
        said.append(
            f"do not speculate here: draft length {chosen.draft_length} gives {chosen.speedup:.2f} times plain decoding"
        )
    if first.best.tokens_per_s > chosen.tokens_per_s * 1.02:
        said.append(
            f"at batch {first.batch} draft length {first.best.draft_length} is predicted "
            f"{first.best.tokens_per_s / chosen.tokens_per_s - 1:.0%} faster than {chosen.draft_length}"
        )
    if chosen.extrapolated:
        said.append(
            f"draft length {chosen.draft_length} is longer than the acceptance data ({measured_to}): "
            "positions past it repeat the last rate, a guess"
        )
    return said
