"""A sweep file says what is run: every fault at its line and column, every combination a command of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.config import load_file
from trtspec.errors import ConfigError
from trtspec.evaluate.sweep.cells import Cell, cells_of
from trtspec.evaluate.sweep.schema import Sweep


@pytest.fixture
def load(tmp_path: Path):
    def read(text: str) -> Sweep:
        (tmp_path / "sweep.yaml").write_text(text)
        return load_file(tmp_path / "sweep.yaml", Sweep)

    return read


@pytest.fixture
def cells(load, tmp_path: Path):
    def of(text: str) -> tuple[Cell, ...]:
        return cells_of(load(text), tmp_path / "out")

    return of


def test_every_value_is_run_with_every_value_of_the_others(cells, tmp_path: Path) -> None:
    found = cells(
        "targets: [{build: a}, {build: b}]\nconcurrency: [1, 8]\ndraft_length: [2, 4]\ntemperature: [0.0]\n"
    )
    assert [cell.name for cell in found] == [
        *("a-t0-d2-c1", "a-t0-d2-c8", "a-t0-d4-c1", "a-t0-d4-c8"),
        *("b-t0-d2-c1", "b-t0-d2-c8", "b-t0-d4-c1", "b-t0-d4-c8"),
    ]
    assert found[1].command == (
        f"trtspec eval {tmp_path}/a --name=a --temperature=0.0 --draft-length=2 --concurrency=8"
    )
    assert found[1].folder == tmp_path / "out" / "a-t0-d2-c8" and found[1].build == tmp_path / "a"


def test_each_command_is_one_that_eval_takes(cells) -> None:
    from trtspec.cli import make_parser

    found = cells(
        """\
targets:
  - {build: a}
  - {config: b.yaml, set: [speculation.draft_length=3]}
  - {url: "http://127.0.0.1:9000/v1", model: m, tokenizer: t, draft_length: 3}
  - {url: "grpc://127.0.0.1:8001", build: a, name: served}
data: [builtin, ./prompts.jsonl, org/set]
concurrency: [4]
rate_per_s: [0.5, 2]
time_limit_s: 60
output_length: 64
prompts: 5
categories: [coding, "two words"]
seed: 3
baseline: false
"""
    )
    assert len(found) == len({cell.folder for cell in found}) == 4 * 3 * 3
    for cell in found:
        arguments = make_parser().parse_args(["eval", *cell.arguments])
        assert arguments.no_baseline and arguments.prompts == 5 and arguments.time_limit == 60
        assert arguments.category == ["coding", "two words"] and (arguments.rate is None) != (
            arguments.concurrency is None
        )


def test_only_builds_are_asked_for_another_draft_length(cells) -> None:
    found = cells("targets: [{build: a}, {url: 'grpc://h:1', build: a}]\ndraft_length: [2, 4]\n")
    assert [(cell.name, cell.server) for cell in found] == [
        *(("a-d2-c1", None), ("a-d4-c1", None)),
        ("h-1-c1", "grpc://h:1"),
    ]


def test_a_longer_axis_keeps_the_names_of_the_runs_that_are_there(cells) -> None:
    before = cells("targets: [{build: a}]\nconcurrency: [1, 4]\ndata: [x/one.jsonl]\n")
    after = cells("targets: [{build: a}]\nconcurrency: [1, 4, 16]\ndata: [x/one.jsonl, y/one.jsonl]\n")
    assert set(before) < set(after)
    assert [cell.name for cell in after] == [
        *("a-one-c1", "a-one-c4", "a-one-c16"),
        *("a-one-2-c1", "a-one-2-c4", "a-one-2-c16"),
    ]


def test_paths_are_relative_to_the_file_and_a_sweep_extends_another(load, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "base.yaml").write_text("targets: [{build: ../builds/a}]\nconcurrency: [2]\n")
    sweep = load("extends: lab/base.yaml\ndata: [builtin, ./own.jsonl, org/hub-set]\n")
    assert sweep.targets[0].build == str(tmp_path / "builds" / "a") and sweep.concurrency == (2,)
    assert sweep.data == ("builtin", str(tmp_path / "own.jsonl"), "org/hub-set")


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("{}", "1:1", "targets is missing"),
        ("targets: []", "1:10", "targets must hold at least 1 item"),
        ("targets: [{build: a, nme: x}]", "1:22", "did you mean name?"),
        ("targets: [{build: a}]\ntemprature: [0.0]", "2:1", "did you mean temperature?"),
        ("targets: [{build: a}]\nconcurrency: 4", "2:14", "write a list: [4]"),
        ("targets: [{build: a}]\nconcurrency: [4, 2]", "2:14", "ascending"),
        ("targets: [{build: a}]\ndraft_length: [4, 4]", "2:15", "each value once"),
        ("targets: [{build: a}]\nprompts: '3'", "2:10", "remove the quotes"),
        ("targets: [{model: m}]", "1:11", "nothing to measure"),
        ("targets: [{config: a.yaml, build: a}]", "1:20", "a build is named too"),
        ("targets: [{url: 'ftp://h'}]", "1:17", "not a server's address"),
        ("targets: [{build: a, set: [a=1]}]", "1:27", "goes with a config"),
        ("targets: [{url: 'grpc://h:1', draft_length: 3}]", "1:45", "goes with an OpenAI-compatible url"),
        ("targets: [{url: 'http://h/v1', model: m}]", "1:17", "sends text, not tokens"),
        ("targets: [{build: a}, {build: b/a}]", "1:23", "targets[0] is called 'a' too"),
    ],
)  # fmt: skip
def test_a_fault_is_named_at_its_place(load, text: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(text + "\n")
    (problem,) = refused.value.problems
    assert problem.where.endswith(f"sweep.yaml:{place}")
    assert words in f"{problem.message} {problem.hint}"


def test_all_faults_are_told_at_once(load) -> None:
    with pytest.raises(ConfigError) as refused:
        load(
            "targets:\n  - {build: a, nme: x}\n  - {build: b, model: m}\n  - {build: b, name: a}\nconcurrency: 4\n"
        )
    assert [problem.where.rsplit(":", 2)[1] for problem in refused.value.problems] == ["2", "3", "4", "5"]


def test_triton_over_http_tells_its_tokens_itself(load) -> None:
    assert load("targets: [{url: 'http://h:8000/v2'}]\n").targets[0].label == "h-8000-v2"
