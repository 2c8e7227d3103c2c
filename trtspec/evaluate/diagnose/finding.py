"""What a diagnosis works on and what it gives: a case (one run and what was given beside it) and findings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.evaluate.bootstrap import Estimate, ratio_interval
from trtspec.evaluate.metrics import all_steps
from trtspec.evaluate.record import RequestRecord, RunRecord
from trtspec.evaluate.summary import measured_profile, planned_point, summarize
from trtspec.values import StepRecord

SURE = 2.58
"""Standard errors a difference of two rates must have to count: 1 in 100 by chance."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. cause: its stable name. title: what is so, in a sentence. evidence: the numbers behind it.

    advice: what to do. cost: how much faster the run would be without it at most, 0.25 is a quarter; 0 where that
    cannot be said. decisive: as long as it holds, the run's numbers do not describe the deployment.
    """

    cause: str
    title: str
    evidence: tuple[str, ...]
    advice: str
    cost: float = 0.0
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A run to explain. summary, profile: its own. planned: what its plan expects of it, None without.

    others: the runs given beside it.
    """

    run: RunRecord
    summary: Mapping[str, Any]
    profile: Mapping[str, Any]
    planned: Mapping[str, Any] | None = None
    others: tuple[RunRecord, ...] = ()

    @classmethod
    def of(cls, run: RunRecord, others: Sequence[RunRecord] = ()) -> Case:
        """The case of a run, whose plan is the one it carries."""
        return cls(run, summarize(run), measured_profile(run), planned_point(run), tuple(others))

    @property
    def steps(self) -> list[StepRecord]:
        """Every verify step of the deployment."""
        return all_steps(self.run.of("speculative"))

    @property
    def acceptance_length(self) -> float | None:
        """Token-weighted: what speed follows."""
        return self.summary["acceptance_length"]["token_weighted"]

    @property
    def decode_gain(self) -> float | None:
        """Measured speed-up of decoding, None without a baseline."""
        found = self.summary["decode_speedup"]
        return found["value"] if found else None

    def mean_step_ms(self, arm: str) -> float | None:
        """Mean milliseconds of a step of "speculative" (drafting included) or "baseline"; None without any."""
        found = self.summary["latency"].get(arm, {}).get("step_latency_ms")
        return found["mean"] if found else None


def standard_errors(passed: int, of: int, other_passed: int, other_of: int) -> float:
    """How many standard errors the first rate lies above the second (pooled two-proportion z); 0 of nothing."""
    if not of or not other_of:
        return 0.0
    pooled = (passed + other_passed) / (of + other_of)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / of + 1 / other_of))
    return (passed / of - other_passed / other_of) / spread if spread else 0.0


def length_against(run: RunRecord, other: RunRecord) -> Estimate | None:
    """Acceptance length of one run over another's, on the requests both finished; None where they share none."""
    reference = {(r.question_id, r.turn): r for r in other.of("speculative")}
    both = [
        (r, reference[r.question_id, r.turn])
        for r in run.of("speculative")
        if (r.question_id, r.turn) in reference
    ]
    return ratio_interval([(*_emitted_in_steps(mine), *_emitted_in_steps(theirs)) for mine, theirs in both])


def _emitted_in_steps(request: RequestRecord) -> tuple[int, int]:
    return sum(step.emitted for step in request.steps), len(request.steps)


def same_drafting(run: RunRecord, other: RunRecord) -> bool:
    """Whether two runs sent the same prompts to the same mechanism at the same draft length."""
    one, two = run.speculative, other.speculative
    return (one.method, one.draft_length, run.data.selection_sha256) == (
        two.method,
        two.draft_length,
        other.data.selection_sha256,
    )
