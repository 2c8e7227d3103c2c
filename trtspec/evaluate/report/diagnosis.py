"""A diagnosis for the page and for the terminal: the same sentences, causes numbered by importance."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trtspec.evaluate.diagnose import Diagnosis, Finding
from trtspec.evaluate.report.page import folded, section
from trtspec.evaluate.text import NOT_MEASURED, percent, ratio


def diagnosis_section(diagnoses: Sequence[Diagnosis], labels: Sequence[str], opened: Sequence[bool]) -> str:
    """The section of the page. opened: whether a run's part is there to read at once, or opens on demand."""
    parts = []
    for found, label, at_once in zip(diagnoses, labels, opened, strict=True):
        part = f"<p>{escape(speedups(found))}</p>"
        if found.findings:
            part += f"<ol>{''.join(map(_item, found.findings))}</ol>"
        if not at_once:
            parts.append(folded(f"{label}: {found.conclusion}", part))
            continue
        if len(diagnoses) > 1:
            parts.append(f"<h3>{escape(label)}</h3>")
        parts.append(f"<p>{escape(found.conclusion)}</p>{part}")
    return section(
        "Why is it as fast as it is?",
        *parts,
        note="Causes named from this data, the most important first, each with its evidence and what to do.",
    )


def _item(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
    advice = f"<p>What to do: {escape(finding.advice)}.</p>"
    title = f"<p><strong>{escape(finding.title)}</strong>{escape(_cost(finding))}</p>"
    return f"<li>{title}<ul>{evidence}</ul>{advice}</li>"


def render_diagnosis(diagnoses: Sequence[Diagnosis], labels: Sequence[str], *, width: int = 100) -> str:
    """The same for a terminal, wrapped at `width` columns."""
    import textwrap

    def wrapped(text: str, indent: int = 0, first: str = "") -> str:
        pad = " " * indent
        return textwrap.fill(
            text, width, initial_indent=first or pad, subsequent_indent=pad, break_on_hyphens=False
        )

    lines = []
    for found, label in zip(diagnoses, labels, strict=True):
        lines += [f"Diagnosis of {label}", wrapped(found.conclusion, 2), wrapped(speedups(found), 2)]
        for number, finding in enumerate(found.findings, 1):
            lines.append(wrapped(f"{finding.title}{_cost(finding)}", 5, f"{number:>3}. "))
            lines += [wrapped(line, 7, "     - ") for line in finding.evidence]
            lines.append(wrapped(f"do: {finding.advice}", 7))
        lines.append("")
    return "\n".join(lines).rstrip()


def speedups(found: Diagnosis) -> str:
    """The three speed-ups that are easily mixed up, in one line."""
    planned = ratio(found.planned_decode_speedup)
    plan = "" if planned == NOT_MEASURED else f" (planned {planned})"
    return (
        f"Speed-up of decoding alone, which is what a plan predicts: {ratio(found.decode_speedup)}{plan}. "
        f"Speed-up of whole requests, prefill and transport included: {ratio(found.request_speedup)}."
    )


def _cost(finding: Finding) -> str:
    # Below half a percent there is nothing to say.
    return f" Without it: up to {percent(finding.cost, 0)} faster." if finding.cost >= 0.005 else ""
