"""Whether to ship a deployment: one decision over all loads it was measured at, and the reasons for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trtspec.evaluate.bootstrap import Estimate
from trtspec.evaluate.diagnose.finding import Case
from trtspec.evaluate.diagnose.validity import client_bound, template_mismatch
from trtspec.evaluate.lossless import LosslessReport
from trtspec.evaluate.metrics import request_speedup
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report.groups import Deployment, Load, deployments
from trtspec.evaluate.report.words import Tone, effect, lossless_verdict, span
from trtspec.evaluate.text import count, number, ratio

Decision = Literal["ship", "ship with a batch limit", "do not ship", "no verdict"]

WORTH = 1.05
"""The least speed-up that is worth the trouble."""

TONES: dict[Decision, Tone] = {
    "ship": "good",
    "ship with a batch limit": "warn",
    "do not ship": "bad",
    "no verdict": "warn",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a deployment. limit: the largest load that pays, in words, where one above it does not.

    batch_limit: that load's concurrency, None for an arrival rate. reasons: sentences, the deciding one first.
    """

    deployment: str
    decision: Decision
    reasons: tuple[str, ...]
    limit: str | None = None
    batch_limit: int | None = None

    @property
    def headline(self) -> str:
        """The decision as a sentence."""
        if self.decision == "ship with a batch limit":
            return (
                f"Ship with a batch limit: {self.limit}." if self.batch_limit else f"Ship up to {self.limit}."
            )
        return f"{self.decision.capitalize()}."

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def verdicts_of(runs: Sequence[RunRecord]) -> list[Verdict]:
    """One verdict for each deployment among the runs."""
    return [decide(deployment) for deployment in deployments(runs)]


def decide(deployment: Deployment) -> Verdict:
    """Ship what is surely faster, interval above 1, at every load from the lowest on up to a limit, and loses nothing.

    Do not ship: output that is not the target's own though it should be, requests that fail only with speculation, or
    at the lowest load an interval that ends below a gain of WORTH. No verdict: an interval that reaches from a loss to
    more than that, no baseline, an unfinished run, prompts or a client that make the numbers mean something else.
    """
    gains = [(load, load.gain()) for load in deployment.loads]
    paying = 0
    while paying < len(gains) and _surely_faster(gains[paying][1]):
        paying += 1
    facts = (
        *_each(gains),
        lossless_verdict(_losslessness(deployment))[0],
        *_losing_categories(deployment.loads[: max(paying, 1)]),
        *_not_measured(deployment),
    )

    def verdict(decision: Decision, reasons: Sequence[str], **limit: Any) -> Verdict:
        return Verdict(deployment.label, decision, tuple(dict.fromkeys(reasons)), **limit)

    if spoiled := _spoiled(deployment):
        return verdict("do not ship", (*spoiled, *facts))
    if unknown := _unknown(deployment, gains[0][1]):
        return verdict("no verdict", (*unknown, *facts))
    if paying == 0:
        return verdict("do not ship", facts)
    if paying == len(gains):
        return verdict("ship", facts)
    last = gains[paying - 1][0]
    settings = last.runs[0].settings
    batch_limit = settings.concurrency if settings.rate_per_s is None else None
    return verdict("ship with a batch limit", facts, limit=last.name, batch_limit=batch_limit)


def _surely_faster(gain: Estimate | None) -> bool:
    return gain is not None and gain.low is not None and gain.low > 1


def _each(gains: Sequence[tuple[Load, Estimate | None]]) -> list[str]:
    """The speed-up at each load."""
    return [f"At {load.name}: {effect(gain)}." for load, gain in gains if gain is not None]


def _spoiled(deployment: Deployment) -> list[str]:
    """Why it may not be shipped however fast it is."""
    found = []
    together = _losslessness(deployment)
    if together.mismatches and not together.lossy:
        found.append(lossless_verdict(together)[0])
    failed = sum(len(_own_failures(run)) for run in deployment.runs)
    if failed:
        found.append(f"Requests that failed though the baseline answered them: {count(failed)}.")
    return found


def _own_failures(run: RunRecord) -> set[tuple[str, int]]:
    """Requests that failed with speculation and were answered without."""
    answered = {(request.question_id, request.turn) for request in run.of("baseline")}
    return {(f.question_id, f.turn) for f in run.failures if f.arm == "speculative"} & answered


def _unknown(deployment: Deployment, gain: Estimate | None) -> list[str]:
    """Why nothing can be said yet. gain: at the lowest load."""
    found = [
        f"Interrupted: partial results of {count(len(run.of('speculative')))} finished requests."
        for run in deployment.runs
        if not run.complete
    ]
    found += dict.fromkeys(f"{run.data.caution.rstrip('.')}." for run in deployment.runs if run.data.caution)
    for run in deployment.runs:
        case = Case.of(run)
        found += [f.title for cause in (template_mismatch, client_bound) if (f := cause(case))]
    if all(run.baseline is None for run in deployment.runs):
        speed = number(deployment.loads[0].tokens_per_s("speculative"), 1)
        found.append(
            f"{speed} tokens per second; no baseline was measured, so there is no speed-up to judge."
        )
    elif gain is None or gain.low is None or gain.high is None:
        pairs = gain.pairs if gain else 0
        found.append(f"Pairs with the baseline: {pairs}, too few to be sure of anything.")
    elif gain.low <= 1 and gain.high >= WORTH:
        found.append("The speed-up is not known well enough: more prompts narrow its interval.")
    return found


def _losslessness(deployment: Deployment) -> LosslessReport:
    """What was found in all runs together."""
    reports = [run.lossless for run in deployment.runs]
    return LosslessReport(
        checked=sum(report.checked for report in reports),
        mismatches=sum(report.mismatches for report in reports),
        near_ties=sum(report.near_ties for report in reports),
        not_checked="; ".join(dict.fromkeys(r.not_checked for r in reports if r.not_checked)) or None,
        acceptance=reports[0].acceptance,
    )


def _losing_categories(loads: Sequence[Load]) -> list[str]:
    """Categories that are surely slower at a load that is to be served."""
    found = []
    for load in loads:
        ours, plain = load.requests("speculative"), load.requests("baseline")
        for category in dict.fromkeys(request.category for request in ours):
            gain = request_speedup(
                [r for r in ours if r.category == category], [r for r in plain if r.category == category]
            )
            if gain is not None and gain.high is not None and gain.high < 1:
                where = f" at {load.name}" if len(loads) > 1 else ""
                found.append(
                    f"Loses in {category}{where}: {ratio(gain.value)} ({span(gain.low, gain.high)})."
                )
    return found


def _not_measured(deployment: Deployment) -> list[str]:
    """What the runs leave open: prompts a time limit cut off, and other loads where there is one alone."""
    found = []
    several = len(deployment.loads) > 1
    for load in deployment.loads:
        where = f" at {load.name}" if several else ""
        found += [
            f"The time limit left {count(run.unsent_prompts)} of {count(run.data.prompts)} prompts unsent{where}."
            for run in load.runs
            if run.unsent_prompts
        ]
    if not several:
        crossover = (deployment.loads[0].runs[0].plan or {}).get("crossover_batch")
        plan = f"; its plan sees no gain from batch {crossover} on" if crossover else ""
        found.append(f"No other load was measured{plan}: `trtspec eval --sweep` measures several.")
    return found
