"""A run as a table and its prompts as AIPerf takes them: nothing is lost, and nothing unmeasured becomes a number."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.evaluate.conftest import FakeTarget
from tests.evaluate.test_evaluate_run import SETTINGS, run_request
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.evaluate.data import Prompt, load_prompts
from trtspec.evaluate.export import AIPERF_FILE, COLUMNS, aiperf_rows, write_table
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.run import evaluate
from trtspec.events import silent


@pytest.fixture
def record(prompts: tuple[Prompt, ...], tmp_path: Path) -> RunRecord:
    target = FakeTarget(accepted=(2, 0, 3), refuses=["coding question 1"], seconds_per_step=0.001)
    return evaluate(run_request(prompts, target, FakeTarget()), tmp_path, silent)


def test_parquet_and_csv_hold_the_same_requests_of_all_runs(record: RunRecord, tmp_path: Path) -> None:
    runs = [record, replace(record, name="again, with a comma")]
    write_table(runs, tmp_path / "requests.parquet")
    write_table(runs, tmp_path / "requests.csv")
    rows = parquet.read_table(tmp_path / "requests.parquet").to_pylist()
    with open(tmp_path / "requests.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert tuple(rows[0]) == tuple(cells[0]) == COLUMNS
    assert len(rows) == len(cells) == 2 * (13 + 1), "seven turns on each arm, one of them refused"
    for row, cell in zip(rows, cells, strict=True):
        for name, value in row.items():
            if value is None or value == []:
                assert cell[name] == ""
            elif isinstance(value, list):
                assert [float(part) for part in cell[name].split()] == pytest.approx(value, abs=1e-5)
            elif isinstance(value, str):
                assert cell[name] == value
            else:
                assert float(cell[name]) == pytest.approx(value, abs=1e-5)


def test_every_acceptance_number_can_be_recounted_from_the_table(record: RunRecord, tmp_path: Path) -> None:
    write_table([record], tmp_path / "requests.parquet")
    rows = [r for r in parquet.read_table(tmp_path / "requests.parquet").to_pylist() if r["steps"]]
    ours = [r for r in rows if r["arm"] == "speculative"]
    summary = record.summary()
    steps = sum(r["steps"] for r in ours)
    assert sum(r["output_tokens"] - 1 for r in ours) / steps == pytest.approx(
        summary["acceptance_length"]["token_weighted"]
    )
    assert sum(r["acceptance_length"] for r in ours) / len(ours) == pytest.approx(
        summary["acceptance_length"]["per_request"]
    )
    drafted = [d for r in ours for d in r["drafted_per_step"]]
    accepted = [a for r in ours for a in r["accepted_per_step"]]
    assert sum(accepted) / sum(drafted) == pytest.approx(summary["draft_acceptance_rate"])
    assert [accepted.count(n) for n in range(4)] == summary["acceptance_histogram"]
    (refused,) = [r for r in parquet.read_table(tmp_path / "requests.parquet").to_pylist() if r["error"]]
    assert refused["question_id"] == "q1" and refused["ttft_ms"] is None and refused["drafted"] is None


def test_the_command_writes_the_table(record: RunRecord, tmp_path: Path, capsys) -> None:
    path = tmp_path / "all.csv"
    assert main(["report", str(tmp_path), "--table", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["table"] == str(path)
    assert path.read_text().startswith("run,created_at,")
    assert main(["report", str(tmp_path), "--table", str(tmp_path / "all.xlsx")]) == 2
    with pytest.raises(ConfigError, match="csv"):
        write_table([record], tmp_path / "all")


def test_aiperf_gets_the_prompts_in_the_shape_its_loader_checks(
    record: RunRecord, prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """Ids of exactly 32 characters, a category, and messages that each have a role and a content."""
    rows = [json.loads(line) for line in (tmp_path / AIPERF_FILE).read_text().splitlines()]
    assert len(rows) == len({row["question_id"] for row in rows}) == len(prompts)
    for row, prompt in zip(rows, prompts, strict=True):
        assert set(row) == {"question_id", "category", "messages"} and len(row["question_id"]) == 32
        assert row["messages"] == [{"role": "user", "content": turn} for turn in prompt.turns]
    again = load_prompts(str(tmp_path / AIPERF_FILE)).prompts
    assert [p.turns for p in again] == [p.turns for p in prompts], "and we read them too"
    known = replace(prompts[0], question_id="0123456789abcdef" * 2)
    assert [row["question_id"] for row in aiperf_rows([known, replace(known, system="Be brief.")])] == [
        known.question_id
    ]


def test_settings_of_the_run_stand_beside_each_request(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    settings = replace(SETTINGS, rate_per_s=300.0)
    record = evaluate(run_request(prompts, FakeTarget(accepted=(1,)), None, settings), tmp_path, silent)
    write_table([record], tmp_path / "t.parquet")
    rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert {(r["rate_per_s"], r["method"], r["draft_length"]) for r in rows} == {(300.0, "ngram", 3)}
    assert [r["send_delay_ms"] is None for r in rows] == [r["turn"] > 0 for r in rows]
