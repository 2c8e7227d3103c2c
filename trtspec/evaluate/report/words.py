"""What a report says in words: a speed-up, losslessness, the settings, the plan beside the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trtspec.evaluate.bootstrap import Estimate
from trtspec.evaluate.lossless import LosslessReport
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.summary import planned_point
from trtspec.evaluate.text import count, number, ratio

Tone = Literal["good", "bad", "warn", "soft"]


def effect(gain: Estimate) -> str:
    """A speed-up in words, with how sure it is; an end of a sentence."""
    if gain.low is None or gain.high is None:
        return f"{ratio(gain.value)} the speed without speculation, on too few pairs for an interval"
    sure = f"{ratio(gain.value)} the speed without speculation (95 % interval {span(gain.low, gain.high)})"
    if gain.low > 1:
        return sure
    return f"{sure}: slower" if gain.high < 1 else f"{sure}: no certain effect"


def lossless_verdict(report: LosslessReport) -> tuple[str, Tone]:
    """Whether speculation changed the output, in one sentence."""
    rest = f" Not checked: {report.not_checked}." if report.not_checked else ""
    if not report.checked:
        why = report.not_checked or "no request finished on both arms"
        lossy = f"Lossy by choice ({report.acceptance} acceptance). " if report.lossy else ""
        return f"{lossy}Losslessness was not checked: {why}.", "warn"
    if report.lossy:
        return (
            f"Lossy by choice: under {report.acceptance} acceptance {report.mismatches} of {report.checked} requests "
            f"gave other output than without speculation.{rest}",
            "warn",
        )
    if report.mismatches:
        return (
            f"{report.mismatches} of {report.checked} requests gave other output: not lossless.{rest}",
            "bad",
        )
    if report.near_ties:
        ties = f"{report.near_ties} of {report.checked} requests differ at a near tie, the others are equal"
        return f"The output is the target's own: {ties}.{rest}", "good"
    return (
        f"All {report.checked} compared requests gave the same tokens as without speculation.{rest}",
        "good",
    )


def interval(found: Mapping[str, Any] | None) -> str:
    """A confidence interval, or why there is none."""
    if not found:
        return "no baseline"
    if found["low"] is None:
        return f"too few pairs ({found['pairs']})"
    return span(found["low"], found["high"])


def span(low: float, high: float) -> str:
    """Two ratios, as in 1.27–1.44×."""
    return f"{low:.2f}–{ratio(high)}"


def date(run: RunRecord) -> str:
    """When the run was recorded, to the minute."""
    return f"{run.created_at[:10]} {run.created_at[11:16]} UTC"


def setting_rows(run: RunRecord) -> list[tuple[str, str]]:
    """What was run, on what, with what."""
    settings, target, machine, data = run.settings, run.speculative, run.environment, run.data
    memory = f", {machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else ""
    return [
        ("Model", target.model),
        ("Method and draft length", f"{target.method}, {count(target.draft_length)}"),
        ("Engine", f"{target.backend} on {target.device}, {target.weights}"),
        (
            "Acceptance rule",
            target.acceptance if target.acceptance == "exact" else f"{target.acceptance} (lossy)",
        ),
        ("Exact engine", "yes" if target.exact else "no: rows of a step may influence each other"),
        ("Measured", f"{target.transport}; acceptance from {target.acceptance_source}"),
        ("Baseline", f"{run.baseline.transport}, {run.baseline.weights}" if run.baseline else "none"),
        ("Prompts", f"{data.prompts} of {data.name}{f' at {data.revision}' if data.revision else ''}"),
        ("Prompts, sha256", data.selection_sha256),
        ("Output length", f"{settings.output_length} tokens per turn at most"),
        ("Sampling", f"temperature {settings.temperature:g}, seed {settings.seed}"),
        ("Load", f"{settings.load}, {settings.warmup} warm-up requests per arm"),
        ("Processor", f"{machine.processor}, {machine.cores} cores{memory}"),
        ("System", f"{machine.system}, Python {machine.python}"),
        (
            "Versions",
            ", ".join([f"trtspec {machine.trtspec}", *(f"{n} {v}" for n, v in machine.packages.items())]),
        ),
        ("Date", date(run)),
    ]


def plan_rows(run: RunRecord, summary: Mapping[str, Any], plan: Mapping[str, Any]) -> list[list[str]] | None:
    """Predicted and measured values at the draft length that ran; None when the plan did not consider it."""
    planned = planned_point(run, plan)
    if planned is None:
        return None
    step = summary["latency"]["speculative"]["step_latency_ms"]
    decode = summary["latency"]["speculative"]["user_tokens_per_s"]
    pairs = [
        (
            "Acceptance length, token-weighted",
            "acceptance_length",
            summary["acceptance_length"]["token_weighted"],
        ),
        ("Verify step, ms (measured: median)", "step_ms", step["p50"] if step else None),
        (
            "Decoding, tokens per second (measured: mean of requests × concurrency)",
            "tokens_per_s",
            decode["mean"] * run.settings.concurrency if decode else None,
        ),
        ("Speed-up of decoding", "speedup", (summary["decode_speedup"] or {}).get("value")),
        (
            "Speed-up of whole requests, with prefill and transport (in no plan)",
            None,
            (summary["request_speedup"] or {}).get("value"),
        ),
    ]
    return [
        [name, number(planned.get(key)), number(measured), ratio(_over(measured, planned.get(key)))]
        for name, key, measured in pairs
    ]


def _over(measured: float | None, planned: float | None) -> float | None:
    return measured / planned if measured is not None and planned else None
