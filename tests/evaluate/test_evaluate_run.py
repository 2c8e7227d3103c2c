"""A run serves both arms alike, follows the model's own answers, survives failures and says what it checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluate.conftest import FakeTarget, token_sequence
from trtspec.errors import ConfigError, StageFailed
from trtspec.evaluate.data import Prompt, PromptSet
from trtspec.evaluate.record import RunRecord, RunSettings
from trtspec.evaluate.run import EvalRequest, evaluate
from trtspec.evaluate.targets import Message
from trtspec.events import Note, Progress, StageFinished, StageStarted, silent
from trtspec.plan.measured import read_measured

SETTINGS = RunSettings(output_length=9, warmup=1)


def run_request(
    prompts: tuple[Prompt, ...],
    target: FakeTarget,
    baseline: FakeTarget | None,
    settings: RunSettings = SETTINGS,
) -> EvalRequest:
    return EvalRequest(
        "test", target, baseline, PromptSet("here", prompts, ()), prompts, settings, command="trtspec eval x"
    )


def test_a_run_gives_the_stable_fields(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target = FakeTarget(accepted=(2, 0, 3), seconds_per_step=0.001)
    record = evaluate(run_request(prompts, target, FakeTarget(seconds_per_step=0.001)), tmp_path, silent)
    summary = record.summary()
    # 9 tokens: the prefill token, then 3 + 1 + 4.
    assert summary["acceptance_length"]["token_weighted"] == pytest.approx(8 / 3)
    assert summary["acceptance_length"]["per_request"] == pytest.approx(8 / 3)
    assert set(summary["acceptance_length"]["by_category"]) == {"coding", "math", "writing"}
    assert summary["by_category"]["math"]["ttft_ms"]["count"] == 2
    (bucket,) = summary["by_context"].items()
    assert bucket[0] == "1–256" and bucket[1]["acceptance_length"]["token_weighted"] == pytest.approx(8 / 3)
    assert bucket[1]["speedup"] == summary["request_speedup"]
    assert summary["draft_acceptance_rate"] == pytest.approx(5 / 9)
    assert summary["conditional_acceptance"] == pytest.approx([2 / 3, 1.0, 0.5])
    assert summary["lossless"] == {
        "checked": 7, "mismatches": 0, "near_ties": 0, "not_checked": None, "acceptance": "exact",
    }  # fmt: skip
    assert summary["requests"] == 7 and summary["errors"] == 0
    assert summary["tokens_per_s"] > 0 and summary["baseline_tokens_per_s"] > 0
    ratio = summary["tokens_per_s"] / summary["baseline_tokens_per_s"]
    assert summary["speedup"] == pytest.approx(ratio)  # every block was whole


def test_the_next_turn_follows_the_models_own_answer(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target = FakeTarget(accepted=(1,))
    evaluate(run_request((replace(prompts[5], system="Be brief."),), target, None), tmp_path, silent)
    _, first, second = (messages for _, messages, _ in target.calls)  # the warm-up comes before them
    assert first == (Message("system", "Be brief."), Message("user", "first part"))
    answer = " ".join(map(str, token_sequence(first, 9)))
    assert second == (*first, Message("assistant", answer), Message("user", "second part"))


def test_the_arms_take_turns_and_the_first_one_alternates(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    record = evaluate(run_request(prompts, FakeTarget(accepted=(1,)), FakeTarget()), tmp_path, silent)
    assert [b.first for b in record.blocks] == ["speculative", "baseline"] * 3
    order = [(r.arm[0], r.question_id) for r in record.requests]
    assert order[:6] == [("s", "q0"), ("b", "q0"), ("b", "q1"), ("s", "q1"), ("s", "q2"), ("b", "q2")]


def test_the_clock_of_an_arm_stands_still_while_the_other_is_served(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    fast, slow = FakeTarget(accepted=(3,)), FakeTarget(seconds_per_step=0.01)
    record = evaluate(run_request(prompts, fast, slow), tmp_path, silent)
    assert record.of("speculative")[-1].start_s < 0.08
    assert record.of("baseline")[-1].start_s > 0.3


def test_concurrency_is_kept_and_not_exceeded(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target = FakeTarget(accepted=(1,), seconds_per_step=0.005)
    record = evaluate(
        run_request(prompts, target, FakeTarget(), replace(SETTINGS, concurrency=3)), tmp_path, silent
    )
    assert target.most_in_flight == 3
    assert len(record.blocks) == 1 and record.lossless.passed


def test_seeds_depend_on_the_question_not_on_the_order(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    def seeds(chosen: tuple[Prompt, ...]) -> dict[str, int]:
        record = evaluate(run_request(chosen, FakeTarget(accepted=(1,)), None), tmp_path, silent)
        return {f"{r.question_id}/{r.turn}": r.seed for r in record.requests}

    assert seeds(prompts) == seeds(prompts[::-1])
    assert len(set(seeds(prompts).values())) == 7


def test_a_wrong_token_is_a_mismatch(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    events = []
    target = FakeTarget(accepted=(1,), wrong={"math question 2": 4})
    record = evaluate(run_request(prompts, target, FakeTarget()), tmp_path, events.append)
    (difference,) = record.lossless.differences
    assert (difference.question_id, difference.position, difference.verdict) == ("q2", 4, "mismatch")
    assert record.lossless.mismatches == 1 and not record.lossless.passed
    assert any(isinstance(e, Note) and "not lossless" in e.text for e in events)


def test_after_a_difference_later_turns_are_not_compared(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target = FakeTarget(accepted=(1,), wrong={"first part": 0})
    report = evaluate(run_request(prompts[5:], target, FakeTarget()), tmp_path, silent).lossless
    assert (report.checked, report.mismatches) == (1, 1)
    assert report.not_checked is not None


def test_a_failed_request_is_recorded_and_the_run_goes_on(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    target = FakeTarget(accepted=(1,), refuses=["coding question 1"])
    record = evaluate(run_request(prompts, target, FakeTarget()), tmp_path, silent)
    (failure,) = record.failures
    assert (failure.question_id, failure.arm) == ("q1", "speculative")
    assert "does not fit" in failure.message
    assert [b.whole for b in record.blocks] == [True, False, True, True, True, True]
    assert record.summary()["errors"] == 1 and record.lossless.checked == 6


def test_a_target_that_answers_nothing_fails_the_stage(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    texts = [turn for prompt in prompts for turn in prompt.turns]
    with pytest.raises(StageFailed, match="requests failed"):
        evaluate(run_request(prompts, FakeTarget(accepted=(1,), refuses=texts), None), tmp_path, silent)
    warm_up = FakeTarget(accepted=(1,), refuses=["Count from one to twenty, then back to one."])
    with pytest.raises(StageFailed, match="does not answer"):
        evaluate(run_request(prompts, warm_up, None), tmp_path, silent)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("exact", "seed_identical", "checked"), [(True, True, 7), (False, True, 0), (True, False, 0)]
)
def test_sampled_output_is_compared_only_where_it_must_be_equal(
    prompts: tuple[Prompt, ...], tmp_path: Path, exact: bool, seed_identical: bool, checked: int
) -> None:
    target = FakeTarget(accepted=(1,), exact=exact, seed_identical=seed_identical)
    settings = replace(SETTINGS, temperature=0.8)
    report = evaluate(run_request(prompts, target, FakeTarget(), settings), tmp_path, silent).lossless
    assert report.checked == checked
    assert (report.not_checked is None) == bool(checked)
    assert target.calls[-1][2].temperature == 0.8


def test_without_a_baseline_nothing_is_claimed(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    record = evaluate(run_request(prompts, FakeTarget(accepted=(1,)), None), tmp_path, silent)
    summary = record.summary()
    assert summary["speedup"] is None and summary["baseline_tokens_per_s"] is None
    assert summary["lossless"]["checked"] == 0 and not record.lossless.passed
    assert "no baseline" in summary["lossless"]["not_checked"]


def test_repeated_prompts_are_called_what_they_are(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    events = []
    twice = (*prompts, replace(prompts[0], question_id="again"))
    evaluate(run_request(twice, FakeTarget(accepted=(1,)), FakeTarget()), tmp_path, events.append)
    assert next(e.text for e in events if isinstance(e, Note)).startswith("1 of the prompts repeat another")


def test_an_interrupt_starts_nothing_more_and_calls_what_it_has_incomplete(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    target = FakeTarget(accepted=(1,), seconds_per_step=0.02)

    def interrupt(event: object) -> None:
        if isinstance(event, Progress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(run_request(prompts, target, None, replace(SETTINGS, concurrency=2)), tmp_path, interrupt)
    assert len(target.calls) <= 1 + 4 and not RunRecord.read(tmp_path).complete


def test_events_tell_the_progress(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    events = []
    evaluate(run_request(prompts, FakeTarget(accepted=(1,)), FakeTarget()), tmp_path, events.append)
    progress = [e for e in events if isinstance(e, Progress)]
    assert [e.done for e in progress] == list(range(1, 15)) and {e.total for e in progress} == {14}
    assert isinstance(events[0], StageStarted) and isinstance(events[-1], StageFinished)
    assert "0 mismatches in 7" in events[-1].summary


def test_the_record_survives_writing_and_reading(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target = FakeTarget(accepted=(2, 0, 3), wrong={"math question 2": 4}, refuses=["coding question 1"])
    record = evaluate(run_request(prompts, target, FakeTarget(seconds_per_step=0.001)), tmp_path, silent)
    read = RunRecord.read(tmp_path)
    assert replace(read, requests=()) == replace(record, requests=())
    for ours, theirs in zip(read.requests, record.requests, strict=True):
        assert replace(ours, steps=(), start_s=0, ttft_s=0, total_s=0) == replace(
            theirs, steps=(), start_s=0, ttft_s=0, total_s=0
        )
        assert [(s.drafted, s.accepted, s.emitted) for s in ours.steps] == [
            (s.drafted, s.accepted, s.emitted) for s in theirs.steps
        ]
        assert [s.at_s for s in ours.steps] == pytest.approx([s.at_s for s in theirs.steps], abs=1e-6)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["schema"] == "trtspec.run/1"
    assert content["summary"]["conditional_acceptance"] == read.summary()["conditional_acceptance"]
    assert set(content["requests"][0]["steps"][0]) == {"drafted", "accepted", "emitted", "at_s"}


def test_the_measured_profile_is_what_a_planner_needs(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target, baseline = (
        FakeTarget(accepted=(2, 0, 3), seconds_per_step=0.004),
        FakeTarget(seconds_per_step=0.002),
    )
    evaluate(run_request(prompts, target, baseline), tmp_path, silent)
    measured = json.loads((tmp_path / "run.json").read_text())["measured"]
    assert measured["conditional_acceptance"] == pytest.approx([2 / 3, 1.0, 0.5])
    assert measured["judged"] == [21, 14, 14]
    assert measured["proposed"] == 1.0 and measured["runs"] == [[0, 7], [2, 7], [3, 7]]
    assert list(measured["step_ms_by_rows"]) == ["4"]
    assert measured["step_ms_by_rows"]["4"]["p50"] == pytest.approx(4.2, abs=2)
    assert measured["baseline_step_ms"]["count"] == 7 * 8
    assert measured["concurrency"] == 1


def test_the_planner_reads_the_record(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    target, baseline = (
        FakeTarget(accepted=(2, 0, 3), seconds_per_step=0.002),
        FakeTarget(seconds_per_step=0.001),
    )
    evaluate(run_request(prompts, target, baseline), tmp_path, silent)
    measured = read_measured(tmp_path)
    assert (measured.method, measured.draft_length, measured.temperature) == ("ngram", 3, 0.0)
    assert measured.curve.acceptance_length(3) == pytest.approx(8 / 3)
    assert measured.steps is not None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": "trtspec.run/1"}', '{"schema": "other/9"}'])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        RunRecord.read(tmp_path)
    assert refused.value.where.endswith("run.json")


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run record"):
        RunRecord.read(tmp_path)
