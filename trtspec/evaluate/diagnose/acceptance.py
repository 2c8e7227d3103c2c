"""Causes of low acceptance."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from trtspec.evaluate.diagnose.finding import (
    SURE,
    Case,
    Finding,
    length_against,
    same_drafting,
    standard_errors,
)
from trtspec.evaluate.metrics import position_counts
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.text import number, percent, ratio
from trtspec.plan.measured import RETRIEVAL
from trtspec.values import StepRecord

_MIN_STEPS = 20
_FLOATS = {"float32", "float16", "bfloat16"}


def rarely_drafts(case: Case) -> Finding | None:
    """Of at least 20 steps some, but less than half, had a draft to verify."""
    steps = case.steps
    drafted = [step for step in steps if step.drafted]
    share = len(drafted) / len(steps) if steps else 0.0
    if len(steps) < _MIN_STEPS or not 0 < share < 0.5:
        return None
    length = sum(step.emitted for step in drafted) / len(drafted)
    method = case.run.speculative.method
    return Finding(
        "rarely-drafts",
        f"The {method} drafter proposed nothing in most steps.",
        (
            f"{len(drafted)} of {len(steps)} steps had a draft ({percent(share)})",
            f"acceptance length {number(length)} in those, {number(case.acceptance_length)} over all",
        ),
        "lookups pay on text that repeats its prompt (editing, summaries, code); for other text use a trained head or "
        "a draft model"
        if method in RETRIEVAL
        else "an adaptive draft length stops after refused drafts: a drafter closer to the target would keep drafting",
        cost=length / (case.acceptance_length or length) - 1,
    )


def below_plan(case: Case) -> Finding | None:
    """Acceptance length is below 0.9 of the planned one, and temperature does not account for it."""
    planned, measured = (case.planned or {}).get("acceptance_length"), case.acceptance_length
    if not planned or not measured or measured >= 0.9 * planned or not any(s.drafted for s in case.steps):
        return None
    if sampling_temperature(case):
        return None
    assumed = (case.run.plan or {}).get("acceptance") or {}
    source = assumed.get("source")
    lost = planned / measured - 1
    if case.decode_gain and case.planned.get("speedup"):  # a step may have been cheaper than planned as well
        lost = max(0.0, min(lost, case.planned["speedup"] / case.decode_gain - 1))
    return Finding(
        "acceptance-below-plan",
        "Drafts are accepted less often than the plan assumed.",
        (
            f"acceptance length {number(measured)}, planned {number(planned)}",
            *((f"the plan's acceptance is {source}",) if source else ()),
        ),
        "the draft does worse here than on text like that it was trained on: train it further on prompts like these "
        "(`training.start` names the draft, `training.data` the prompts), then `trtspec train CONFIG`"
        if assumed.get("kind") == "trained"
        else "plan again with this run's own acceptance: `trtspec plan CONFIG --measured RUN`; if the plan's numbers "
        "are of this very drafter, look for the other causes here",
        cost=lost,
    )


def falls_with_position(case: Case) -> Finding | None:
    """Conditional acceptance drops by at least 0.2 from the first draft position to the last judged 20 times, surely
    (2.58 standard errors), and less than a third of the drafts survive to that last position.

    Trees are left out: their later positions hold fewer alternatives by design.
    """
    if case.run.speculative.tree_depth is not None:
        return None
    accepted, judged = position_counts(case.steps)
    last = max((i for i, count in enumerate(judged) if count >= _MIN_STEPS), default=0)
    if last == 0:
        return None
    rates = [a / j for a, j in zip(accepted[: last + 1], judged)]
    joint = np.cumprod(rates)
    sure = standard_errors(accepted[0], judged[0], accepted[last], judged[last]) > SURE
    if rates[0] - rates[last] < 0.2 or not sure or joint[last] > 1 / 3:
        return None
    steps = [step for step in case.steps if step.drafted]
    wasted = 1 - sum(step.accepted for step in steps) / sum(step.drafted for step in steps)
    evidence = [
        f"accepted given those before: {' '.join(percent(rate, 0) for rate in rates)}",
        f"{percent(joint[last])} of the drafts survive to position {last + 1}; "
        f"{percent(wasted)} of drafted tokens were refused",
    ]
    best = best_draft_length(case)
    ran = case.run.speculative.draft_length
    cost, advice = 0.0, "draft fewer tokens"
    if best is not None and ran is not None and best[0] < ran:
        cost = best[1] - 1
        advice = f"set `speculation.draft_length: {best[0]}`"
        evidence.append(
            f"with this run's rates and step times a draft length of {best[0]} decodes {ratio(best[1])} as fast as "
            f"{ran}"
        )
    return Finding(
        "acceptance-falls-with-position",
        "Later draft tokens are refused: the drafter does not reach as far as it drafts.",
        tuple(evidence),
        f"{advice}, or use `draft_length_policy: adaptive`; a head that falls off this fast was trained on too few of "
        "its own steps",
        cost=max(0.0, cost),
    )


def best_draft_length(case: Case) -> tuple[int, float] | None:
    """(draft length, decoding speed over that at the length that ran) that this run's own rates and step times favour.

    Only lengths whose step was timed at least 8 times are weighed, and 0 by the baseline. None for trees, for drafters
    that find nothing in a tenth of the steps or more (a shorter draft does not help there), and where the length that
    ran was not timed.
    """
    ran, timed = case.run.speculative.draft_length, case.profile["step_ms_by_rows"]
    rates = case.profile["conditional_acceptance"]
    if not ran or case.run.speculative.tree_depth is not None or (case.profile["proposed"] or 0) < 0.9:
        return None
    speed: dict[int, float] = {}
    for length in range(1, ran + 1):
        found = timed.get(str(length + 1))
        emitted = _expected_length(rates[:length])
        if found and found["count"] >= 8 and found["p50"] > 0 and emitted is not None:
            speed[length] = emitted / found["p50"]
    plain = case.profile["baseline_step_ms"]
    if plain and plain["p50"] > 0:
        speed[0] = 1 / plain["p50"]
    if ran not in speed:
        return None
    best = max(speed, key=lambda length: speed[length])
    return best, speed[best] / speed[ran]


def _expected_length(rates: Sequence[float | None]) -> float | None:
    """Acceptance length 1 + Σ Π rates; None where a position that drafts reach was never judged."""
    length = joint = 1.0
    for rate in rates:
        if joint == 0:
            break
        if rate is None:
            return None
        joint *= rate
        length += joint
    return length


def falls_with_context(case: Case) -> Finding | None:
    """The first draft token is accepted at least 0.1 less often in the longer half of contexts, surely (2.58 standard
    errors), with at least 50 judged steps in each half.

    Halves are cut within each category, so that a category with long prompts is not taken for a long context.
    """
    by_category: dict[str, list[tuple[int, StepRecord]]] = defaultdict(list)
    for request in case.run.of("speculative"):
        context = request.prompt_tokens + 1
        for step in request.steps:
            by_category[request.category].append((context, step))
            context += step.emitted
    halves: tuple[list[StepRecord], list[StepRecord]] = ([], [])
    contexts: tuple[list[int], list[int]] = ([], [])
    for found in by_category.values():
        middle = float(np.median([context for context, _ in found]))
        for context, step in found:
            half = int(context > middle)
            halves[half].append(step)
            contexts[half].append(context)
    counts = [position_counts(half) for half in halves]
    if any(not judged or judged[0] < 50 for _, judged in counts):
        return None
    (near, near_of), (far, far_of) = ((accepted[0], judged[0]) for accepted, judged in counts)
    drop = near / near_of - far / far_of
    if drop < 0.1 or standard_errors(near, near_of, far, far_of) <= SURE:
        return None
    short, long = (sum(s.emitted for s in half) / len(half) for half in halves)
    return Finding(
        "acceptance-falls-with-context",
        "Acceptance falls as the context grows.",
        (
            f"first draft token accepted: {percent(near / near_of)} at a median of {np.median(contexts[0]):.0f} tokens "
            f"of context, {percent(far / far_of)} at {np.median(contexts[1]):.0f}",
            f"acceptance length {number(short)} and {number(long)}",
        ),
        "check that the drafter has the target's RoPE scaling and was trained at this length; a drafter with a window "
        "or short training loses long contexts",
        cost=max(0.0, (short / long - 1) / 2),
    )


def quantization_loss(case: Case) -> Finding | None:
    """A quantized run accepts surely less (95 % interval below 1) and at least 3 % less per step than an unquantized
    run of the same prompts, mechanism, draft length and temperature that was given beside it."""
    if quantized(case.run) is not True:
        return None
    for other in case.others:
        if (
            quantized(other) is False
            and same_drafting(case.run, other)
            and other.settings.temperature == case.run.settings.temperature
        ):
            found = length_against(case.run, other)
            if found and found.high is not None and found.high < 1 and found.value < 0.97:
                return Finding(
                    "quantization-loss",
                    "Quantization costs acceptance: the unquantized pair accepts more.",
                    (
                        f"acceptance length {ratio(found.value)} that of {other.name} "
                        f"(95 % interval {number(found.low)}–{number(found.high)}, {found.pairs} requests)",
                        f"weights here: {case.run.speculative.weights}; there: {other.speculative.weights}",
                    ),
                    "leave the drafter unquantized first (`speculation.draft.quantization: none`), or train it against "
                    "the quantized target; then choose a finer format for the target",
                    cost=1 / found.value - 1,
                )
    return None


def quantized(run: RunRecord) -> bool | None:
    """Whether a run's engine reads quantized weights, by its line ("210 projections: 210 8-bit"); None unknown."""
    _, colon, kinds = run.speculative.weights.partition(": ")
    if not colon:
        return None
    return any(kind.split(" ", 1)[-1] not in _FLOATS for kind in kinds.split(", "))


def sampling_temperature(case: Case) -> Finding | None:
    """Temperature is above 0, and acceptance length is surely below (95 % interval) that of a cooler run given beside
    it, or below 0.95 of a plan whose acceptance was measured at temperature 0."""
    temperature, measured = case.run.settings.temperature, case.acceptance_length
    if temperature == 0 or measured is None or not any(step.drafted for step in case.steps):
        return None
    loss, evidence = 0.0, []
    for other in case.others:
        if other.settings.temperature < temperature and same_drafting(case.run, other):
            found = length_against(case.run, other)
            if found and found.high is not None and found.high < 1:
                loss = max(loss, 1 / found.value - 1)
                evidence.append(
                    f"acceptance length {ratio(found.value)} that of {other.name} at temperature "
                    f"{other.settings.temperature:g} (95 % interval {number(found.low)}–{number(found.high)})"
                )
    planned = (case.planned or {}).get("acceptance_length")
    source = ((case.run.plan or {}).get("acceptance") or {}).get("source") or ""
    if planned and re.search(r"T = 0(?!\.)", source) and measured < 0.95 * planned:
        loss = max(loss, planned / measured - 1)
        evidence.append(
            f"acceptance length {number(measured)}; the plan's {number(planned)} was measured greedily"
        )
    if not evidence:
        return None
    return Finding(
        "sampling-temperature",
        f"Sampling at temperature {temperature:g} accepts fewer drafts than greedy decoding would.",
        tuple(evidence),
        "expected where drafts are compared with one draw of the target; plan and compare at the temperature you serve",
        cost=loss,
    )
