"""What a training run tells: its figures, one HTML page with its curves, and the model card of the draft."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from typing import Any

from trtspec.evaluate.report.charts import Curve, Series, bars, curves, rows
from trtspec.evaluate.report.page import figure, page, pair, section, table, tiles
from trtspec.evaluate.text import count, number, percent

_POINTS = 200  # of a curve over training steps
_ACCURACY_IS = (
    "Share of right first choices by draft position, with the true text before each. In training, of the batch of "
    "that step; on held-out text, over all of it."
)


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """response_tokens: trained on, once an epoch. vocabulary_coverage: share of held-out tokens that the head can
    draft at all. loss, accuracy: (step, value), of the batch of each step. held_out: (step, measurement), see
    held_out_torch.HeldOut; the first is before training. settings: what was asked for. earlier: the runs it went on
    from, see start.earlier_runs.
    """

    method: str
    command: str
    parameters: int
    trained_parameters: int
    responses: int
    response_tokens: int
    held_out_tokens: int
    steps: int
    draft_vocab_size: int
    vocabulary_coverage: float
    prompts_by_kind: Mapping[str, int]
    settings: Mapping[str, Any]
    loss: Sequence[tuple[int, float]]
    accuracy: Sequence[tuple[int, Sequence[float]]]
    held_out: Sequence[tuple[int, Mapping[str, Any]]]
    earlier: Sequence[Mapping[str, Any]] = ()

    @property
    def before(self) -> Mapping[str, Any]:
        """Held-out acceptance of the untrained draft."""
        return self.held_out[0][1]

    @property
    def after(self) -> Mapping[str, Any]:
        """Held-out acceptance at the end."""
        return self.held_out[-1][1]


def report_json(report: TrainingReport) -> str:
    """A line for each field, so that thousands of steps stay readable beside the rest; curves over steps have five
    significant digits.
    """
    fields = asdict(report)
    fields["loss"] = [(step, _five_digits(loss)) for step, loss in report.loss]
    fields["accuracy"] = [(step, [_five_digits(one) for one in all_]) for step, all_ in report.accuracy]
    lines = (
        f"  {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in sorted(fields.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _five_digits(value: float) -> float:
    return float(f"{value:.5g}")


def render_training(report: TrainingReport) -> str:
    """One HTML document without any reference to the outside."""
    after = report.after
    head = tiles(
        [
            ("Acceptance length", number(after["acceptance_length"]), f"before {_length(report.before)}"),
            ("Accepted at position 1", percent(after["conditional_acceptance"][0]), "of held-out steps"),
            ("Response tokens", f"{report.response_tokens:,}", f"{count(report.responses)} responses"),
            ("Steps", f"{report.steps:,}", f"{count(report.settings['epochs'])} epochs"),
            (
                "Parameters",
                f"{report.parameters / 1e6:,.1f} M",
                f"{report.trained_parameters / 1e6:,.1f} M trained",
            ),
            (
                "Draft vocabulary",
                f"{report.draft_vocab_size:,}",
                f"{percent(report.vocabulary_coverage)} of held-out tokens",
            ),
        ]
    )
    parts = [
        f'<h1>Training: {escape(report.method)}</h1><p class="soft wide">{escape(report.command)}</p>{head}',
        _loss(report),
        _length_curve(report),
        _positions(report),
        _kinds(report),
        section(
            "Settings",
            table("As trained", ["", "value"], [[k, str(v)] for k, v in sorted(report.settings.items())]),
        ),
    ]
    return page(f"Training of {report.method}", "\n".join(parts))


def _loss(report: TrainingReport) -> str:
    points = _thinned(report.loss)
    top = max(value for _, value in points)
    chart = curves(
        "Training loss",
        [Curve("loss", points)],
        x_title="step",
        description=f"from {points[0][1]:.3f} to {points[-1][1]:.3f}",
        top=top,
        spell=lambda value: number(value),
    )
    body = [[f"{step:,}", number(value, 3)] for step, value in _thinned(report.loss, 12)]
    return section(
        "Loss", pair(figure("Loss of each batch", chart), table("Loss by step", ["step", "loss"], body))
    )


def _length_curve(report: TrainingReport) -> str:
    points = [(step, found["acceptance_length"]) for step, found in report.held_out]
    chart = curves(
        "Held-out acceptance length",
        [Curve("acceptance length", points)],
        x_title="step",
        description=f"from {points[0][1]:.2f} to {points[-1][1]:.2f}",
        top=max(value for _, value in points),
        spell=lambda value: number(value),
    )
    body = [[f"{step:,}", number(value)] for step, value in points]
    return section(
        "Acceptance length on held-out text",
        pair(
            figure("Tokens a verify step emits", chart),
            table("By step", ["step", "acceptance length"], body),
        ),
        note="Greedy drafts are walked through the target's own responses to prompts that were never trained on. "
        "The target's own token of each step is counted.",
    )


def _positions(report: TrainingReport) -> str:
    trained = len(report.accuracy[-1][1])  # at first it may be the first position alone
    lines = [
        Curve(
            f"position {i + 1}",
            _thinned([(step, values[i]) for step, values in report.accuracy if i < len(values)]),
        )
        for i in range(trained)
    ]
    chart = curves(
        "Accuracy in training",
        lines,
        x_title="step",
        description="; ".join(f"{line.name} ends at {line.points[-1][1]:.1%}" for line in lines),
    )
    after = report.after
    labels = [str(i + 1) for i in range(len(after["conditional_acceptance"]))]
    series = [
        Series("before", report.before["conditional_acceptance"]),
        Series("after", after["conditional_acceptance"]),
    ]
    held = bars(
        "Conditional acceptance", labels, series, spell=lambda v: percent(v), x_title="draft position"
    )
    body = [
        [label, percent(first), percent(last), percent(accuracy)]
        for label, first, last, accuracy in zip(
            labels, series[0].values, series[1].values, after["accuracy"], strict=True
        )
    ]
    return section(
        "By draft position",
        pair(
            figure("Accuracy of each batch", chart, [line.name for line in lines], lines=True),
            figure("Held-out: accepted, given that all before it were", held, [one.name for one in series]),
        ),
        table("Held-out", ["position", "accepted before", "accepted after", "accuracy after"], body),
        note=_ACCURACY_IS,
    )


def _kinds(report: TrainingReport) -> str:
    found = report.after["by_kind"]
    chart = rows(
        "Acceptance length by kind",
        list(found),
        [Series("acceptance length", list(found.values()))],
        spell=lambda value: number(value),
        x_title="tokens per verify step",
        origin=1.0,
    )
    body = [
        [kind, number(value), count(report.prompts_by_kind.get(kind, 0))] for kind, value in found.items()
    ]
    return section(
        "By kind of prompt",
        pair(
            figure("Held-out acceptance length", chart),
            table("By kind", ["kind", "acceptance length", "prompts trained on"], body),
        ),
    )


def _thinned(points: Sequence[tuple[int, float]], most: int = _POINTS) -> list[tuple[int, float]]:
    """At most so many points, the first and last among them; each between is the mean of those it stands for."""
    if len(points) <= most:
        return list(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    middle = [
        (points[(a + b) // 2][0], sum(value for _, value in points[a:b]) / (b - a))
        for a, b in pairwise(edges)
    ]
    return [points[0], *middle[1:-1], points[-1]]


def _told(run: Mapping[str, Any]) -> str:
    if "command" not in run:
        return f"it went on from the head {run['head']}."
    return f"`{run['command']}`: {run['response_tokens']:,} response tokens, {run['steps']:,} steps."


def _length(found: Mapping[str, Any]) -> str:
    return number(found["acceptance_length"])


def model_card(report: TrainingReport, licence: Mapping[str, str | None]) -> str:
    """README.md of the draft's folder: what it is, its data, licence and command, and how much of it is accepted."""
    after, settings = report.after, report.settings
    front = [f"{name}: {value}" for name, value in licence.items() if value]
    made = "made up by the target itself (Magpie, 2406.08464) and given" if settings["invent"] else "given"
    if settings.get("follow_up"):
        made += ", and to tasks about half of its own answers"
    terms = licence.get("license") or "not stated by the target"
    lines = [
        "---",
        *front,
        "---",
        f"# Draft for speculative decoding: {report.method}",
        "",
        "It proposes tokens for its target to verify, and is no language model to talk to.",
        "",
        f"- **Data**: {report.response_tokens:,} tokens of {report.responses:,} responses that the target wrote as it "
        f"is served, at temperature {settings['temperature']:g}, to prompts {made}; no text by anybody else is "
        "learned.",
        f"- **Licence**: that of the target ({terms}), whose weights it starts from and whose text it learned.",
        f"- **Command**: `{report.command}`: {report.steps:,} steps, {settings['epochs']} epochs, learning rate "
        f"{settings['learning_rate']:g}, seed {settings['seed']}.",
        *(f"- **Before**: {_told(run)}" for run in report.earlier),
        f"- **Size**: {report.parameters / 1e6:,.1f} M parameters of its own; draft vocabulary of "
        f"{report.draft_vocab_size:,} tokens, {report.vocabulary_coverage:.1%} of held-out text.",
        "",
        "## Acceptance",
        "",
        f"Greedy chains of {len(after['conditional_acceptance'])} on {report.held_out_tokens:,} held-out tokens, "
        f"{after['steps']:,} verify steps: **{after['acceptance_length']:.2f} tokens a step** "
        f"({_length(report.before)} before training). The prompts were like those trained on; measure other text "
        "with `trtspec eval`.",
        "",
        "| draft position | accepted, given all before it |",
        "|---:|---:|",
        *(f"| {i} | {share:.1%} |" for i, share in enumerate(after["conditional_acceptance"], 1)),
        "",
        "| kind of prompt | tokens a step |",
        "|---|---:|",
        *(f"| {kind} | {value:.2f} |" for kind, value in after["by_kind"].items()),
    ]
    return "\n".join(lines) + "\n"
