"""The report of one or several runs: one HTML file that needs nothing else, or tables for a terminal.

Every chart has its numbers in a table beside it. What a number means is printed from the metric's own docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from trtspec.evaluate.diagnose import diagnose
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report import sections
from trtspec.evaluate.report.charts import Series, rows
from trtspec.evaluate.report.diagnosis import diagnosis_section, render_diagnosis
from trtspec.evaluate.report.page import figure, page, pair, section, table, tiles
from trtspec.evaluate.report.terminal import render_terminal
from trtspec.evaluate.report.words import (
    date,
    interval,
    run_label,
    span,
    verdicts,
)
from trtspec.evaluate.text import count, number, percent, ratio

__all__ = ["distinct_labels", "render_diagnosis", "render_html", "render_terminal"]


def render_html(runs: Sequence[RunRecord], plan: Mapping[str, Any] | None = None) -> str:
    """The report as one HTML document without any reference to the outside.

    runs: the first is described in detail, all are compared. plan: what to hold the measurement against, None
    takes the plan the first run carries. Raises ValueError without runs.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    summaries = [run.summary() for run in runs]
    labels = distinct_labels(runs)
    parts = [
        _head(runs, summaries, labels),
        _throughput(runs, summaries, labels),
        diagnosis_section(diagnose(runs), labels),
        sections.by_position(summaries, labels),
        sections.by_category(summaries, labels),
        sections.latency(runs, summaries, labels),
        *([found] if (found := sections.plan(runs[0], summaries[0], plan or runs[0].plan)) else []),
        sections.lossless(runs, labels),
        sections.reproduce(runs, labels),
        sections.definitions(),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return page(f"{title} – speculative decoding report", "\n".join(parts))


def _head(runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    run, first = runs[0], summaries[0]
    title = run.name if len(runs) == 1 else "Runs compared: " + ", ".join(labels)
    where = f"{run.speculative.model}, {run.speculative.transport}, {run.environment.processor}, {date(run)}"
    said = [
        f'<p class="headline {tone}">{escape(f"{label}: {text}" if len(runs) > 1 else text)}</p>'
        for one, summary, label in zip(runs, summaries, labels)
        for text, tone in verdicts(one, summary)
    ]
    length = first["acceptance_length"]
    own = tiles(
        [
            ("Speed-up", ratio(first["speedup"]), interval(first["speedup_interval"])),
            (
                "Output tokens per second",
                number(first["tokens_per_s"], 1),
                f"baseline {number(first['baseline_tokens_per_s'], 1)}",
            ),
            (
                "Acceptance length",
                number(length["token_weighted"]),
                f"token-weighted; per request {number(length['per_request'])}",
            ),
            ("Draft acceptance rate", percent(first["draft_acceptance_rate"]), "of all drafted tokens"),
            ("Draft length", count(first["draft_length"]), f"method {first['method']}"),
            ("Requests", count(first["requests"]), f"{count(first['errors'])} failed"),
        ]
    )
    figures = _comparison(summaries, labels) if len(runs) > 1 else own
    return f'<h1>{escape(title)}</h1><p class="soft wide">{escape(where)}</p>{"".join(said)}{figures}'


def _comparison(summaries: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    lines: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("Speed-up", lambda s: ratio(s["speedup"])),
        ("Speed-up, 95 % interval", lambda s: interval(s["speedup_interval"])),
        ("Output tokens per second", lambda s: number(s["tokens_per_s"], 1)),
        ("Baseline tokens per second", lambda s: number(s["baseline_tokens_per_s"], 1)),
        ("Acceptance length, token-weighted", lambda s: number(s["acceptance_length"]["token_weighted"])),
        ("Acceptance length, per request", lambda s: number(s["acceptance_length"]["per_request"])),
        ("Draft acceptance rate", lambda s: percent(s["draft_acceptance_rate"])),
        ("Draft length", lambda s: count(s["draft_length"])),
        ("Output differs from baseline", lambda s: _differs(s["lossless"])),
        ("Requests", lambda s: count(s["requests"])),
        ("Failed requests", lambda s: count(s["errors"])),
    ]
    return table(
        "Runs side by side", ["", *labels], [[name, *(spell(s) for s in summaries)] for name, spell in lines]
    )


def _differs(lossless: Mapping[str, Any]) -> str:
    if not lossless["checked"]:
        return "not checked"
    lossy = "" if lossless["acceptance"] == "exact" else f", {lossless['acceptance']} acceptance is lossy"
    return f"{lossless['mismatches']} of {lossless['checked']}{lossy}"


def _throughput(
    runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> str:
    ours = [s["tokens_per_s"] for s in summaries]
    plain = [s["baseline_tokens_per_s"] for s in summaries]
    series = [Series("with speculation", ours)]
    if any(value is not None for value in plain):
        series.append(Series("without", plain))
    chart = rows(
        "Output tokens per second", labels, series, spell=lambda v: number(v, 1), x_title="tokens per second"
    )
    quantities: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("With speculation, tokens per second", lambda s: number(s["tokens_per_s"], 1)),
        ("Without", lambda s: number(s["baseline_tokens_per_s"], 1)),
        ("Ratio of all tokens", lambda s: ratio(s["speedup"])),
        ("95 % interval", lambda s: interval(s["speedup_interval"])),
        ("Ratio of a pair, median", lambda s: _of_pairs(s, lambda found: ratio(found["median"]))),
        (
            "Ratio of a pair, quartiles",
            lambda s: _of_pairs(s, lambda found: span(found["p25"], found["p75"])),
        ),
        ("Ratio in decoding alone", lambda s: ratio((s["decode_speedup"] or {}).get("value"))),
        ("Its 95 % interval, over requests", lambda s: interval(s["decode_speedup"])),
        ("Ratio in request time", lambda s: ratio((s["request_speedup"] or {}).get("value"))),
        ("Its 95 % interval, over requests", lambda s: interval(s["request_speedup"])),
        ("Pairs", lambda s: _of_pairs(s, lambda found: count(found["pairs"]))),
    ]
    body = [[name, *(spell(s) for s in summaries)] for name, spell in quantities]
    note = (
        f"Both arms ran in turns on the same machine, at concurrency {runs[0].settings.concurrency}. "
        "The interval comes from resampling the pairs of both arms."
    )
    legend = [one.name for one in series]
    return section(
        "Tokens per second against the baseline",
        pair(
            figure("All output tokens over the time the arm was busy", chart, legend),
            table("Throughput", ["", *labels], body),
        ),
        note=note if any(run.baseline for run in runs) else "No baseline was measured.",
    )


def _of_pairs(summary: Mapping[str, Any], spell: Callable[[Mapping[str, Any]], str]) -> str:
    found = summary["speedup_interval"]
    return spell(found) if found else number(None)


def distinct_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name of each run, numbered where two are the same."""
    labels = [run_label(run) for run in runs]
    return [f"{name} ({i + 1})" if labels.count(name) > 1 else name for i, name in enumerate(labels)]
