"""An open loop sends on time whatever is in flight, and counts every wait from when a request was due."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.evaluate.conftest import FakeTarget
from tests.evaluate.openai_stub import OpenAIStub
from tests.evaluate.test_evaluate_run import SETTINGS, run_request
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.evaluate import arms
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.load import arrivals, in_blocks
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report import render_html, render_terminal
from trtspec.evaluate.run import evaluate
from trtspec.evaluate.summary import planned_point
from trtspec.events import Note, silent
from trtspec.plan.measured import read_measured

OPEN = replace(SETTINGS, rate_per_s=200.0)


def test_arrivals_are_poisson_and_those_of_fewer_prompts_come_first() -> None:
    due = arrivals(4000, 5.0, seed=3)
    assert due[:100] == arrivals(100, 5.0, seed=3) and due != arrivals(4000, 5.0, seed=4)
    gaps = np.diff([0.0, *due])
    assert stats.kstest(gaps, "expon", args=(0, 1 / 5.0)).pvalue > 0.01
    counts = np.bincount(np.asarray(due, dtype=int))[:-1]
    assert counts.mean() == pytest.approx(5, rel=0.1) and counts.var() == pytest.approx(5, rel=0.25)


def test_conversations_begin_when_they_are_due_and_none_waits_for_another(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """All six are in flight together although one place is all that a closed loop of the same settings has."""
    target, plain = FakeTarget(accepted=(3,), seconds_per_step=0.1), FakeTarget(seconds_per_step=0.02)
    record = evaluate(run_request(prompts, target, plain, OPEN), tmp_path, silent)
    assert target.most_in_flight == 6 and len(record.blocks) == 1
    due = arrivals(6, 200.0, OPEN.seed)
    for arm in ("speculative", "baseline"):
        first = {r.question_id: r for r in record.of(arm) if r.turn == 0}
        assert [first[p.question_id].start_s for p in prompts] == pytest.approx(due), "both arms get the same"
        assert all(r.late_s is not None and 0 <= r.late_s < 0.05 for r in first.values())
        one, two = sorted((r for r in record.of(arm) if r.question_id == "q5"), key=lambda r: r.turn)
        assert two.start_s >= one.start_s + one.total_s and two.late_s is None
    summary = record.summary()
    assert summary["requests_in_flight"] > 2
    assert summary["latency"]["speculative"]["send_delay_ms"]["count"] == 6
    assert record.lossless.passed and record.complete


def test_a_client_that_is_late_makes_no_latency_better(
    prompts: tuple[Prompt, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request was due half a second before it could be sent: that is part of all of its times."""
    monkeypatch.setattr(arms, "arrivals", lambda count, rate, seed: [-0.5] * count)
    target = FakeTarget(accepted=(1,), seconds_per_step=0.002)
    record = evaluate(run_request(prompts[:5], target, None, OPEN), tmp_path, silent)
    for request in record.requests:
        assert request.start_s == pytest.approx(-0.5) and request.late_s > 0.5
        assert request.ttft_s > 0.5 and request.total_s > request.ttft_s
        assert request.steps[0].at_s > request.ttft_s, "steps are moved too"
    latency = record.summary()["latency"]["speculative"]
    assert latency["ttft_ms"]["min"] > 500 and latency["inter_token_latency_ms"]["max"] < 100


def test_throughput_is_what_arrives_so_the_speed_up_is_that_of_requests(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    many = tuple(replace(p, question_id=f"{p.question_id}-{i}") for i in range(2) for p in prompts)
    target, plain = FakeTarget(accepted=(3,), seconds_per_step=0.01), FakeTarget(seconds_per_step=0.01)
    record = evaluate(run_request(many, target, plain, OPEN), tmp_path, silent)
    summary = record.summary()
    assert summary["speedup"] == summary["request_speedup"]["value"] > 2
    assert summary["speedup_interval"]["pairs"] == 14
    page = render_html([record])
    assert "200 conversations per second, Poisson arrivals" in page and render_terminal([record])
    assert planned_point(record, {"candidates": [{"draft_length": 3}]}) is None, "of which batch size?"
    assert summary["complete"] and record.measured()["concurrency"] is None
    assert read_measured(tmp_path).steps is None and read_measured(tmp_path).curve is not None


def test_an_interrupt_ends_the_sending_at_once(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    class Interrupted(FakeTarget):
        def chat(self, request_id: str, *rest: Any) -> Any:
            if not request_id.startswith("warm-up"):
                raise KeyboardInterrupt
            return super().chat(request_id, *rest)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        evaluate(
            run_request(prompts, Interrupted(), None, replace(OPEN, rate_per_s=1.0, seed=3)), tmp_path, silent
        )
    assert time.monotonic() - begin < arrivals(6, 1.0, 3)[-1] / 2


def test_the_time_limit_of_an_open_loop_is_a_number_of_arrivals(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    due = arrivals(6, 200.0, OPEN.seed)
    settings = replace(OPEN, time_limit_s=(due[3] + due[4]) / 2)
    assert [len(block) for block in in_blocks(prompts, settings)] == [4]
    events: list[Any] = []
    record = evaluate(
        run_request(prompts, FakeTarget(accepted=(1,)), FakeTarget(), settings), tmp_path, events.append
    )
    assert {r.question_id for r in record.requests} == {"q0", "q1", "q2", "q3"}
    assert (record.unsent_prompts, record.complete, record.data.prompts) == (2, True, 6)
    assert any(isinstance(e, Note) and "left 2 of 6 prompts unsent" in e.text for e in events)
    with pytest.raises(ConfigError, match="the first prompt arrives after"):
        in_blocks(prompts, replace(settings, time_limit_s=due[0] / 2))


def test_the_time_limit_of_a_closed_loop_counts_serving_and_ends_between_blocks(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """Eight steps of 20 ms a prompt on the slower arm: the first two blocks use up 0.2 s, and both arms serve both."""
    settings = replace(SETTINGS, time_limit_s=0.2)
    record = evaluate(
        run_request(prompts, FakeTarget(accepted=(1,)), FakeTarget(seconds_per_step=0.02), settings),
        tmp_path,
        silent,
    )
    assert len(record.blocks) == 2 and record.unsent_prompts == 4
    assert {r.question_id for r in record.of("speculative")} == {r.question_id for r in record.of("baseline")}
    read = RunRecord.read(tmp_path)
    assert read.unsent_prompts == 4 and read.settings == settings and read.summary()["unsent_prompts"] == 4


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    running = OpenAIStub([(3, 2), (3, 0)], reports="histogram")
    yield running
    running.close()


def test_the_command_takes_a_rate_or_a_concurrency(
    stub: OpenAIStub, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", stub.url, "--prompts", "4", "--out", str(tmp_path / "run"), "--json"]
    command += ["--model", "toy", "--tokenizer", str(tokenizer_folder)]
    assert main([*command, "--rate", "100", "--time-limit", "60"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["requests"] >= 4 and result["latency"]["speculative"]["send_delay_ms"]["count"] == 4
    assert RunRecord.read(tmp_path / "run").settings.rate_per_s == 100
    assert main([*command, "--rate", "0"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"].startswith("--rate: ")
    assert main([*command, "--rate", "1", "--concurrency", "2"]) == 2
    assert "not allowed with" in json.loads(capsys.readouterr().out)["error"]["message"]
