"""Runs that belong together: of one deployment, at one load. What a sweep shows lies between such groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.evaluate.bootstrap import Estimate
from trtspec.evaluate.metrics import output_tokens_per_s, request_speedup, speedup
from trtspec.evaluate.record import Arm, RequestRecord, RunRecord

_SIDE_BY_SIDE = 6


@dataclass(frozen=True, slots=True)
class Load:
    """Runs of one deployment at one load: one for each data set."""

    runs: tuple[RunRecord, ...]

    @property
    def name(self) -> str:
        """The load in words."""
        return self.runs[0].settings.load

    @property
    def short(self) -> str:
        """The same, short enough for a chart."""
        settings = self.runs[0].settings
        return self.name if settings.rate_per_s is None else f"{settings.rate_per_s:g} per second"

    @property
    def size(self) -> float:
        """What loads of one deployment are ordered by: its concurrency, in an open loop its rate."""
        return self.runs[0].settings.rate_per_s or self.runs[0].settings.concurrency

    def requests(self, arm: Arm) -> list[RequestRecord]:
        """Finished requests of all runs. A question's id is made another in each, as data sets may share ids."""
        return [
            replace(request, question_id=f"{number}/{request.question_id}")
            for number, run in enumerate(self.runs)
            for request in run.of(arm)
        ]

    def tokens_per_s(self, arm: Arm) -> float | None:
        """Output tokens over the time the arm was busy, over all runs."""
        blocks = [block for run in self.runs for block in run.blocks]
        tokens = sum(getattr(block, f"{arm}_tokens") or 0 for block in blocks)
        return output_tokens_per_s(tokens, sum(getattr(block, f"{arm}_s") or 0.0 for block in blocks))

    def gain(self) -> Estimate | None:
        """Speed-up over all runs: of throughput, in an open loop of request time (see `summary.summarize`)."""
        if self.runs[0].settings.rate_per_s is not None:
            return request_speedup(self.requests("speculative"), self.requests("baseline"))
        return speedup([block for run in self.runs for block in run.blocks])


@dataclass(frozen=True, slots=True)
class Deployment:
    """Runs that differ in load and data alone, by rising load. Closed and open loops are not mixed."""

    label: str
    loads: tuple[Load, ...]

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        """All of them, by load."""
        return tuple(run for load in self.loads for run in load.runs)


def deployments(runs: Sequence[RunRecord]) -> list[Deployment]:
    """The deployments that were measured, in the order of their first runs."""
    found = _grouped(runs, _deployment)
    details = [[_temperature(own[0]), "open loop" if _open(own[0]) else "closed loop"] for own in found]
    labels = told_apart([_label(own[0]) for own in found], details)
    return [
        Deployment(label, tuple(sorted(_loads(own), key=lambda load: load.size)))
        for label, own in zip(labels, found, strict=True)
    ]


def detailed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs to describe one by one: all that fit beside each other, of a larger sweep one of each deployment."""
    found = deployments(runs)
    if len(runs) <= _SIDE_BY_SIDE or len(found) == len(runs):
        return list(runs)
    return [deployment.runs[0] for deployment in found]


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name of each run: with its load, data and temperature where it takes them to tell two apart."""
    details = [[run.settings.load, Path(run.data.name).name, _temperature(run)] for run in runs]
    return told_apart([_label(run) for run in runs], details)


def told_apart(labels: Sequence[str], details: Sequence[Sequence[str]]) -> list[str]:
    """Labels, those that are the same told apart by the details in which they differ, else by number."""
    full = []
    for label, own in zip(labels, details, strict=True):
        same = [other for name, other in zip(labels, details) if name == label]
        differing = [text for i, text in enumerate(own) if len({other[i] for other in same}) > 1]
        full.append(", ".join([label, *differing]))
    return [
        f"{label} ({full[: i + 1].count(label)})" if full.count(label) > 1 else label
        for i, label in enumerate(full)
    ]


def _grouped(runs: Sequence[RunRecord], key: Callable[[RunRecord], Hashable]) -> list[list[RunRecord]]:
    groups: dict[Hashable, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _deployment(run: RunRecord) -> Hashable:
    target = run.speculative
    drafting = target.method, target.draft_length, target.acceptance
    sent = run.settings.temperature, _open(run)
    return run.name, target.location, target.model, drafting, run.config, sent


def _loads(runs: Sequence[RunRecord]) -> list[Load]:
    return [Load(tuple(own)) for own in _grouped(runs, lambda run: run.settings.load)]


def _open(run: RunRecord) -> bool:
    return run.settings.rate_per_s is not None


def _label(run: RunRecord) -> str:
    length = run.speculative.draft_length
    return f"{run.name}, D={length}" if length else run.name


def _temperature(run: RunRecord) -> str:
    return f"T={run.settings.temperature:g}"
