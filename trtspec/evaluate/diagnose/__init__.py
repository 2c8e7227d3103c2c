"""Why is it slower, why is acceptance low? Causes named from the data of a run, most important first.

finding.py      a case (a run and what was given beside it), and what a cause says of it
validity.py     the numbers mean something else: speculation off, other prompts, other output, a client that is too slow
acceptance.py   drafts are refused: with position, context, quantization, temperature
cost.py         steps or requests take too long: drafting, verifying, prefill

Each cause is a function of a case that gives a finding or None; its docstring states when it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.evaluate.diagnose import acceptance, cost, validity
from trtspec.evaluate.diagnose.finding import Case, Finding
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.text import ratio

__all__ = ["CAUSES", "Case", "Diagnosis", "Finding", "diagnose"]

CAUSES: tuple[Callable[[Case], Finding | None], ...] = (
    validity.speculation_off,
    validity.output_differs,
    validity.template_mismatch,
    validity.lossy_acceptance,
    validity.client_bound,
    cost.drafter_too_slow,
    cost.verification_outweighs,
    cost.planned_past_crossover,
    acceptance.below_plan,
    acceptance.sampling_temperature,
    acceptance.quantization_loss,
    acceptance.rarely_drafts,
    acceptance.falls_with_position,
    acceptance.falls_with_context,
    cost.prefill_dominates,
    cost.prefix_reuse_lost,
    validity.machine_slower,
)

_AS_PLANNED = 0.9


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What explains one run. conclusion: in a sentence or two. findings: decisive ones first, then by what they cost.

    planned_decode_speedup, decode_speedup: of decoding alone. request_speedup: of whole requests, prefill and
    transport included, which no plan predicts. Each None where there is no such number.
    """

    run: str
    conclusion: str
    planned_decode_speedup: float | None
    decode_speedup: float | None
    request_speedup: float | None
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def diagnose(runs: Sequence[RunRecord]) -> list[Diagnosis]:
    """One diagnosis a run, in their order; each is compared with the others where that explains something."""
    return [_explain(Case.of(run, [o for o in runs if o is not run])) for run in runs]


def _explain(case: Case) -> Diagnosis:
    found = [finding for cause in CAUSES if (finding := cause(case))]
    found.sort(key=lambda finding: (not finding.decisive, -finding.cost))
    whole = case.summary["request_speedup"]
    planned = case.planned.get("speedup") if case.planned else None
    return Diagnosis(
        run=case.run.name,
        conclusion=_conclusion(case, planned, found),
        planned_decode_speedup=planned,
        decode_speedup=case.decode_gain,
        request_speedup=whole["value"] if whole else None,
        findings=tuple(found),
    )


def _conclusion(case: Case, planned: float | None, found: Sequence[Finding]) -> str:
    """Decisive findings first; then measured decoding against the plan's, as expected from 0.9 of it on."""
    if found and found[0].decisive:
        return f"{found[0].title} Until that is settled, the other numbers say little about the deployment."
    gain = case.summary["decode_speedup"]
    if gain is None:
        said = "No baseline was measured, so nothing is known of the speed-up."
        return f"{said} {found[0].title}" if found else f"{said} Nothing else stands out."
    measured = f"Decoding is {ratio(gain['value'])} as fast as without speculation"
    if planned is None:
        main = f"Main cause: {found[0].title}" if found else "Nothing stands out."
        return f"{measured}; there is no plan of this load to hold it against. {main}"
    expected = f"{measured}, the plan expected {ratio(planned)}"
    if gain["value"] >= _AS_PLANNED * planned or (gain["high"] is not None and gain["high"] >= planned):
        poor = " The plan itself sees little to gain here." if planned < 1.05 else ""
        more = " What is listed could still make it faster." if any(f.cost > 0 for f in found) else ""
        return f"Nothing wrong: {expected[0].lower()}{expected[1:]}.{poor}{more}"
    causes = [f for f in found if f.cost > 0]
    main = f"Main cause: {causes[0].title}" if causes else "No known cause explains the gap."
    return f"{expected}. {main}"
