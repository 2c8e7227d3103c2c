"""A run that was killed goes on where it stopped, and ends as if nothing had happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.evaluate.conftest import FakeTarget
from tests.evaluate.test_evaluate_run import SETTINGS, run_request
from trtspec.errors import ConfigError, StageFailed
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.journal import JOURNAL_FILE
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report import render_html, render_terminal
from trtspec.evaluate.run import evaluate, evaluate_together
from trtspec.events import Note, silent

REQUESTS = 7  # five prompts of one turn and one of two, on each arm


class Interrupted(FakeTarget):
    """Ctrl-C arrives with its `at`-th answer, the warm-up not counted; later answers fail as on a closed target."""

    def __init__(self, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._left = at + 1

    def chat(self, request_id, messages, sampling):
        answer = super().chat(request_id, messages, sampling)
        with self._lock:
            self._left -= 1
            left = self._left
        if left == 0:
            raise KeyboardInterrupt
        if left < 0:
            raise RuntimeError("the runtime is closed")
        return answer


def settled(record: RunRecord) -> dict[str, Any]:
    """All that does not depend on the clock."""
    summary = record.summary()
    return {
        "requests": sorted(
            (
                *(r.arm, r.question_id, r.turn, r.block, r.prompt_sha256, r.token_ids, r.text, r.seed),
                *(r.finish_reason, *((s.drafted, s.accepted, s.emitted) for s in r.steps)),
                None if r.late_s is None else round(r.start_s, 6),  # when an open loop had scheduled it
            )
            for r in record.requests
        ),
        "blocks": [(b.index, b.first, b.speculative_tokens, b.baseline_tokens) for b in record.blocks],
        "failures": sorted(astuple_of(f) for f in record.failures),
        "lossless": asdict(record.lossless),
        "facts": (record.settings, record.data, record.speculative, record.baseline, record.complete),
        "summary": {
            key: summary[key]
            for key in (
                *("acceptance_length", "draft_acceptance_rate", "conditional_acceptance", "joint_acceptance"),
                *("acceptance_histogram", "requests", "output_tokens", "errors", "lossless", "complete"),
            )
        },
    }


def astuple_of(failure: Any) -> tuple[str, ...]:
    return tuple(map(str, asdict(failure).values()))


def sent(*targets: FakeTarget) -> list[str]:
    """Ids of the requests some targets got, warm-ups left out."""
    return sorted(call[0] for target in targets for call in target.calls if not call[0].startswith("warm-up"))


FAULTS = {"accepted": (2, 0, 3), "wrong": {"math question 2": 4}, "refuses": ["writing question 4"]}


@pytest.mark.parametrize("load", [{"concurrency": 1}, {"concurrency": 3}, {"rate_per_s": 400.0}], ids=str)
@pytest.mark.parametrize("at", range(1, REQUESTS))  # the refused request has no answer
def test_a_resumed_run_equals_an_uninterrupted_one(
    prompts: tuple[Prompt, ...], tmp_path: Path, at: int, load: dict[str, Any]
) -> None:
    """One prompt is refused, one gives another token; nothing that had finished is asked for again."""
    settings = replace(SETTINGS, **load)
    whole = evaluate(
        run_request(prompts, FakeTarget(**FAULTS), FakeTarget(), settings), tmp_path / "whole", silent
    )
    broken, plain = Interrupted(at, **FAULTS), FakeTarget()
    into = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        evaluate(run_request(prompts, broken, plain, settings), into, silent)
    journal = into / JOURNAL_FILE
    kept = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    target, baseline = FakeTarget(**FAULTS), FakeTarget()
    events: list[Any] = []
    resumed = evaluate(run_request(prompts, target, baseline, settings), into, events.append)
    assert settled(resumed) == settled(whole)
    assert settled(RunRecord.read(into)) == settled(whole)
    finished = {(e["arm"], e["request"]["question_id"], e["request"]["turn"]) for e in kept if "request" in e}
    again = {
        (f"{arm}", question, int(turn))
        for question, turn, arm in (name.split("-", 2) for name in sent(target, baseline))
    }
    assert not finished & again, "finished requests are not repeated"
    refused = [failure["question_id"] for e in kept for failure in e.get("failures", ())]
    assert len(finished) + len(again) == 2 * REQUESTS - len(refused)
    assert any(isinstance(e, Note) and "were finished before" in e.text for e in events) == bool(finished)
    assert not journal.exists()


def test_the_next_turn_still_follows_the_models_own_answer(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """Killed between the turns of one conversation: the second turn quotes the first answer from the journal."""
    with pytest.raises(KeyboardInterrupt):
        evaluate(run_request(prompts[5:], Interrupted(2, accepted=(1,)), None), tmp_path, silent)
    target = FakeTarget(accepted=(1,))
    record = evaluate(run_request(prompts[5:], target, None), tmp_path, silent)
    first, second = record.requests
    assert sent(target) == ["q5-1-deployment-0"]
    assert [m.content for m in target.calls[-1][1]] == ["first part", first.text, "second part"]
    (block,) = record.blocks
    assert not block.whole, "its time is not that of a block served in one go"
    assert second.start_s >= first.start_s + first.total_s, "the clock of the arm went on"
    assert block.speculative_s >= first.total_s + second.total_s


def test_ctrl_c_leaves_partial_results_that_say_so(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    events: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        evaluate(run_request(prompts, Interrupted(4, accepted=(1,)), FakeTarget()), tmp_path, events.append)
    assert any(isinstance(e, Note) and f"--out {tmp_path} goes on from here" in e.text for e in events)
    partial = RunRecord.read(tmp_path)
    assert not partial.complete and partial.summary()["complete"] is False
    assert len(partial.of("speculative")) == 3 and not partial.failures
    assert partial.lossless.not_checked == "the run was interrupted"
    for text in (render_terminal([partial]), render_html([partial])):
        assert "Interrupted: partial results of 3 finished requests." in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", JOURNAL_FILE]
    done = evaluate(run_request(prompts, FakeTarget(accepted=(1,)), FakeTarget()), tmp_path, silent)
    assert done.complete and "Interrupted" not in render_terminal([done])


def test_what_fails_because_of_the_interruption_is_no_failure(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """Other requests are in flight when Ctrl-C comes; the target is closed under them."""
    broken = Interrupted(2, accepted=(1,), seconds_per_step=0.01)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run_request(prompts, broken, None, replace(SETTINGS, concurrency=3)), tmp_path, silent)
    time.sleep(0.3)  # the others end
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert not any(json.loads(line).get("failures") for line in lines)
    target = FakeTarget(accepted=(1,))
    resumed = evaluate(run_request(prompts, target, None, replace(SETTINGS, concurrency=3)), tmp_path, silent)
    assert len(resumed.requests) == 7 and not resumed.failures


def test_a_line_that_a_kill_cut_short_is_dropped(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    whole = evaluate(run_request(prompts, FakeTarget(accepted=(1,)), None), tmp_path / "whole", silent)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run_request(prompts, Interrupted(5, accepted=(1,)), None), tmp_path, silent)
    journal = tmp_path / JOURNAL_FILE
    text = journal.read_bytes()
    for size in (len(text) - 1, len(text) - 200, 30, 0):
        journal.write_bytes(text[:size])
        target = FakeTarget(accepted=(1,))
        resumed = evaluate(run_request(prompts, target, None), tmp_path, silent)
        assert settled(resumed) == settled(whole)
        assert len(sent(target)) >= 3


@pytest.mark.parametrize("other", ["settings", "selection of prompts", "deployment", "baseline"])
def test_an_unfinished_run_of_something_else_is_not_mixed_in(
    prompts: tuple[Prompt, ...], tmp_path: Path, other: str
) -> None:
    asked = run_request(prompts, Interrupted(5, accepted=(1,)), FakeTarget())
    with pytest.raises(KeyboardInterrupt):
        evaluate(asked, tmp_path, silent)
    before = (tmp_path / JOURNAL_FILE).read_bytes()
    asked = replace(asked, target=FakeTarget(accepted=(1,)))
    changed = {
        "settings": replace(asked, settings=replace(SETTINGS, temperature=0.5)),
        "selection of prompts": replace(asked, prompts=prompts[1:]),
        "deployment": replace(asked, target=FakeTarget(accepted=(1,), drafted=5)),
        "baseline": replace(asked, baseline=None),
    }[other]
    with pytest.raises(ConfigError, match=f"another {other}") as refused:
        evaluate(changed, tmp_path, silent)
    assert refused.value.where == str(tmp_path / JOURNAL_FILE)
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before


def test_several_deployments_go_on_together(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    def runs(into: Path, *, at: int | None) -> dict[Path, Any]:
        second = Interrupted(at, accepted=(3,)) if at else FakeTarget(accepted=(3,))
        plain = FakeTarget()
        return {
            into / "a": run_request(prompts, FakeTarget(accepted=(1,)), plain),
            into / "b": replace(run_request(prompts, second, plain), name="b"),
        }

    whole = evaluate_together(runs(tmp_path / "whole", at=None), silent)
    asked = runs(tmp_path / "run", at=4)
    with pytest.raises(KeyboardInterrupt):
        evaluate_together(asked, silent)
    assert [RunRecord.read(folder).complete for folder in asked] == [False, False]
    resumed = evaluate_together(runs(tmp_path / "run", at=None), silent)
    assert [settled(r) for r in resumed] == [settled(w) for w in whole]


def test_a_run_in_which_everything_fails_is_not_resumed(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    texts = [turn for prompt in prompts for turn in prompt.turns]
    with pytest.raises(StageFailed):
        evaluate(run_request(prompts, FakeTarget(accepted=(1,), refuses=texts), None), tmp_path, silent)
    assert not (tmp_path / JOURNAL_FILE).exists()
    assert (
        len(evaluate(run_request(prompts, FakeTarget(accepted=(1,)), None), tmp_path, silent).requests) == 7
    )


_SLOW_RUN = """
import sys
from pathlib import Path
from tests.evaluate.conftest import FakeTarget
from tests.evaluate.test_evaluate_run import run_request
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.run import evaluate
from trtspec.events import silent

prompts = tuple(Prompt(f"q{i}", "chat", (f"question {i}",)) for i in range(40))
slow = dict(seconds_per_step=float(sys.argv[2]))
record = evaluate(
    run_request(prompts, FakeTarget(accepted=(2, 0), **slow), FakeTarget(**slow)), Path(sys.argv[1]), silent
)
print(len(record.requests), record.lossless.checked)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_process_leaves_what_the_next_one_needs(tmp_path: Path, end: signal.Signals) -> None:
    """A kill leaves the journal, Ctrl-C partial results as well."""
    root = Path(__file__).parents[2]
    ended = subprocess.Popen(
        [sys.executable, "-c", _SLOW_RUN, str(tmp_path), "0.01"], cwd=root, stderr=subprocess.DEVNULL
    )
    journal = tmp_path / JOURNAL_FILE
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b'"request"') < 10:
        assert ended.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    ended.send_signal(end)
    ended.wait(10)
    finished = journal.read_bytes().count(b'"request"')
    assert finished < 80
    if end == signal.SIGKILL:
        assert not (tmp_path / "run.json").exists()
    else:
        partial = RunRecord.read(tmp_path)
        assert not partial.complete and len(partial.requests) == finished
    done = subprocess.run(
        [sys.executable, "-c", _SLOW_RUN, str(tmp_path), "0"], cwd=root, capture_output=True, text=True
    )
    assert done.stdout.split() == ["80", "40"], done.stderr
    assert not journal.exists()
