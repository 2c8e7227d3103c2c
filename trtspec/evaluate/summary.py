"""What one run says: the stable fields of `trtspec eval --json`, and the profile a planner can use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from trtspec.evaluate.bootstrap import Estimate
from trtspec.evaluate.metrics import (
    Distribution,
    acceptance_histogram,
    acceptance_length_modelled,
    acceptance_length_per_request,
    acceptance_length_token_weighted,
    all_steps,
    conditional_acceptance,
    decode_speedup,
    distribution,
    draft_acceptance_rate,
    inter_token_latency_ms,
    joint_acceptance,
    output_tokens_per_s,
    position_counts,
    request_latency_ms,
    request_speedup,
    requests_in_flight,
    send_delay_ms,
    speedup,
    step_latency_ms,
    step_times_ms,
    ttft_ms,
    user_tokens_per_s,
)

if TYPE_CHECKING:
    from trtspec.evaluate.record import RequestRecord, RunRecord


def summarize(run: RunRecord) -> dict[str, Any]:
    """The stable `result` of `trtspec eval --json`, and beside it what the report shows. See RunRecord.summary.

    In an open loop both arms emit what arrives, so `speedup` is that of request times there, not of throughput. The
    categories of SPEED-Bench's throughput splits are its entropy tiers.
    """
    requests, baseline, depth = run.of("speculative"), run.of("baseline"), run.speculative.tree_depth
    by_category = {
        c: _slice(_in(requests, c), _in(baseline, c)) for c in dict.fromkeys(r.category for r in requests)
    }
    sooner = request_speedup(requests, baseline)
    gain = speedup(run.blocks) if run.settings.rate_per_s is None else sooner
    return {
        "acceptance_length": {
            **_both_means(requests),
            "by_category": {c: part["acceptance_length"] for c, part in by_category.items()},
        },
        "acceptance_length_modelled": acceptance_length_modelled(requests, depth),
        "draft_acceptance_rate": draft_acceptance_rate(requests),
        "conditional_acceptance": conditional_acceptance(requests, depth),
        "joint_acceptance": joint_acceptance(requests, depth),
        "acceptance_histogram": acceptance_histogram(requests),
        "tokens_per_s": _throughput(run, "speculative"),
        "baseline_tokens_per_s": _throughput(run, "baseline"),
        "speedup": gain.value if gain else None,
        "speedup_interval": _json(gain),
        "request_speedup": _json(sooner),
        "decode_speedup": _json(decode_speedup(requests, baseline)),
        "speedup_by_category": {c: part["speedup"] for c, part in by_category.items()},
        "by_category": by_category,
        "by_context": {
            name: _slice(part, [r for r in baseline if context_bucket(r) == name])
            for name, part in _by_context(requests).items()
        },
        "requests_in_flight": requests_in_flight(
            [r for r in requests if r.block < len(run.blocks)], _busy_s(run, "speculative")
        ),
        "latency": {
            arm: _latency(part) for arm, part in (("speculative", requests), ("baseline", baseline)) if part
        },
        "lossless": {
            "checked": run.lossless.checked,
            "mismatches": run.lossless.mismatches,
            "near_ties": run.lossless.near_ties,
            "not_checked": run.lossless.not_checked,
            "acceptance": run.lossless.acceptance,
        },
        "requests": len(requests),
        "output_tokens": sum(len(r.token_ids) for r in requests),
        "errors": len(run.failures),
        "complete": run.complete,
        "unsent_prompts": run.unsent_prompts,
        "cached_prompt_share": {
            arm: _cached_share(part)
            for arm, part in (("speculative", requests), ("baseline", baseline))
            if part
        },
        "caution": run.data.caution,
        "method": run.speculative.method,
        "draft_length": run.speculative.draft_length,
    }


def measured_profile(run: RunRecord) -> dict[str, Any]:
    """What a planner can use in place of its prediction (run.json, key `measured`).

    conditional_acceptance   list over draft positions, as `conditional_acceptance`
    judged                   list: how many steps judged each position, the weight of each rate
    proposed                 share of steps that drafted anything (lookups often find nothing)
    runs                     [[accepted, steps], …] of those steps
    step_ms_by_rows          {rows: {count, p25, p50, p75}} of speculative steps; rows = drafted + 1 of one request
    baseline_step_ms         the same for one row without speculation, or None
    concurrency              requests in flight; step times belong to this batch size only. None in an open loop
    mean_context             tokens in the KV cache at the middle of a request, averaged over requests
    method, draft_length     of the deployment
    """
    requests, baseline, depth = run.of("speculative"), run.of("baseline"), run.speculative.tree_depth
    steps = all_steps(requests)
    drafted = [step for step in steps if step.drafted]
    by_rows: dict[int, list[float]] = {}
    for request in requests:
        for step, ms in step_times_ms(request):
            by_rows.setdefault(step.drafted + 1, []).append(ms)
    plain = [ms for request in baseline for _, ms in step_times_ms(request)]
    contexts = [r.prompt_tokens + len(r.token_ids) / 2 for r in requests]
    return {
        "method": run.speculative.method,
        "draft_length": run.speculative.draft_length,
        "concurrency": run.settings.concurrency if run.settings.rate_per_s is None else None,
        "mean_context": float(np.mean(contexts)) if contexts else None,
        "conditional_acceptance": conditional_acceptance(requests, depth),
        "judged": position_counts(steps, depth)[1],
        "proposed": len(drafted) / len(steps) if steps else None,
        "runs": [list(pair) for pair in sorted(Counter(step.accepted for step in drafted).items())],
        "step_ms_by_rows": {str(rows): _quartiles(by_rows[rows]) for rows in sorted(by_rows)},
        "baseline_step_ms": _quartiles(plain),
    }


def planned_point(run: RunRecord, plan: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """What a plan expects at the draft length and concurrency that ran; None where it says nothing of them, and in an
    open loop, whose batch size varies.

    plan: as `trtspec plan --json` gives it, None takes the run's own. Keys: acceptance_length, step_ms, tokens_per_s,
    speedup (of decoding: prefill and transport are in no plan), terms_ms.
    """
    if run.settings.rate_per_s is not None:
        return None
    plan = plan or run.plan or {}
    # Candidates are points of the plan's first batch size; of the others it keeps the best.
    batches, batch = plan.get("batches", ()), run.settings.concurrency
    first = batches[0]["batch"] if batches else batch
    points = plan.get("candidates", ()) if batch == first else [b for b in batches if b["batch"] == batch]
    return next((p for p in points if p["draft_length"] == run.speculative.draft_length), None)


def context_bucket(request: RequestRecord) -> str:
    """The power of two that holds a request's prompt, such as "1025–2048" tokens; up to 256 tokens are one bucket."""
    top = max(256, 1 << (request.prompt_tokens - 1).bit_length())
    return f"{top // 2 + 1}–{top}" if top > 256 else "1–256"


def _by_context(requests: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Requests by `context_bucket`, the shortest first."""
    found: dict[str, list[RequestRecord]] = {}
    for request in sorted(requests, key=lambda r: r.prompt_tokens):
        found.setdefault(context_bucket(request), []).append(request)
    return found


def _slice(requests: Sequence[RequestRecord], baseline: Sequence[RequestRecord]) -> dict[str, Any]:
    """The numbers of a part of the requests."""
    return {
        "requests": len(requests),
        "acceptance_length": _both_means(requests),
        "draft_acceptance_rate": draft_acceptance_rate(requests),
        "speedup": _json(request_speedup(requests, baseline)),
        **{
            metric.__name__: _json(metric(requests))
            for metric in (ttft_ms, inter_token_latency_ms, user_tokens_per_s)
        },
    }


def _cached_share(requests: Sequence[RequestRecord]) -> float | None:
    """Prompt tokens the target had in its cache, of all; None where it does not say."""
    told = [r for r in requests if r.cached_tokens is not None]
    return sum(r.cached_tokens or 0 for r in told) / sum(r.prompt_tokens for r in told) if told else None


def _both_means(requests: Sequence[RequestRecord]) -> dict[str, float | None]:
    return {
        "per_request": acceptance_length_per_request(requests),
        "token_weighted": acceptance_length_token_weighted(requests),
    }


def _latency(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    metrics = (ttft_ms, inter_token_latency_ms, step_latency_ms, request_latency_ms, user_tokens_per_s)
    return {metric.__name__: _json(metric(requests)) for metric in (*metrics, send_delay_ms)}


def _throughput(run: RunRecord, arm: str) -> float | None:
    tokens = sum(getattr(block, f"{arm}_tokens") or 0 for block in run.blocks)
    return output_tokens_per_s(tokens, _busy_s(run, arm))


def _busy_s(run: RunRecord, arm: str) -> float:
    return sum(getattr(block, f"{arm}_s") or 0.0 for block in run.blocks)


def _in(requests: Sequence[RequestRecord], category: str) -> list[RequestRecord]:
    return [request for request in requests if request.category == category]


def _quartiles(values: Sequence[float]) -> dict[str, float] | None:
    whole = distribution(values)
    return {"count": whole.count, "p25": whole.p25, "p50": whole.p50, "p75": whole.p75} if whole else None


def _json(value: Distribution | Estimate | None) -> Mapping[str, Any] | None:
    return asdict(value) if value is not None else None
