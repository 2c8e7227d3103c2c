"""The report for a terminal: the same words and numbers as the page, in tables of rich."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from typing import Any

from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report.words import interval, run_label, verdicts
from trtspec.evaluate.summary import planned_point
from trtspec.evaluate.text import count, number, percent, ratio

_POSITIONS = 8


def render_terminal(runs: Sequence[RunRecord], *, width: int | None = None, colour: bool = False) -> str:
    """Tables of one or several runs as text. width: columns, None takes the terminal's. colour: with escape codes."""
    from rich.console import Console
    from rich.text import Text

    columns = width or shutil.get_terminal_size((100, 24)).columns
    out = io.StringIO()
    console = Console(
        file=out, width=columns, force_terminal=colour, color_system="standard" if colour else None
    )
    styles = {"good": "green", "bad": "bold red", "warn": "yellow", "soft": "dim"}
    summaries = [run.summary() for run in runs]
    console.print(_runs(runs, summaries))
    for run, summary in zip(runs, summaries):
        console.print(_categories(run, summary))
        for text, tone in verdicts(run, summary):
            console.print(Text(text, style=styles[tone]))
    return out.getvalue().rstrip()


def _runs(runs: Sequence[RunRecord], summaries: Sequence[dict[str, Any]]) -> Any:
    table = _table("Runs", ["", *(run_label(run) for run in runs)])
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


def _categories(run: RunRecord, summary: dict[str, Any]) -> Any:
    table = _table(
        run_label(run), ["category", "length, token-weighted", "per request", "speed-up", "95 % interval"]
    )
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

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    return table
