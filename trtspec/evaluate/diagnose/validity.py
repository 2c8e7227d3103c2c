"""Causes that make a run's numbers mean something else than they seem to: settle these first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from trtspec.evaluate.diagnose.finding import Case, Finding
from trtspec.evaluate.record import RequestRecord, RunRecord
from trtspec.evaluate.text import number, percent, ratio

_MIN_STEPS = 20
_IDLE = 0.10
_MERGED = 0.20


def speculation_off(case: Case) -> Finding | None:
    """Not one of at least 20 verify steps carried a draft."""
    steps = case.steps
    if len(steps) < _MIN_STEPS or any(step.drafted for step in steps):
        return None
    run, plan = case.run, case.run.plan or {}
    method, batch = run.speculative.method, run.settings.concurrency
    evidence = [f"{len(steps)} verify steps, none with a draft; {len(steps)} tokens emitted, one a step"]
    scheduled = _scheduled(plan.get("schedule") or {}, batch)
    if method == "none":
        why = "this build does not speculate"
        advice = "evaluate a build whose `speculation.method` is not none"
        if plan.get("binding"):
            evidence.append(f"the plan decided so: {plan['binding']}")
    elif scheduled == 0:
        why = "the plan's schedule turns it off at this concurrency"
        evidence.append(f"planned draft length at concurrency {batch}: 0")
        advice = "expected: measure at a lower concurrency, or name a `speculation.draft_length`"
    elif run.speculative.transport == "in process":
        why = f"the {method} drafter proposed nothing"
        advice = (
            "look at the drafter's own settings: a shortest match or a shortest draft that never fits, "
            "or a draft-length policy that settled at 0"
        )
    else:
        why = "the server drafted nothing, or does not say what it drafted"
        evidence.append(f"acceptance from {run.speculative.acceptance_source}")
        advice = (
            "check that the server was started with speculation and a draft length above 0, and that its version "
            "fills in its counters: some report zeros"
        )
    return Finding("speculation-off", f"Speculation was off: {why}.", tuple(evidence), advice, decisive=True)


def template_mismatch(case: Case) -> Finding | None:
    """A first turn of equal text reached the model as other tokens: on the baseline, or in another run of the model.

    Later turns are left out: they quote the model's own answers. Counted as different when the token count or, where
    both arms reveal it, the hash of the token ids differs.
    """
    run = case.run
    found = [("the baseline", _differing(run.of("speculative"), run.of("baseline")))]
    found += [
        (other.name, _differing(run.of("speculative"), other.of("speculative")))
        for other in case.others
        if _same_prompts_and_model(run, other)
    ]
    evidence = []
    for name, (compared, pairs) in found:
        if not pairs:
            continue
        gaps = {mine.prompt_tokens - theirs.prompt_tokens for mine, theirs in pairs}
        one, two = pairs[0]
        line = (
            f"{len(pairs)} of {compared} prompts have other tokens than on {name}; "
            f"{one.question_id}: {one.prompt_tokens} against {two.prompt_tokens}"
        )
        if gaps in ({1}, {-1}):
            line += "; always exactly one token: a begin-of-text token is there twice, or missing"
        evidence.append(line)
    if not evidence:
        return None
    return Finding(
        "template-mismatch",
        "The same prompts were sent as different tokens: the chat template or the begin-of-text token differs.",
        tuple(evidence),
        "render the template once, on one side only; compare the two sides' tokenizer_config.json and chat template",
        decisive=True,
    )


def output_differs(case: Case) -> Finding | None:
    """At least one compared request differs from plain decoding beyond a near tie, under the exact acceptance rule."""
    report = case.run.lossless
    if report.lossy or not report.mismatches:
        return None
    first = next(d for d in report.differences if d.verdict == "mismatch")
    where = f"first: {first.question_id}, turn {first.turn + 1}, from token {first.position} on"
    return Finding(
        "output-differs",
        "The output is not the target's own, so its acceptance is not the target's either.",
        (f"{report.mismatches} of {report.checked} compared requests differ; {where}",),
        "find out why before looking at speed: `trtspec report` lists every difference with both tokens",
        decisive=True,
    )


def lossy_acceptance(case: Case) -> Finding | None:
    """Drafts are judged by a rule other than the exact one."""
    report = case.run.lossless
    if not report.lossy:
        return None
    return Finding(
        "lossy-acceptance",
        f"Drafts are judged by {report.acceptance} acceptance: longer runs are bought with another output.",
        (
            f"{report.mismatches} of {report.checked} compared requests differ from plain decoding",
            f"acceptance length {number(case.acceptance_length)} under this rule, not under the exact one",
        ),
        "compare it only with runs under the same rule; `verification.acceptance: exact` gives the target's own output",
        decisive=True,
    )


def client_bound(case: Case) -> Finding | None:
    """The deployment waited for its client: at least 10 % of the places for requests were empty while requests waited,
    at least 10 % of the request time of an open loop had passed before the client sent what was due, or at least 20 %
    of a server's steps were read together with the step before.

    Places count up to the start of a block's last conversation: after it a block drains, which is no one's fault.
    Blocks with failed requests are left out.
    """
    run = case.run
    idle = _idle_share(run)
    pairs = [(before, step) for r in run.of("speculative") for before, step in zip(r.steps, r.steps[1:])]
    merged = sum(step.at_s == before.at_s for before, step in pairs) / len(pairs) if pairs else 0.0
    evidence = []
    if idle is not None and idle >= _IDLE:
        evidence.append(
            f"{percent(idle)} of the places for {run.settings.concurrency} requests were empty while requests waited"
        )
    late = _late_share(run)
    if late >= _IDLE:
        evidence.append(f"{percent(late)} of request time had passed before the client sent what was due")
    if run.speculative.transport != "in process" and merged >= _MERGED:
        evidence.append(f"{percent(merged)} of the steps arrived together with the step before")
    if not evidence:
        return None
    waited = max(idle or 0.0, late)
    lost = waited / (1 - waited) if waited < 1 else 0.0
    return Finding(
        "client-bound",
        "The client is the bottleneck: the deployment waited for it.",
        tuple(evidence),
        "give the client cores of its own, or run it on another machine; then measure again",
        cost=lost,
        decisive=True,
    )


def machine_slower(case: Case) -> Finding | None:
    """Plain decoding took at least 1.3 times the step time the plan gives it: a slow or shared machine.

    Only at the plan's first batch size, whose plain step it states.
    """
    run, plan = case.run, case.run.plan or {}
    plain = next((c for c in plan.get("candidates", ()) if c["draft_length"] == 0), None)
    measured = case.profile["baseline_step_ms"]
    if plain is None or "step_ms" not in plain or not measured or case.planned is None:
        return None
    batches = plan.get("batches", ())
    if batches and batches[0]["batch"] != run.settings.concurrency:
        return None
    factor = measured["p50"] / plain["step_ms"]
    if factor < 1.3:
        return None
    spread = measured["p75"] / measured["p25"]
    return Finding(
        "machine-slower-than-planned",
        f"A plain step itself takes {ratio(factor)} its planned time: another device, or a busy one.",
        (
            f"plain step: median {number(measured['p50'])} ms, planned {number(plain['step_ms'])} ms",
            f"its upper quartile is {ratio(spread)} its lower one"
            + (": the machine was doing other work" if spread > 1.3 else ""),
        ),
        "the speed-up is a ratio and still holds; for absolute numbers measure on an idle machine, "
        "or plan with `--measured` this run",
    )


def _scheduled(schedule: Mapping[str, int], batch: int) -> int | None:
    lengths = sorted((int(largest), length) for largest, length in schedule.items())
    return (
        next((length for largest, length in lengths if batch <= largest), lengths[-1][1]) if lengths else None
    )


def _same_prompts_and_model(run: RunRecord, other: RunRecord) -> bool:
    return (run.data.selection_sha256, run.speculative.model) == (
        other.data.selection_sha256,
        other.speculative.model,
    )


def _differing(
    ours: Iterable[RequestRecord], theirs: Iterable[RequestRecord]
) -> tuple[int, list[tuple[RequestRecord, RequestRecord]]]:
    """(first turns both sides have, those of them that were other tokens)."""
    first = {r.question_id: r for r in theirs if r.turn == 0}
    both = [(r, first[r.question_id]) for r in ours if r.turn == 0 and r.question_id in first]
    return len(both), [(a, b) for a, b in both if _other_tokens(a, b)]


def _other_tokens(one: RequestRecord, two: RequestRecord) -> bool:
    hashes = (one.prompt_sha256, two.prompt_sha256)
    return one.prompt_tokens != two.prompt_tokens or (None not in hashes and hashes[0] != hashes[1])


def _late_share(run: RunRecord) -> float:
    """Share of request time, which an open loop counts from the scheduled arrival, by which the client was late."""
    requests = run.of("speculative")
    total = sum(request.total_s for request in requests)
    return sum(request.late_s or 0.0 for request in requests) / total if total > 0 else 0.0


def _idle_share(run: RunRecord) -> float | None:
    """Share of request places that stood empty while conversations of the block had not started; None unmeasured."""
    if run.settings.rate_per_s is not None:  # what arrives fills the places, not the client
        return None
    places = run.settings.concurrency
    by_block: dict[int, list[RequestRecord]] = defaultdict(list)
    for request in run.of("speculative"):
        by_block[request.block].append(request)
    begin = offered = used = 0.0
    for block in run.blocks:
        requests = by_block[block.index]
        waiting = len({r.question_id for r in requests}) > places or places == 1
        if block.whole and requests and waiting:
            # With one place a block is one conversation, and all its time is the client's or the deployment's.
            end = (
                block.speculative_s
                if places == 1
                else max(r.start_s for r in requests if r.turn == 0) - begin
            )
            offered += places * end
            used += sum(
                max(0.0, min(r.start_s - begin + r.total_s, end) - (r.start_s - begin)) for r in requests
            )
        begin += block.speculative_s
    return max(0.0, 1 - used / offered) if offered > 0 else None
