"""The report for a terminal: the same words and numbers as the page, in tables of rich."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from typing import Any

from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report.groups import deployments, detailed, run_labels
from trtspec.evaluate.report.sweeps import CONTEXT_COLUMNS, LOAD_COLUMNS, context_rows, load_rows
from trtspec.evaluate.report.verdict import TONES, decide
from trtspec.evaluate.report.words import interval
from trtspec.evaluate.summary import planned_point
from trtspec.evaluate.text import count, number, percent, ratio

_POSITIONS = 8
_ABREAST = 4


def render_terminal(runs: Sequence[RunRecord], *, width: int | None = None, colour: bool = False) -> str:
    """Tables of one or several runs as text. width: columns, None takes the terminal's. colour: with escape codes."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    columns = width or shutil.get_terminal_size((100, 24)).columns
    out = io.StringIO()
    console = Console(
        file=out, width=columns, force_terminal=colour, color_system="standard" if colour else None
    )
    styles = {"good": "green", "bad": "bold red", "warn": "yellow", "soft": "dim"}
    found, shown = deployments(runs), detailed(runs)
    summaries, labels = [run.summary() for run in shown], run_labels(shown)
    for i in range(0, len(shown), _ABREAST):
        abreast = slice(i, i + _ABREAST)
        console.print(_runs(shown[abreast], summaries[abreast], labels[abreast]))
    for summary, label in zip(summaries, labels):
        console.print(_categories(summary, label))
    for title, head, rows_of in (
        ("speed-up by load", LOAD_COLUMNS, load_rows),
        ("acceptance and speed-up by context length", CONTEXT_COLUMNS, context_rows),
    ):
        for deployment in found:
            if rows := rows_of(deployment):
                table = _table(f"{deployment.label}: {title}", head)
                for row in rows:
                    table.add_row(*row)
                for i, column in enumerate(table.columns):  # narrow, but no number on two lines
                    words = [word for cells in (head, *rows) for word in cells[i].split(" ")]
                    column.width = max(map(len, words)) if column.header != "Load" else None
                    column.no_wrap = column.header == "Load"
                console.print(table)
    for verdict in map(decide, found):
        name = f"{verdict.deployment}: " if len(found) > 1 else ""
        console.print(Text(f"{name}{verdict.headline}", style=styles[TONES[verdict.decision]]))
        for reason in verdict.reasons:
            console.print(Padding(Text(f"- {reason}"), (0, 0, 0, 2)))
    return out.getvalue().rstrip()


def _runs(runs: Sequence[RunRecord], summaries: Sequence[dict[str, Any]], labels: Sequence[str]) -> Any:
    table = _table("Runs", ["", *labels])
    planned = [planned_point(run) or {} for run in runs]
    lines: list[tuple[str, Any]] = [
        ("output tokens/s", lambda s: number(s["tokens_per_s"], 1)),
        ("baseline tokens/s", lambda s: number(s["baseline_tokens_per_s"], 1)),
        ("speed-up of whole requests, prefill included", lambda s: ratio(s["speedup"])),
        ("  95 % interval", lambda s: interval(s["speedup_interval"])),
        ("speed-up of decoding alone", lambda s: ratio((s["decode_speedup"] or {}).get("value"))),
        ("acceptance length, token-weighted", lambda s: number(s["acceptance_length"]["token_weighted"])),
        ("acceptance length, per request", lambda s: number(s["acceptance_length"]["per_request"])),
        ("draft acceptance rate", lambda s: percent(s["draft_acceptance_rate"])),
        (
            f"conditional acceptance, positions 1–{_POSITIONS}",
            lambda s: (
                " ".join(percent(rate, 0) for rate in s["conditional_acceptance"][:_POSITIONS])
                or number(None)
            ),
        ),
        ("requests (failed)", lambda s: f"{count(s['requests'])} ({count(s['errors'])})"),
    ]
    for name, spell in lines:
        table.add_row(name, *(spell(summary) for summary in summaries))
        if name == "speed-up of decoding alone" and any(planned):
            table.add_row("  as planned", *(ratio(point.get("speedup")) for point in planned))
    return table


def _categories(summary: dict[str, Any], label: str) -> Any:
    table = _table(label, ["category", "length, token-weighted", "per request", "speed-up", "95 % interval"])
    for category, length in summary["acceptance_length"]["by_category"].items():
        gain = summary["speedup_by_category"][category]
        table.add_row(
            category,
            number(length["token_weighted"]),
            number(length["per_request"]),
            ratio(gain["value"] if gain else None),
            interval(gain),
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    return table
