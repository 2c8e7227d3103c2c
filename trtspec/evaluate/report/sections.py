"""The parts of the page below its head: acceptance, latency, plan, losslessness, reproduction, definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from trtspec.evaluate import metrics
from trtspec.evaluate.record import RequestRecord, RunRecord
from trtspec.evaluate.report.charts import Curve, Series, bars, cumulative, curves, rows
from trtspec.evaluate.report.page import figure, folded, pair, section, table, terms
from trtspec.evaluate.report.words import interval, lossless_verdict, plan_rows, setting_rows
from trtspec.evaluate.text import number, percent, ratio


def by_position(summaries: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    positions = max((len(s["conditional_acceptance"]) for s in summaries), default=0)
    if not positions:
        return section("Acceptance by draft position", note="Nothing was drafted.")
    names = [str(i + 1) for i in range(positions)]
    series = [
        Series(label, _padded(s["conditional_acceptance"], positions)) for label, s in zip(labels, summaries)
    ]
    chart = bars(
        "Conditional acceptance by draft position",
        names,
        series,
        spell=lambda v: f"{100 * v:.0f}",
        x_title="draft position",
        top=1.0,
    )
    histogram = max((len(s["acceptance_histogram"]) for s in summaries), default=0)
    steps = [
        Series(label, _shares(s["acceptance_histogram"], histogram)) for label, s in zip(labels, summaries)
    ]
    spread = bars(
        "Share of verify steps by accepted draft tokens",
        [str(i) for i in range(histogram)],
        steps,
        spell=lambda v: f"{100 * v:.0f}",
        x_title="accepted draft tokens in a step",
    )
    body = [
        [
            name,
            *(
                percent(cell)
                for s in summaries
                for cell in (_at(s["conditional_acceptance"], i), _at(s["joint_acceptance"], i))
            ),
        ]
        for i, name in enumerate(names)
    ]
    head = [
        "Position",
        *(
            f"{what}{f' {label}' if len(labels) > 1 else ''}"
            for label in labels
            for what in ("P(i | i−1)", "P(1…i)")
        ),
    ]
    return section(
        "Acceptance by draft position",
        pair(
            figure("Accepted, in %, given that all before were", chart, labels),
            figure("Verify steps, in %, by how many draft tokens they accepted", spread, labels),
        ),
        table("Acceptance by draft position: conditional and joint", head, body),
        note="Drafts vary in length, so a position counts only the steps that drafted it and judged it.",
    )


def by_category(summaries: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    categories = list(dict.fromkeys(c for s in summaries for c in s["acceptance_length"]["by_category"]))
    lengths = [
        Series(
            label,
            [s["acceptance_length"]["by_category"].get(c, {}).get("token_weighted") for c in categories],
        )
        for label, s in zip(labels, summaries)
    ]
    gains = [
        Series(label, [(s["speedup_by_category"].get(c) or {}).get("value") for c in categories])
        for label, s in zip(labels, summaries)
    ]
    charts = [
        figure(
            "Acceptance length, token-weighted (1 is no draft accepted)",
            rows(
                "Acceptance length by category",
                categories,
                lengths,
                spell=number,
                x_title="tokens per step",
                origin=1,
            ),
            labels,
        )
    ]
    if any(value is not None for one in gains for value in one.values):
        chart = rows("Speed-up by category", categories, gains, spell=ratio, x_title="speed-up, ×", origin=1)
        charts.append(figure("Speed-up of a request (left of 1: slower than without)", chart, labels))
    body = [
        [
            f"{category} – {label}" if len(labels) > 1 else category,
            *(
                number(s["acceptance_length"]["by_category"][category][mean])
                for mean in ("token_weighted", "per_request")
            ),
            _gain(s["speedup_by_category"].get(category)),
        ]
        for category in categories
        for label, s in zip(labels, summaries)
        if category in s["acceptance_length"]["by_category"]
    ]
    head = ["Category", "Length, token-weighted", "Length, per request", "Speed-up and 95 % interval"]
    return section("Acceptance and speed-up by category", pair(*charts), table("By category", head, body))


_QUANTITIES = (
    ("ttft_ms", "first token, ms"),
    ("inter_token_latency_ms", "between tokens, ms"),
    ("step_latency_ms", "verify step, ms"),
    ("request_latency_ms", "request, ms"),
    ("user_tokens_per_s", "tokens per second"),
)


def latency(runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    arms = {
        _arm_label(label if len(runs) > 1 else None, arm): (run.of(arm), found)
        for run, summary, label in zip(runs, summaries, labels)
        for arm, found in summary["latency"].items()
    }
    lines = [
        Curve(name, cumulative(gaps)) for name, (part, _) in arms.items() if (gaps := _token_gaps_ms(part))
    ]
    medians = "; ".join(f"{line.name}: median {number(_median(line), 1)} ms" for line in lines)
    chart = curves(
        "Distribution of the time between tokens",
        lines,
        x_title="milliseconds per token",
        description=f"Share of requests at or below each value. {medians}.",
    )
    body = [
        [title, name, *(_short(found[key][q]) for q in ("p25", "p50", "p75", "p90", "p99"))]
        for key, title in _QUANTITIES
        for name, (_, found) in arms.items()
        if found[key]
    ]
    legend = [line.name for line in lines]
    return section(
        "Latency",
        pair(
            figure(
                "Share of requests whose mean time between tokens is at most …", chart, legend, lines=True
            ),
            table(
                "Latency quantiles", ["Quantity", "Speculation", "25 %", "50 %", "75 %", "90 %", "99 %"], body
            ),
        ),
    )


def _arm_label(run: str | None, arm: str) -> str:
    name = "with" if arm == "speculative" else "without"
    return f"{run}, {name}" if run else name


def _short(value: float) -> str:
    return number(value, 0 if value >= 100 else 1)


def _token_gaps_ms(requests: Sequence[RequestRecord]) -> list[float]:
    return [1e3 * metrics.token_gap_s(r) for r in requests if len(r.token_ids) > 1]


def _median(line: Curve) -> float:
    return next(x for x, share in line.points if share >= 0.5)


def plan(
    runs: Sequence[RunRecord],
    summaries: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    given: Mapping[str, Any] | None,
) -> str | None:
    """Each run beside its plan, the first beside `given` where there is one; None where no plan speaks of any."""
    tables = []
    for run, summary, label in zip(runs, summaries, labels):
        own = given if given is not None and run is runs[0] else run.plan
        if own and (found := plan_rows(run, summary, own)):
            name = f"Predicted and measured: {label}" if len(runs) > 1 else "Predicted and measured"
            tables.append(table(name, ["Quantity", "Plan", "Measured", "Measured ÷ plan"], found))
    if not tables:
        return None
    return section(
        "Plan against measurement",
        *tables,
        note="A plan's speed-up is of decoding alone, from the first token on; a request also waits for its prefill "
        "and its transport, so the speed-up of whole requests is another number. "
        "A ratio far from 1 says which assumption of the plan to look at.",
    )


def lossless(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    parts = []
    for run, label in zip(runs, labels):
        text, kind = lossless_verdict(run.lossless)
        name = f"{label}: " if len(runs) > 1 else ""
        parts.append(f'<p>{escape(name)}<span class="{kind}">{escape(text)}</span></p>')
        if run.lossless.differences:
            body = [
                [
                    f"{d.question_id}, turn {d.turn + 1}",
                    d.verdict,
                    str(d.position),
                    number(None) if d.speculative_token is None else str(d.speculative_token),
                    number(None) if d.baseline_token is None else str(d.baseline_token),
                    number(d.gap, 5),
                    number(d.ulps, 1),
                ]
                for d in run.lossless.differences
            ]
            head = ["Request", "Verdict", "Token", "With", "Without", "Gap, logits", "Gap, ulp"]
            parts.append(table(f"Differences {name}".strip(), head, body))
    return section(
        "Is the output unchanged?",
        *parts,
        note="Every request of the deployment is compared, token for token, with the same request without speculation.",
    )


def reproduce(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    parts = []
    for run, label in zip(runs, labels):
        if len(runs) > 1:
            parts.append(f"<h3>{escape(label)}</h3>")
        if run.command:
            parts.append(f"<pre>{escape(run.command)}</pre>")
        settings = table("Settings and environment", ["", ""], setting_rows(run), words=True)
        parts.append(settings if len(runs) == 1 else folded(f"Settings and environment of {label}", settings))
        if run.failures:
            body = [[f"{f.question_id}, turn {f.turn + 1}", f.arm, f.message] for f in run.failures[:50]]
            parts.append(
                table(
                    f"Failed requests ({len(run.failures)})", ["Request", "Arm", "Message"], body, words=True
                )
            )
        if run.config:
            parts.append(folded("Config of the build", f"<pre>{escape(run.config)}</pre>"))
    return section("Reproduce", *parts)


def definitions() -> str:
    return section(
        "Definitions",
        terms(
            [
                (m.name, m.summary, [("Unit", m.unit), ("Formula", m.formula), ("Source", m.source)])
                for m in metrics.METRICS
            ]
        ),
        note="The prefill token is never a step. Nothing after a stop is counted.",
    )


def _gain(found: Mapping[str, Any] | None) -> str:
    return f"{ratio(found['value'])} ({interval(found)})" if found else number(None)


def _padded(values: Sequence[float | None], length: int) -> list[float | None]:
    return [*values, *([None] * (length - len(values)))]


def _at(values: Sequence[float | None], i: int) -> float | None:
    return values[i] if i < len(values) else None


def _shares(counts: Sequence[int], length: int) -> list[float | None]:
    return _padded([n / sum(counts) for n in counts], length)
