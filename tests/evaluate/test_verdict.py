"""A report decides: ship, ship up to a load, or do not; and says what decided, over all loads of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.evaluate.conftest import request
from tests.evaluate.test_diagnose import PLAIN, run_of
from tests.evaluate.test_report import Page
from trtspec.evaluate.lossless import LosslessReport
from trtspec.evaluate.record import BlockRecord, Failure, RunRecord
from trtspec.evaluate.report import render_html, render_terminal
from trtspec.evaluate.report.groups import deployments, detailed, run_labels
from trtspec.evaluate.report.sweeps import context_rows, difference_rows, load_rows
from trtspec.evaluate.report.verdict import Verdict, verdicts_of

ACCEPTED = [(3, 2, 3)] * 10  # as many tokens as PLAIN in a third of the steps


def run_at(
    concurrency: int = 1,
    gain: float | Mapping[str, float] = 1.5,
    *,
    pairs: int = 8,
    prompt_tokens: int = 10,
    name: str = "build",
    draft_length: int = 3,
    rate_per_s: float | None = None,
    data: str = "here",
    **changes: object,
) -> RunRecord:
    """A run that is `gain` times as fast as its baseline, up to 1 % from pair to pair. gain: one, or by category."""
    gains = gain if isinstance(gain, Mapping) else {"coding": gain}
    ours, plain = [], []
    for category, factor in gains.items():
        for i in range(pairs):
            jitter = 1 + 0.01 * (i % 3 - 1)
            same = {"category": category, "ttft_s": 0.0}
            plain.append(request(PLAIN, step_s=0.01, **same))
            ours.append(request(ACCEPTED, step_s=0.03 / factor * jitter, **same))
    ours, plain = ([replace(r, prompt_tokens=prompt_tokens) for r in arm] for arm in (ours, plain))
    run = run_of(ours, plain, name=name, concurrency=concurrency, draft_length=draft_length)
    blocks = tuple(
        BlockRecord(i, "speculative", True, a.total_s, len(a.token_ids), b.total_s, len(b.token_ids))
        for i, (a, b) in enumerate(zip(ours, plain))
    )
    settings = replace(run.settings, rate_per_s=rate_per_s)
    made = replace(run, blocks=blocks, settings=settings, data=replace(run.data, name=data))
    return replace(made, **changes)


def verdict(*runs: RunRecord) -> Verdict:
    (found,) = verdicts_of(runs)
    return found


def test_what_is_faster_at_every_load_ships() -> None:
    found = verdict(run_at(4, 1.3), run_at(1, 1.5))
    assert found.decision == "ship" and found.headline == "Ship." and found.limit is None
    assert [reason.partition(":")[0] for reason in found.reasons[:2]] == [
        "At concurrency 1",
        "At concurrency 4",
    ]
    assert "1.50×" in found.reasons[0]


def test_past_the_load_where_it_stops_paying_there_is_a_limit() -> None:
    found = verdict(run_at(1, 1.5), run_at(4, 1.2), run_at(8, 1.0), run_at(16, 0.8))
    assert found.decision == "ship with a batch limit" and found.batch_limit == 4
    assert found.headline == "Ship with a batch limit: concurrency 4."
    assert "no certain effect" in found.reasons[2] and "slower" in found.reasons[3]


def test_a_gain_above_a_load_that_does_not_pay_is_no_reason_to_ship() -> None:
    assert verdict(run_at(1, 0.9), run_at(8, 1.4)).decision == "do not ship"
    assert verdict(run_at(1, 1.4), run_at(4, 0.9), run_at(8, 1.4)).batch_limit == 1


def test_an_open_loop_has_its_own_limit() -> None:
    found = verdict(run_at(1, 1.5, rate_per_s=0.5), run_at(1, 0.8, rate_per_s=2.0))
    assert found.decision == "ship with a batch limit" and found.batch_limit is None
    assert found.headline == "Ship up to 0.5 conversations per second, Poisson arrivals."
    both = verdicts_of([run_at(1, 1.5, rate_per_s=0.5), run_at(1, 0.8)])
    assert [(v.deployment, v.decision) for v in both] == [
        ("build, D=3, open loop", "ship"),
        ("build, D=3, closed loop", "do not ship"),
    ]


@pytest.mark.parametrize(
    ("changes", "decision", "words"),
    [
        ({"lossless": LosslessReport(8, 1, 0)}, "do not ship", "1 of 8 requests gave other output"),
        ({"lossless": LosslessReport(8, 8, 0, acceptance="typical")}, "ship", "Lossy by choice"),
        (
            {"failures": (Failure("speculative", "q0", "coding", 0, "no slot"),)},
            "do not ship",
            "failed though the baseline answered them: 1",
        ),
        ({"failures": (Failure("speculative", "q99", "coding", 0, "too long"),)}, "ship", "At concurrency 1"),
        ({"complete": False}, "no verdict", "Interrupted: partial results of 8 finished requests"),
        ({"baseline": None, "blocks": ()}, "no verdict", "no baseline was measured"),
    ],
)  # fmt: skip
def test_speed_alone_is_not_enough(changes: dict, decision: str, words: str) -> None:
    found = verdict(run_at(1, 1.5, **changes))
    assert found.decision == decision and any(words in reason for reason in found.reasons)


def test_what_is_not_known_well_enough_is_no_verdict() -> None:
    found = verdict(run_at(1, 1.5, pairs=3))
    assert found.decision == "no verdict" and "Pairs with the baseline: 3, too few" in found.reasons[0]
    found = verdict(run_at(1, {"coding": 2.0, "math": 0.7}))
    assert found.decision == "no verdict" and "more prompts narrow its interval" in found.reasons[0]
    assert verdict(run_at(1, 1.0)).decision == "do not ship", "surely no gain"


def test_prompts_that_say_nothing_of_others_give_no_verdict() -> None:
    run = run_at(1, 1.5)
    found = verdict(replace(run, data=replace(run.data, caution="random tokens are not acceptance data")))
    assert found.decision == "no verdict" and found.reasons[0] == "random tokens are not acceptance data."


def test_prompts_that_were_sent_as_other_tokens_give_no_verdict() -> None:
    run = run_at(1, 1.5)
    twice = tuple(replace(r, prompt_tokens=11) if r.arm == "baseline" else r for r in run.requests)
    assert verdict(replace(run, requests=twice)).decision == "no verdict"


def test_a_category_that_loses_is_named() -> None:
    found = verdict(run_at(1, {"coding": 3.0, "math": 0.9}, pairs=16))
    assert found.decision == "ship"
    (reason,) = [reason for reason in found.reasons if "Loses" in reason]
    assert reason.startswith("Loses in math: 0.90× (0.")


def test_one_load_says_that_it_is_one() -> None:
    (reason,) = [r for r in verdict(run_at(plan={"crossover_batch": 8})).reasons if "No other load" in r]
    assert "sees no gain from batch 8 on" in reason


def test_data_sets_of_one_load_are_judged_together() -> None:
    found = verdict(run_at(1, 2.0, data="short"), run_at(1, 1.2, data="long", prompt_tokens=3000))
    assert found.decision == "ship" and sum("At concurrency" in reason for reason in found.reasons) == 1
    assert "1.50×" in found.reasons[0], "2 / (1 / 2.0 + 1 / 1.2)"


def test_runs_are_told_apart_by_what_differs() -> None:
    runs = [run_at(1), run_at(4), run_at(4, data="other"), run_at(1, draft_length=5), run_at(4)]
    assert run_labels(runs) == [
        "build, D=3, concurrency 1, here",
        "build, D=3, concurrency 4, here (1)",
        "build, D=3, concurrency 4, other",
        "build, D=5",
        "build, D=3, concurrency 4, here (2)",
    ]
    assert [(d.label, len(d.loads)) for d in deployments(runs)] == [("build, D=3", 2), ("build, D=5", 1)]


def test_a_large_sweep_is_described_by_one_run_of_each_deployment() -> None:
    few = [run_at(c) for c in (1, 4)]
    many = [run_at(c, draft_length=d) for d in (2, 4) for c in (8, 4, 2, 1)]
    eight = [run_at(1, name=f"build-{i}") for i in range(8)]
    assert detailed(few) == few and detailed(eight) == eight
    assert [(r.speculative.draft_length, r.settings.concurrency) for r in detailed(many)] == [(2, 1), (4, 1)]


def test_a_sweep_shows_its_speed_up_by_load() -> None:
    runs = [run_at(c, gain, draft_length=d) for d in (2, 4) for c, gain in ((1, 1.6), (4, 1.2), (16, 0.9))]
    two, four = deployments(runs)
    assert [row[0] for row in load_rows(two)] == ["concurrency 1", "concurrency 4", "concurrency 16"]
    assert [row[-2] for row in load_rows(four)] == ["1.60×", "1.20×", "0.90×"]
    page = Page(render_html(runs))
    assert (
        "Speed-up by load" in page.seen and "build, D=2: Ship with a batch limit: concurrency 4." in page.seen
    )
    (image,) = [label for label in page.images if label.startswith("Speed-up by load")]
    assert "build, D=4: concurrency 1 1.60×, concurrency 4 1.20×, concurrency 16 0.90×" in image
    text = render_terminal(runs, width=100)
    assert "build, D=4: speed-up by load" in text and "Ship with a batch limit: concurrency 4." in text
    assert load_rows(deployments(runs[:1])[0]) == [] and "Speed-up by load" not in render_html(runs[:1])


def test_a_sweep_shows_its_speed_up_by_context_length() -> None:
    sizes = ((8000, 1.1), (100, 1.8), (1000, 1.5))
    runs = [
        run_at(c, gain / c**0.25, prompt_tokens=tokens, data=f"throughput_{tokens}")
        for tokens, gain in sizes
        for c in (1, 4)
    ]
    (found,) = deployments(runs)
    rows = context_rows(found)
    assert [row[:2] for row in rows] == [
        [bucket, f"concurrency {c}"] for bucket in ("1–256", "513–1024", "4097–8192") for c in (1, 4)
    ]
    assert [row[-2] for row in rows[::2]] == ["1.80×", "1.50×", "1.10×"]
    page = Page(render_html(runs))
    (image,) = [label for label in page.images if label.startswith("Speed-up by context length")]
    assert "build, D=3, concurrency 1: 1–256 1.80×, 513–1024 1.50×, 4097–8192 1.10×" in image
    assert "acceptance and speed-up by context length" in render_terminal(runs, width=100)
    assert context_rows(deployments(runs[:1])[0]) == []


def test_what_differs_between_runs_is_listed_and_nothing_else() -> None:
    one = run_at(1, config="name: a\nengine:\n  threads: 2\n  max_batch_size: 8\nlossless: true\n")
    two = replace(run_at(4), config="name: a\nengine:\n  threads: 4\n  max_batch_size: 8\n")
    assert difference_rows([one, two]) == [
        ["Load", "concurrency 1, 1 warm-up requests per arm", "concurrency 4, 1 warm-up requests per arm"],
        ["engine.threads", "2", "4"],
        ["lossless", "true", "–"],
    ]
    assert difference_rows([one, one]) == []
    seen = Page(render_html([one, two])).seen
    assert "What differs between the runs" in seen and "engine.threads" in seen


def test_prompts_a_time_limit_left_unsent_are_named_in_page_and_terminal() -> None:
    run = run_at()
    limited = replace(run, unsent_prompts=5, data=replace(run.data, prompts=13))
    said = "The time limit left 5 of 13 prompts unsent."
    assert said in verdict(limited).reasons
    assert said in " ".join(render_terminal([limited], width=200).split())
    assert said in render_html([limited])
    assert not any("unsent" in reason for reason in verdict(run).reasons)
    at_two = verdict(run, replace(run_at(4), unsent_prompts=2))
    assert [r for r in at_two.reasons if "unsent" in r] == [
        f"The time limit left 2 of {run.data.prompts} prompts unsent at concurrency 4."
    ]
