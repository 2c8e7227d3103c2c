"""Several deployments of one target side by side: mechanism × category, in Markdown and as data.

The runs come from `run.evaluate_together`: same prompts, all of them served in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report.words import interval
from trtspec.evaluate.text import number, ratio

_Summary = Mapping[str, Any]


def comparison(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Settings and machine of the runs, and for each the figures of its table rows; every number is its summary's."""
    first = runs[0]
    kept = (
        *(
            "method",
            "draft_length",
            "acceptance_length",
            "speedup",
            "speedup_interval",
            "speedup_by_category",
        ),
        *("tokens_per_s", "baseline_tokens_per_s", "draft_acceptance_rate", "lossless", "requests", "errors"),
    )
    return {
        "model": first.speculative.model,
        "weights": first.speculative.weights,
        "processor": first.environment.processor,
        "cores": first.environment.cores,
        "created_at": first.created_at,
        "data": {
            "name": first.data.name,
            "prompts": first.data.prompts,
            "sha256": first.data.selection_sha256,
        },
        "settings": {
            name: getattr(first.settings, name)
            for name in ("output_length", "concurrency", "rate_per_s", "temperature", "seed")
        },
        "command": first.command,
        "runs": [
            {"name": run.name, **{key: summary[key] for key in kept}}
            for run, summary in ((run, run.summary()) for run in runs)
        ],
    }


def render_markdown(runs: Sequence[RunRecord]) -> str:
    """Four tables: the whole, and by category acceptance length (token-weighted, per request) and speed-up."""
    summaries = [run.summary() for run in runs]
    categories = list(dict.fromkeys(c for s in summaries for c in s["acceptance_length"]["by_category"]))

    def by_category(title: str, all_of: Callable[[_Summary], str], of: Callable[[_Summary, str], str]) -> str:
        rows = [[_label(r), all_of(s), *(of(s, c) for c in categories)] for r, s in zip(runs, summaries)]
        return f"## {title}\n\n{_table(['', 'all', *categories], rows)}"

    def length(mean: str) -> tuple[Callable[[_Summary], str], Callable[[_Summary, str], str]]:
        def spell(lengths: Mapping[str, Any]) -> str:
            return number(lengths.get(mean))

        return (
            lambda s: spell(s["acceptance_length"]),
            lambda s, c: spell(s["acceptance_length"]["by_category"].get(c, {})),
        )

    return "\n\n".join(
        [
            _head(runs[0]),
            _whole(runs, summaries),
            by_category(
                "Acceptance length, token-weighted (all tokens over all steps)", *length("token_weighted")
            ),
            by_category("Acceptance length, per request (mean over requests)", *length("per_request")),
            by_category(
                "Speed-up of a request against plain decoding",
                lambda s: ratio((s["request_speedup"] or {}).get("value")),
                lambda s, c: ratio((s["speedup_by_category"].get(c) or {}).get("value")),
            ),
        ]
    )


def _head(run: RunRecord) -> str:
    machine, settings = run.environment, run.settings
    sampling = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    command = f" Made by `{run.command}`." if run.command else ""
    return (
        f"# Mechanisms by category: {run.speculative.model}\n\n"
        f"{run.created_at[:10]}; {run.speculative.weights}; {machine.processor}, {machine.cores} cores; "
        f"{run.data.prompts} prompts of {run.data.name}, {sampling}, at most {settings.output_length} tokens a turn, "
        f"{settings.load}. All deployments and the same engine without speculation took turns at "
        f"every prompt.{command}"
    )


def _whole(runs: Sequence[RunRecord], summaries: Sequence[_Summary]) -> str:
    rows = [
        [
            _label(run),
            number(s["acceptance_length"]["token_weighted"]),
            number(s["acceptance_length"]["per_request"]),
            number(s["tokens_per_s"], 1),
            ratio(s["speedup"]),
            interval(s["speedup_interval"]),
            _equal(s["lossless"]),
        ]
        for run, s in zip(runs, summaries)
    ]
    plain: dict[str | None, tuple[str, float]] = {}
    for run, s in zip(runs, summaries):
        if run.baseline is not None:
            plain.setdefault(run.baseline.location, (run.name, s["baseline_tokens_per_s"]))
    for name, speed in plain.values():
        label = "plain decoding" if len(plain) == 1 else f"plain decoding, engine of {name}"
        rows.append([label, number(1), number(1), number(speed, 1), ratio(1), "", ""])
    head = [
        *("", "acceptance length, token-weighted", "per request", "tokens/s", "speed-up", "95 % interval"),
        "equal to plain",
    ]
    return f"## All prompts\n\n{_table(head, rows)}"


def _equal(lossless: _Summary) -> str:
    if not lossless["checked"]:
        return "not checked"
    lossy = "" if lossless["acceptance"] == "exact" else f" ({lossless['acceptance']}, lossy)"
    return f"{lossless['checked'] - lossless['mismatches']} of {lossless['checked']}{lossy}"


def _label(run: RunRecord) -> str:
    length = run.speculative.draft_length
    return f"{run.speculative.method}, D={length} ({run.name})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
