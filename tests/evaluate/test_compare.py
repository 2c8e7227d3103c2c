"""Several deployments of one target in one run: all in turns, one baseline, and a table that says which is which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluate.conftest import FakeTarget
from tests.evaluate.test_evaluate_run import run_request
from trtspec.errors import StageFailed
from trtspec.evaluate.compare import comparison, render_markdown
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.run import evaluate, evaluate_together
from trtspec.events import silent


@pytest.fixture
def runs(prompts: tuple[Prompt, ...], tmp_path: Path) -> list[RunRecord]:
    """ "good" accepts 3 of 3, "poor" none, "wrong" gives another token once."""
    plain = FakeTarget(seconds_per_step=0.001)
    arms = {
        "good": FakeTarget(accepted=(3,), seconds_per_step=0.001),
        "poor": FakeTarget(accepted=(0,), seconds_per_step=0.002),
        "wrong": FakeTarget(accepted=(1,), wrong={"math question 2": 4}),
    }
    return evaluate_together(
        {tmp_path / name: replace(run_request(prompts, arm, plain), name=name) for name, arm in arms.items()},
        silent,
    )


def test_all_arms_take_turns_and_another_one_begins_each_time(runs: list[RunRecord]) -> None:
    # four arms: who is before the baseline changes from block to block, and everyone is first once
    assert [[block.first for block in run.blocks] for run in runs] == [
        ["speculative", "baseline", "baseline", "baseline", "speculative", "baseline"],
        ["speculative", "speculative", "baseline", "baseline", "speculative", "speculative"],
        ["speculative", "speculative", "speculative", "baseline", "speculative", "speculative"],
    ]


def test_the_baseline_is_served_once_and_stands_in_every_record(
    runs: list[RunRecord], prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    first = runs[0]
    assert all(run.of("baseline") == first.of("baseline") and len(run.of("baseline")) == 7 for run in runs)
    assert all(len(run.of("speculative")) == 7 for run in runs)
    assert {block.baseline_s for run in runs for block in run.blocks} == {b.baseline_s for b in first.blocks}
    for run in runs:
        kept = RunRecord.read(tmp_path / run.name)
        assert [r.token_ids for r in kept.requests] == [r.token_ids for r in run.requests]


def test_engines_with_another_plain_output_have_a_baseline_of_their_own(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """A quantized KV cache, say: its plain text differs, and equality means equality with that."""
    other = {"math question 2": 4}
    baselines = FakeTarget(), FakeTarget(wrong=other)
    runs = evaluate_together(
        {
            tmp_path / "a": run_request(prompts, FakeTarget(accepted=(1,)), baselines[0]),
            tmp_path / "b": run_request(prompts, FakeTarget(accepted=(1,), wrong=other), baselines[1]),
        },
        silent,
    )
    assert [run.lossless.mismatches for run in runs] == [0, 0]
    assert [len(run.of("baseline")) for run in runs] == [7, 7]
    assert runs[0].of("baseline") != runs[1].of("baseline")
    assert all(len(target.calls) == 7 + 1 for target in baselines), "each is served once, and warmed up"


def test_a_fault_of_one_deployment_is_its_own(
    runs: list[RunRecord], prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    assert [run.lossless.mismatches for run in runs] == [0, 0, 1]
    refusing = FakeTarget(accepted=(1,), refuses=["coding question 1"])
    together = evaluate_together(
        {
            tmp_path / "a": run_request(prompts, refusing, FakeTarget()),
            tmp_path / "b": run_request(prompts, FakeTarget(accepted=(1,)), FakeTarget()),
        },
        silent,
    )
    assert [len(run.failures) for run in together] == [1, 0]
    assert [[b.whole for b in run.blocks].count(False) for run in together] == [1, 0]


def test_one_deployment_together_is_a_plain_evaluation(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    def tokens(run: RunRecord) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(r.arm, r.question_id, r.token_ids) for r in run.requests]

    def request(name: str):
        return run_request(prompts, FakeTarget(accepted=(2, 0)), FakeTarget())

    alone = evaluate(request("a"), tmp_path / "a", silent)
    (together,) = evaluate_together({tmp_path / "b": request("b")}, silent)
    assert tokens(alone) == tokens(together)
    assert [b.first for b in alone.blocks] == [b.first for b in together.blocks]


def test_a_deployment_that_answers_nothing_fails_the_comparison(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    texts = [turn for prompt in prompts for turn in prompt.turns]
    dead = FakeTarget(accepted=(1,), refuses=texts)
    good = FakeTarget(accepted=(1,))
    with pytest.raises(StageFailed, match="requests failed"):
        evaluate_together(
            {
                tmp_path / "a": run_request(prompts, good, None),
                tmp_path / "b": run_request(prompts, dead, None),
            },
            silent,
        )


def cells(table: str) -> dict[str, list[str]]:
    """Rows of a Markdown table by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines[2:]}


def test_the_table_has_every_mechanism_category_and_mean(runs: list[RunRecord]) -> None:
    text = render_markdown(runs)
    _, whole, weighted, per_request, speed = text.split("\n## ")
    assert [name.split("(")[-1].rstrip(")") for name in list(cells(whole))[:3]] == ["good", "poor", "wrong"]
    for run, (name, row) in zip(runs, cells(weighted).items()):
        length = run.summary()["acceptance_length"]
        assert name.endswith(f"({run.name})")
        assert row == [
            f"{length['token_weighted']:.2f}",
            *(f"{length['by_category'][c]['token_weighted']:.2f}" for c in ("coding", "math", "writing")),
        ]
    for run, row in zip(runs, cells(per_request).values()):
        length = run.summary()["acceptance_length"]
        assert row[0] == f"{length['per_request']:.2f}"
        assert row[2] == f"{length['by_category']['math']['per_request']:.2f}"
    for run, row in zip(runs, cells(speed).values()):
        assert row[1] == f"{run.summary()['speedup_by_category']['coding']['value']:.2f}×"
    good, poor, wrong = list(cells(whole).values())[:3]
    assert (good[-1], poor[-1], wrong[-1]) == ("7 of 7", "7 of 7", "6 of 7")
    assert cells(whole)["plain decoding"][0] == "1.00"
    assert float(good[3].rstrip("×")) > 1 > float(poor[3].rstrip("×"))


def test_the_same_numbers_are_there_as_data(runs: list[RunRecord]) -> None:
    found = json.loads(json.dumps(comparison(runs)))
    assert [run["name"] for run in found["runs"]] == ["good", "poor", "wrong"]
    assert found["data"]["prompts"] == 6
    for run, data in zip(runs, found["runs"]):
        assert data["acceptance_length"] == run.summary()["acceptance_length"]
        assert data["lossless"]["mismatches"] == run.lossless.mismatches
