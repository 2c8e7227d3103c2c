"""What was measured, in place of what was published or modelled: a run's acceptance and step times, or a probe's.

`read_measured` takes a run folder of `trtspec eval` (run.json), a probe profile, or a `speculation_profile.json`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from trtspec.checkpoints.json_file import read_json_object
from trtspec.errors import ConfigError
from trtspec.plan.acceptance import AcceptanceCurve
from trtspec.plan.step_table import StepSample, StepTable

# Mechanisms whose drafts are copied from text: their recorded runs replay exactly at shorter draft lengths.
RETRIEVAL = frozenset({"ngram", "suffix", "rest", "lookahead"})
# Fewer steps than this at one length say too little about its time.
_MIN_STEPS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """curve: acceptance by position, steps: step times; each None where the source has none.

    method: mechanism that was measured. includes_drafting: step times contain the drafter's work.
    draft_length: of the run. temperature: it was sampled at.
    """

    source: str
    method: str | None = None
    curve: AcceptanceCurve | None = None
    steps: StepTable | None = None
    includes_drafting: bool = False
    draft_length: int | None = None
    temperature: float | None = None


def read_measured(path: Path) -> Measured:
    """Read a run folder or a profile file. Raises ConfigError where there is neither."""
    path = Path(path)
    if path.is_dir():
        for name in ("run.json", "probe.json", "speculation_profile.json"):
            if (path / name).is_file():
                return read_measured(path / name)
        raise ConfigError(
            "no run.json, probe.json or speculation_profile.json here",
            where=str(path),
            hint="name a folder that `trtspec eval` wrote",
        )
    content = read_json_object(path)
    if "requests" in content and "speculative" in content:
        return _from_run(content, str(path))
    if "steps" in content:
        return Measured(str(path), steps=StepTable.from_json(content, str(path)))
    if "conditional_accept_rates" in content:
        return _from_profile(content, str(path))
    raise ConfigError("neither a run, a probe profile nor a speculation profile", where=str(path))


def measured_curve(
    steps: Iterable[tuple[int, int]], *, draft_length: int, retrieval: bool, source: str
) -> AcceptanceCurve | None:
    """Acceptance from (drafted, accepted) of every step; None without any drafting step.

    A retrieval drafter's rate at position i counts all steps (finding nothing is a miss); a model drafter's
    counts the steps that drafted that far.
    """
    counts = Counter(steps)
    if not any(drafted for drafted, _ in counts):
        return None
    rates: list[float] = []
    for position in range(1, draft_length + 1):
        reached = sum(
            n
            for (drafted, accepted), n in counts.items()
            if accepted >= position - 1 and (retrieval or drafted >= position)
        )
        passed = sum(n for (_, accepted), n in counts.items() if accepted >= position)
        if not reached:
            break
        rates.append(passed / reached)
    runs = (
        tuple((drafted, accepted, n) for (drafted, accepted), n in sorted(counts.items()))
        if retrieval
        else ()
    )
    return AcceptanceCurve(tuple(rates), source, draft_length, "measured", runs)


def _from_run(content: Mapping[str, Any], where: str) -> Measured:
    if caution := content.get("data", {}).get("caution"):
        raise ConfigError(
            f"nothing to plan by: {caution}", where=where, hint="measure on prompts like those to be served"
        )
    try:
        target = content["speculative"]
        method = str(target["method"])
        drafted_to = int(target.get("draft_length") or 0)
        speculative = [r for r in content["requests"] if r["arm"] == "speculative"]
        baseline = [r for r in content["requests"] if r["arm"] == "baseline"]
        pairs = [(int(s["drafted"]), int(s["accepted"])) for r in speculative for s in r["steps"]]
        concurrency = int(content["settings"].get("concurrency") or 1)
        open_loop = content["settings"].get("rate_per_s") is not None  # steps of no one batch size
        temperature = float(content["settings"].get("temperature") or 0.0)
        name = f"measured: {content.get('name') or where}"
        longest = max([drafted_to, *(drafted for drafted, _ in pairs)], default=0)
        return Measured(
            source=name,
            method=method,
            curve=measured_curve(pairs, draft_length=longest, retrieval=method in RETRIEVAL, source=name),
            steps=None if open_loop else _step_table(speculative, baseline, concurrency, name),
            includes_drafting=True,
            draft_length=drafted_to,
            temperature=temperature,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a run record this version reads: {error!r}", where=where) from None


def _step_table(
    speculative: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    concurrency: int,
    source: str,
) -> StepTable | None:
    """Median step time by rows, from the times at which steps ended (first steps, which wait for others, left out)."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    lengths: list[int] = []
    for request in speculative:
        for rows, ms in _intervals(request):
            by_rows[rows].append(ms)
        lengths.append(int(request["prompt_tokens"]) + len(request["token_ids"]) // 2)
    plain = [ms for request in baseline for rows, ms in _intervals(request) if rows == 1]
    samples = tuple(
        StepSample(concurrency, rows, int(median(lengths)), median(times))
        for rows, times in sorted(by_rows.items())
        if len(times) >= _MIN_STEPS
    )
    return (
        StepTable(samples, source, median(plain) if len(plain) >= _MIN_STEPS else None) if samples else None
    )


def _intervals(request: Mapping[str, Any]) -> Iterable[tuple[int, float]]:
    steps = request["steps"]
    for before, step in pairwise(steps):
        elapsed = (float(step["at_s"]) - float(before["at_s"])) * 1e3
        if elapsed > 0:
            yield int(step["drafted"]) + 1, elapsed


def _from_profile(content: Mapping[str, Any], where: str) -> Measured:
    try:
        rates = tuple(float(rate) for rate in content["conditional_accept_rates"])
    except (TypeError, ValueError):
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError("conditional_accept_rates must be rates between 0 and 1", where=where)
    curve = AcceptanceCurve(rates, f"measured: {where}", len(rates), "measured")
    method = content.get("method")
    return Measured(
        where, method=method if isinstance(method, str) else None, curve=curve, draft_length=len(rates)
    )
