"""The report of one or several runs: one HTML file that needs nothing else, or tables for a terminal.

Every chart has its numbers in a table beside it. What a number means is printed from the metric's own docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from trtspec.evaluate.diagnose import diagnose
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report import sections, sweeps
from trtspec.evaluate.report.charts import Series, rows
from trtspec.evaluate.report.diagnosis import diagnosis_section, render_diagnosis
from trtspec.evaluate.report.groups import Deployment, deployments, detailed, run_labels
from trtspec.evaluate.report.page import figure, page, pair, section, table, tiles
from trtspec.evaluate.report.terminal import render_terminal
from trtspec.evaluate.report.verdict import TONES, Verdict, decide
from trtspec.evaluate.report.words import date, interval, span
from trtspec.evaluate.text import count, number, percent, ratio

__all__ = ["render_diagnosis", "render_html", "render_terminal", "run_labels"]


def render_html(runs: Sequence[RunRecord], plan: Mapping[str, Any] | None = None) -> str:
    """The report as one HTML document without any reference to the outside.

    runs: all are compared, and described one by one where there are few (see `groups.detailed`). plan: what to hold
    the first against, None takes the plan it carries. Raises ValueError without runs.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    found = deployments(runs)
    shown = detailed(runs)
    summaries, labels = [run.summary() for run in shown], run_labels(shown)
    parts = [
        _head(found, shown, summaries, labels),
        sweeps.by_load(found),
        _left_out(runs, shown),
        _throughput(shown, summaries, labels),
        diagnosis_section(
            diagnose(runs), run_labels(runs), [any(run is one for one in shown) for run in runs]
        ),
        sections.by_position(summaries, labels),
        sections.by_category(summaries, labels),
        sweeps.by_context(found),
        sections.latency(shown, summaries, labels),
        sections.plan(shown, summaries, labels, plan),
        sections.lossless(runs, run_labels(runs)),
        sweeps.differences(shown, labels),
        sections.reproduce(runs, run_labels(runs)),
        sections.definitions(),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return page(f"{title} – speculative decoding report", "\n".join(part for part in parts if part))


def _left_out(runs: Sequence[RunRecord], shown: Sequence[RunRecord]) -> str | None:
    if len(shown) == len(runs):
        return None
    return (
        f'<p class="soft">What follows describes {len(shown)} of the {len(runs)} runs one by one: of each deployment '
        "the one at its lowest load. A report of fewer runs describes others.</p>"
    )


def _head(
    found: Sequence[Deployment],
    runs: Sequence[RunRecord],
    summaries: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
) -> str:
    run, first = runs[0], summaries[0]
    title = run.name if len(labels) == 1 else "Runs compared: " + ", ".join(labels)
    where = f"{run.speculative.model}, {run.speculative.transport}, {run.environment.processor}, {date(run)}"
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
    said = "".join(_verdict(decide(one), named=len(found) > 1) for one in found)
    return f'<h1>{escape(title)}</h1><p class="soft wide">{escape(where)}</p>{said}{figures}'


def _verdict(verdict: Verdict, *, named: bool) -> str:
    name = f"{verdict.deployment}: " if named else ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.reasons)
    tone = TONES[verdict.decision]
    return (
        f'<p class="headline {tone}">{escape(name + verdict.headline)}</p><ul class="reasons">{reasons}</ul>'
    )


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
    loads = {run.settings.load for run in runs}
    at = f" at {loads.pop()}" if len(loads) == 1 else ""
    note = f"Both arms ran in turns{at}. The interval comes from resampling the pairs of both arms."
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
