"""Each cause is named where it holds, with the numbers behind it, and not just below its threshold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.evaluate.conftest import request
from tests.evaluate.test_report import Page
from trtspec.cli import main
from trtspec.evaluate.diagnose import Case, Finding, acceptance, cost, diagnose, validity
from trtspec.evaluate.environment import Environment
from trtspec.evaluate.lossless import Difference, LosslessReport
from trtspec.evaluate.record import (
    BlockRecord,
    DataFacts,
    RequestRecord,
    RunRecord,
    RunSettings,
    TargetFacts,
)
from trtspec.evaluate.report import render_html

PLAIN = [(0, 0, 1)] * 30
ACCEPTING = [(3, 3, 4), (3, 0, 1), (3, 3, 4), (3, 1, 2), (3, 3, 4)] * 2
"""Ten steps of three tokens on average; later positions are accepted as often as the first."""


def run_of(
    speculative: Sequence[RequestRecord],
    baseline: Sequence[RequestRecord] = (),
    *,
    name: str = "run",
    method: str = "eagle3",
    draft_length: int = 3,
    concurrency: int = 1,
    temperature: float = 0.0,
    plan: dict | None = None,
    **facts: object,
) -> RunRecord:
    """A record of some requests, each a block of its own, served back to back unless they say otherwise."""
    requests, blocks, clock = [], [], 0.0
    for i, one in enumerate(speculative):
        requests.append(replace(one, block=i, question_id=f"q{i}", start_s=clock))
        blocks.append(BlockRecord(i, "speculative", True, one.total_s, len(one.token_ids)))
        clock += one.total_s
    requests += [replace(one, arm="baseline", question_id=f"q{i}") for i, one in enumerate(baseline)]
    target = TargetFacts("in process", "model", method, draft_length, exact=True, **facts)
    return RunRecord(
        name=name,
        created_at="2026-01-01T00:00:00+00:00",
        settings=RunSettings(64, concurrency=concurrency, temperature=temperature),
        data=DataFacts("here", len(speculative), "sha"),
        speculative=target,
        baseline=replace(target, method="none", draft_length=0) if baseline else None,
        environment=Environment("0", "3.11", "Linux", "cpu", 2, None, {}),
        requests=tuple(requests),
        blocks=tuple(blocks),
        lossless=LosslessReport(len(baseline), 0, 0, acceptance=target.acceptance),
        plan=plan,
    )


def planned(**candidate: object) -> dict:
    """A plan of draft length 3 whose plain step takes 10 ms, whatever is verified."""
    chosen = {"draft_length": 3, "acceptance_length": 3.0, "step_ms": 12.0, "speedup": 2.5, **candidate}
    plain = {"draft_length": 0, "acceptance_length": 1.0, "step_ms": 10.0, "speedup": 1.0}
    return {"candidates": [plain, chosen], "verify_step_ms": [10.0] * 8}


def of(cause, run: RunRecord, *others: RunRecord) -> Finding | None:
    return cause(Case.of(run, others))


def names(run: RunRecord, *others: RunRecord) -> list[str]:
    return [finding.cause for finding in diagnose([run, *others])[0].findings]


def test_a_run_that_does_what_was_planned_has_nothing_wrong() -> None:
    run = run_of(
        [request(ACCEPTING, step_s=0.012, ttft_s=0.02)] * 6,
        [request(PLAIN, step_s=0.01, ttft_s=0.02)] * 6,
        plan=planned(),
    )
    (found,) = diagnose([run])
    assert found.findings == ()
    assert found.conclusion == (
        "Nothing wrong: decoding is 2.50× as fast as without speculation, the plan expected 2.50×."
    )
    assert (found.planned_decode_speedup, found.decode_speedup) == (2.5, pytest.approx(2.5))
    assert found.request_speedup == pytest.approx((0.02 + 0.3) / (0.02 + 0.12)), "the prefill is in it"


def test_a_plan_that_expects_no_gain_is_said_so() -> None:
    run = run_of(
        [request([(3, 0, 1)] * 30, step_s=0.01)] * 6,
        [request(PLAIN, step_s=0.01)] * 6,
        plan=planned(speedup=1.0, acceptance_length=1.0),
    )
    assert "The plan itself sees little to gain here." in diagnose([run])[0].conclusion


def test_a_server_that_drafts_nothing() -> None:
    run = run_of([request([(0, 0, 1)] * 20)])
    found = of(validity.speculation_off, run)
    assert found.decisive and "20 verify steps, none with a draft" in found.evidence[0]
    assert names(run)[0] == "speculation-off"
    assert of(validity.speculation_off, run_of([request([(0, 0, 1)] * 19)])) is None, "too few to say"
    assert of(validity.speculation_off, run_of([request([(0, 0, 1)] * 19 + [(3, 0, 1)])])) is None


def test_speculation_off_says_who_turned_it_off() -> None:
    steps = [request([(0, 0, 1)] * 20)]
    scheduled = run_of(steps, concurrency=8, plan={"schedule": {"4": 3, "8": 0}})
    assert "schedule turns it off" in of(validity.speculation_off, scheduled).title
    served = replace(run_of(steps), speculative=TargetFacts("triton grpc", "m", "eagle3", 3))
    assert "server" in of(validity.speculation_off, served).title
    plain = run_of(steps, method="none", draft_length=0, plan={"binding": "batch 8: compute"})
    assert of(validity.speculation_off, plain).evidence[1] == "the plan decided so: batch 8: compute"


def test_a_template_applied_twice_shows_as_one_more_token() -> None:
    ours = [replace(request(ACCEPTING), prompt_tokens=11, prompt_sha256="aa")] * 3
    run = run_of(ours, [request(PLAIN)] * 3)
    found = of(validity.template_mismatch, run)
    assert found.evidence == (
        "3 of 3 prompts have other tokens than on the baseline; q0: 11 against 10; always exactly one token: "
        "a begin-of-text token is there twice, or missing",
    )
    assert of(validity.template_mismatch, run_of([request(ACCEPTING)] * 3, [request(PLAIN)] * 3)) is None
    other = replace(run_of([request(ACCEPTING)] * 3), name="other")
    beside = of(validity.template_mismatch, run_of(ours), other)
    assert "than on other" in beside.evidence[0]
    elsewhere = replace(other, data=DataFacts("here", 3, "another selection"))
    assert of(validity.template_mismatch, run_of(ours), elsewhere) is None


def test_equal_counts_with_another_hash_are_other_tokens_and_hidden_hashes_are_not() -> None:
    def against(sha: str | None) -> Finding | None:
        return of(
            validity.template_mismatch,
            run_of([replace(request(ACCEPTING), prompt_sha256=sha)], [request(PLAIN)]),
        )

    assert against("other") is not None and against(None) is None


def test_other_output_and_lossy_acceptance_come_first() -> None:
    wrong = replace(
        run_of([request(ACCEPTING)] * 3, [request(PLAIN)] * 3),
        lossless=LosslessReport(3, 1, 0, (Difference("q1", 0, 4, 1, 2, "mismatch"),)),
    )
    assert of(validity.output_differs, wrong).evidence == (
        "1 of 3 compared requests differ; first: q1, turn 1, from token 4 on",
    )
    lossy = replace(wrong, lossless=replace(wrong.lossless, acceptance="typical"))
    assert of(validity.output_differs, lossy) is None
    assert "typical" in of(validity.lossy_acceptance, lossy).title
    assert names(lossy)[0] == "lossy-acceptance"
    assert "Until that is settled" in diagnose([wrong])[0].conclusion


def gapped(share: float, *, whole: bool = True) -> RunRecord:
    """One request at a time; the client idles for `share` of every block."""
    run = run_of([request(ACCEPTING)] * 5)
    blocks = tuple(replace(b, speculative_s=b.speculative_s / (1 - share), whole=whole) for b in run.blocks)
    begins = np.cumsum([0.0, *(b.speculative_s for b in blocks)])
    requests = tuple(replace(r, start_s=float(begins[r.block])) for r in run.requests)
    return replace(run, blocks=blocks, requests=requests)


def test_a_client_that_leaves_the_deployment_idle() -> None:
    found = of(validity.client_bound, gapped(0.2))
    assert found.cost == pytest.approx(0.25) and "20.0\u202f%" in found.evidence[0]
    assert of(validity.client_bound, gapped(0.09)) is None
    assert of(validity.client_bound, gapped(0.2, whole=False)) is None, "failed requests are no idle client"


@pytest.mark.parametrize(("workers", "bound"), [(4, False), (2, True)])
def test_a_block_that_drains_is_not_idle_but_empty_places_before_are(workers: int, bound: bool) -> None:
    """Eight conversations over four places; with two workers half the places stay empty all along."""
    one = request(ACCEPTING)
    requests = tuple(
        replace(one, question_id=f"q{i}", start_s=(i // workers) * one.total_s) for i in range(8)
    )
    end = 8 // workers * one.total_s
    run = replace(
        run_of([], concurrency=4),
        requests=requests,
        blocks=(BlockRecord(0, "speculative", True, end, 8 * len(one.token_ids)),),
    )
    assert (of(validity.client_bound, run) is not None) == bound


@pytest.mark.parametrize(("late_s", "bound"), [(0.05, True), (0.01, False)])
def test_a_client_that_falls_behind_the_schedule_of_an_open_loop(late_s: float, bound: bool) -> None:
    """Each request takes 0.3 s from its scheduled arrival on."""
    run = run_of([replace(request(ACCEPTING), late_s=late_s)] * 8)
    found = of(validity.client_bound, replace(run, settings=replace(run.settings, rate_per_s=2.0)))
    assert (found is not None) == bound
    if found:
        assert found.decisive and "16.7\u202f% of request time had passed before" in found.evidence[0]


def test_steps_read_together_are_a_late_client_only_of_a_server() -> None:
    one = request(ACCEPTING)
    together = replace(
        one, steps=tuple(replace(s, at_s=one.steps[i // 2].at_s) for i, s in enumerate(one.steps))
    )
    run = run_of([together] * 3)
    served = replace(run, speculative=replace(run.speculative, transport="triton grpc"))
    assert "arrived together" in of(validity.client_bound, served).evidence[-1]
    assert of(validity.client_bound, run) is None


def test_a_drafter_that_takes_longer_than_its_acceptance_is_worth() -> None:
    """Verifying costs 10 ms and gives 1.5 tokens; with 8 ms of drafting on top, plain decoding is faster."""
    steps = [(3, 0, 1), (3, 1, 2)] * 10
    run = run_of([request(steps, step_s=0.018)] * 6, [request(PLAIN, step_s=0.01)] * 6, plan=planned())
    found = of(cost.drafter_too_slow, run)
    assert found.cost == pytest.approx(0.8)
    assert "about 8.00 ms of drafting (44\u202f%)" in found.evidence[0]
    assert "takes 1.80 to break even" in found.evidence[1]
    assert of(cost.verification_outweighs, run) is None, "with free drafts it would pay"
    lookup = replace(run, speculative=replace(run.speculative, method="ngram"))
    assert of(cost.drafter_too_slow, lookup) is None
    fast = run_of([request(steps, step_s=0.012)] * 6, [request(PLAIN, step_s=0.01)] * 6, plan=planned())
    assert of(cost.drafter_too_slow, fast) is None, "1.25 times as fast: the drafter is worth it"


@pytest.mark.parametrize(
    ("concurrency", "cause"), [(1, "verification-outweighs-acceptance"), (8, "batch-past-crossover")]
)
def test_verification_that_costs_more_than_it_brings(concurrency: int, cause: str) -> None:
    run = run_of(
        [request([(3, 0, 1), (3, 1, 2)] * 10, step_s=0.02)] * 6,
        [request(PLAIN, step_s=0.01)] * 6,
        concurrency=concurrency,
        plan={"crossover_batch": 4},
    )
    found = of(cost.verification_outweighs, run)
    assert found.cause == cause
    assert found.evidence[0] == "a step takes 2.00 plain steps and gives 1.50 tokens"
    assert "draft length 0 is 1.33× as fast: do not speculate here" in found.advice
    assert found.cost == pytest.approx(1 / 3)
    assert ("the plan puts the crossover at batch 4" in found.evidence) == (concurrency == 8)
    calm = run_of([request(ACCEPTING)] * 6, [request(PLAIN)] * 6, name="calm", plan={})
    if concurrency == 8:
        assert "calm at concurrency 1: 3.00× decoding" in of(cost.verification_outweighs, run, calm).evidence


def test_the_plans_crossover_counts_where_steps_were_not_timed() -> None:
    untimed = replace(request([]), token_ids=tuple(range(20)), total_s=0.4)
    plan = {"crossover_batch": 4}
    run = run_of([untimed] * 6, [untimed] * 6, concurrency=4, plan=plan)
    assert of(cost.planned_past_crossover, run).cause == "batch-past-crossover"
    below = run_of([untimed] * 6, [untimed] * 6, concurrency=2, plan=plan)
    assert of(cost.planned_past_crossover, below) is None


def test_requests_that_wait_for_their_first_token() -> None:
    def case(ttft_s: float) -> Finding | None:
        ours = [request(ACCEPTING, step_s=0.012, ttft_s=ttft_s)] * 6
        return of(cost.prefill_dominates, run_of(ours, [request(PLAIN, step_s=0.01, ttft_s=ttft_s)] * 6))

    assert case(0.02) is None
    found = case(0.2)
    assert found.evidence[0] == "decoding 2.50×, whole requests 1.56×"
    assert "62.5\u202f%" in found.evidence[1]


def test_an_eagle_like_head_costs_the_last_block_of_a_reused_prompt():
    assert cost.reusable_prefix(13, 4, drops_block=False) == 12
    assert cost.reusable_prefix(13, 4, drops_block=True) == 8
    assert cost.reusable_prefix(11292, 2144, drops_block=True) == 8576
    assert cost.reusable_prefix(2 * 2144, 2144, drops_block=True) == 0, (
        "one token less than two blocks and one"
    )


def test_prompts_that_are_computed_again_with_speculation_are_found():
    def found(
        ours: Sequence[int | None], theirs: Sequence[int | None], prompt_tokens: int = 13
    ) -> Finding | None:
        def sent(cached: int | None) -> RequestRecord:
            return replace(request(PLAIN), prompt_tokens=prompt_tokens, cached_tokens=cached)

        return of(cost.prefix_reuse_lost, run_of([sent(n) for n in ours], [sent(n) for n in theirs]))

    lost = found([0, 8, 8], [0, 12, 12])
    assert lost is not None and lost.cause == "prefix-reuse-lost"
    (said,) = lost.evidence
    assert said.startswith("41.0\u202f% of prompt tokens") and "61.5\u202f% without" in said
    short = found([0, 0], [0, 2144], prompt_tokens=4000)
    assert (
        short is not None and "2 of 2 prompts are shorter than two blocks of 2144 tokens" in short.evidence[1]
    )
    assert found([0, 12], [0, 12]) is None
    assert found([None, None], [0, 12]) is None, "a target that does not say proves nothing"


def test_acceptance_below_the_plans_names_where_the_plan_had_it_from() -> None:
    plan = {**planned(), "acceptance": {"source": "published: another model"}}
    poor = run_of([request([(3, 1, 2)] * 10, step_s=0.012)] * 6, [request(PLAIN, step_s=0.01)] * 6, plan=plan)
    found = of(acceptance.below_plan, poor)
    assert found.evidence == (
        "acceptance length 2.00, planned 3.00",
        "the plan's acceptance is published: another model",
    )
    assert found.cost == pytest.approx(0.5)
    assert (
        "Main cause: Drafts are accepted less often than the plan assumed." in diagnose([poor])[0].conclusion
    )
    assert "plan again" in found.advice
    own = {**plan, "acceptance": {"source": "measured when it was trained", "kind": "trained"}}
    assert "training.start" in of(acceptance.below_plan, replace(poor, plan=own)).advice
    near = run_of([request([(3, 2, 3)] * 8 + [(3, 1, 2)] * 2)], plan=plan)  # 2.8 of 3
    assert of(acceptance.below_plan, near) is None


def test_a_lookup_that_finds_nothing_most_of_the_time() -> None:
    run = run_of([request([(0, 0, 1)] * 15 + [(3, 3, 4)] * 5)], method="ngram")
    found = of(acceptance.rarely_drafts, run)
    assert found.evidence == (
        "5 of 20 steps had a draft (25.0\u202f%)",
        "acceptance length 4.00 in those, 1.75 over all",
    )
    assert "lookups" in found.advice
    assert of(acceptance.rarely_drafts, run_of([request([(0, 0, 1)] * 10 + [(3, 3, 4)] * 10)])) is None


def test_a_head_that_does_not_reach_as_far_as_it_drafts() -> None:
    """80 % at position 1, then 50 %, then hardly any: a draft of two would do."""
    steps = [(3, 0, 1)] * 20 + [(3, 1, 2)] * 40 + [(3, 2, 3)] * 38 + [(3, 3, 4)] * 2
    found = of(acceptance.falls_with_position, run_of([request(steps)] * 2))
    assert found.evidence[0] == "accepted given those before: 80\u202f% 50\u202f% 5\u202f%"
    assert "2.0\u202f% of the drafts survive to position 3" in found.evidence[1]
    assert of(acceptance.falls_with_position, run_of([request(steps[::20])])) is None, "too few to be sure"
    even = [(3, 0, 1)] * 20 + [(3, 1, 2)] * 16 + [(3, 2, 3)] * 13 + [(3, 3, 4)] * 51
    assert of(acceptance.falls_with_position, run_of([request(even)] * 2)) is None
    tree = run_of([request(steps)] * 2, tree_depth=3)
    assert of(acceptance.falls_with_position, tree) is None


def test_the_better_draft_length_is_computed_from_the_runs_own_steps() -> None:
    """Drafts of one and of three were timed: position 1 is worth its 10 ms, positions 2 and 3 not their 20."""
    short, long = request([(1, 1, 2)] * 20, step_s=0.01), request([(3, 1, 2)] * 20, step_s=0.03)
    run = run_of([short, long], [request(PLAIN, step_s=0.009)] * 2)
    length, gain = acceptance.best_draft_length(Case.of(run))
    assert length == 1 and gain == pytest.approx(3.0)
    assert acceptance.best_draft_length(Case.of(run_of([request([(0, 0, 1)] * 20), long]))) is None


def contexts(far: float, *, per_category: bool = False) -> RunRecord:
    """Two requests of 100 one-token drafts: near contexts accept 80 %, far ones `far`."""

    def one(rate: float, prompt: int, category: str) -> RequestRecord:
        hits = round(100 * rate)
        steps = [(1, 1, 2)] * hits + [(1, 0, 1)] * (100 - hits)
        return replace(request(steps, category=category), prompt_tokens=prompt)

    return run_of(
        [one(0.8, 100, "chat"), one(far, 5000, "books" if per_category else "chat")], draft_length=1
    )


def test_acceptance_that_falls_as_the_context_grows() -> None:
    found = of(acceptance.falls_with_context, contexts(0.5))
    assert "80.0\u202f%" in found.evidence[0] and "50.0\u202f%" in found.evidence[0]
    assert of(acceptance.falls_with_context, contexts(0.72)) is None


def test_a_hard_category_with_long_prompts_is_not_a_long_context() -> None:
    run = contexts(0.4, per_category=True)
    # within each category accepted and refused steps are shuffled, so context says nothing
    rng = np.random.default_rng(3)
    shuffled = tuple(
        replace(
            r,
            steps=tuple(
                replace(r.steps[i], at_s=r.steps[k].at_s) for k, i in enumerate(rng.permutation(100))
            ),
        )
        for r in run.requests
    )
    assert of(acceptance.falls_with_context, replace(run, requests=shuffled)) is None


def test_quantization_loss_shows_beside_an_unquantized_run() -> None:
    poor, good = [request([(3, 1, 2)] * 10)] * 6, [request(ACCEPTING)] * 6
    quantized = run_of(poor, weights="210 projections: 209 8-bit, 1 float32")
    whole = run_of(good, name="float", weights="210 projections: 210 bfloat16")
    found = of(acceptance.quantization_loss, quantized, whole)
    assert found.cost == pytest.approx(0.5) and "that of float" in found.evidence[0]
    assert of(acceptance.quantization_loss, quantized) is None
    assert of(acceptance.quantization_loss, whole, quantized) is None
    longer = replace(whole, speculative=replace(whole.speculative, draft_length=5))
    assert of(acceptance.quantization_loss, quantized, longer) is None
    assert of(acceptance.quantization_loss, quantized, replace(quantized, name="same")) is None
    assert acceptance.quantized(run_of(poor)) is None, "of a server nothing is known"


def test_temperature_costs_acceptance() -> None:
    warm = run_of([request([(3, 1, 2)] * 10)] * 6, temperature=0.8)
    cold = run_of([request(ACCEPTING)] * 6, name="greedy")
    assert "greedy at temperature 0" in of(acceptance.sampling_temperature, warm, cold).evidence[0]
    assert of(acceptance.sampling_temperature, warm) is None
    assert of(acceptance.sampling_temperature, cold, warm) is None

    def beside_plan(source: str) -> list[str]:
        return names(replace(warm, plan={**planned(), "acceptance": {"source": source}}))

    assert beside_plan("published: chain, T = 0: 621 steps")[0] == "sampling-temperature"
    assert beside_plan("published: chain, T = 0.8")[0] == "acceptance-below-plan"


def test_a_busy_machine_is_told_from_a_slow_deployment() -> None:
    def run(plain_s: float) -> RunRecord:
        ours = [request(ACCEPTING, step_s=1.2 * plain_s)] * 6
        return run_of(ours, [request(PLAIN, step_s=plain_s)] * 6, plan=planned())

    slow = run(0.02)
    assert "2.00× its planned time" in of(validity.machine_slower, slow).title
    assert diagnose([slow])[0].conclusion.startswith("Nothing wrong:")
    assert of(validity.machine_slower, run(0.0125)) is None


def test_causes_come_in_order_of_importance() -> None:
    """What makes the numbers mean something else first, then the costlier cause before the cheaper."""
    steps = [(0, 0, 1)] * 24 + [(3, 0, 1), (3, 2, 3)] * 4
    run = run_of(
        [request(steps, step_s=0.018)] * 6,
        [replace(request(PLAIN, step_s=0.01), prompt_tokens=9)] * 6,
        plan=planned(),
    )
    (found,) = diagnose([run])
    assert [f.decisive for f in found.findings] == sorted((f.decisive for f in found.findings), reverse=True)
    costs = [f.cost for f in found.findings if not f.decisive]
    assert len(costs) >= 2 and costs == sorted(costs, reverse=True)
    assert found.findings[0].cause == "template-mismatch"


def test_the_command_says_it_in_text_in_json_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = run_of(
        [request([(3, 0, 1), (3, 1, 2)] * 10, step_s=0.018)] * 6,
        [request(PLAIN, step_s=0.01)] * 6,
        plan=planned(),
    )
    run.write(tmp_path)
    assert main(["report", str(tmp_path), "--diagnose"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The drafter is too slow for what is accepted of its drafts." in text
    assert "Speed-up of decoding alone, which is what a plan predicts: 0.83× (planned 2.50×)." in text
    assert main(["report", str(tmp_path), "--diagnose", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["result"]["diagnosis"]
    assert "drafter-too-slow" in [f["cause"] for f in found["findings"]]
    assert found["planned_decode_speedup"] == 2.5 and found["decode_speedup"] == pytest.approx(
        0.8333, abs=1e-3
    )
    seen = Page((tmp_path / "report.html").read_text()).seen
    assert "The drafter is too slow for what is accepted of its drafts." in seen
    assert main(["report", str(tmp_path)]) == 0
    assert "Diagnosis" not in capsys.readouterr().out


def test_the_page_tells_the_runs_apart() -> None:
    runs = [run_of([request(ACCEPTING)] * 3, [request(PLAIN)] * 3, name=name) for name in ("one", "two")]
    seen = Page(render_html(runs)).seen
    assert seen.count("one, D=3") >= 2 and any("there is no plan of this load" in text for text in seen)
