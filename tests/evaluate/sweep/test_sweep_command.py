"""`trtspec eval --sweep` builds what is to be built, makes the runs and says what they show."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.evaluate.sweep import fake_cells
from trtspec.cli import main
from trtspec.config.fields import models_in
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.sweep.schema import Sweep, SweepTarget

ROOT = Path(__file__).parents[3]
SWEEPS = ROOT / "build_configs" / "sweeps"


@pytest.fixture
def answer(capsys):
    """Runs a command with --json; its exit code and its object."""

    def run(*words: object) -> tuple[int, dict]:
        code = main([*map(str, words), "--json", "--log", "quiet"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    """Two servers, of which one is broken, at two loads."""
    path = tmp_path / "servers.yaml"
    path.write_text(
        "targets: [{url: 'grpc://h:1', name: good}, {url: 'grpc://h:2', name: broken}]\nconcurrency: [1, 2]\n"
    )
    return path


def test_runs_failures_and_verdicts_are_told(answer, sweep_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("trtspec.commands.eval.measure", fake_cells.measure)
    out = tmp_path / "runs"
    code, said = answer("eval", "--sweep", sweep_file, "--out", out)
    result = said["result"]
    assert code == 5 and said["ok"], "a run is missing"
    assert [run["name"] for run in result["runs"]] == ["good-c1", "good-c2"]
    assert result["runs"][0]["lossless"]["mismatches"] == 0 and result["runs"][0]["run"] == str(
        out / "good-c1"
    )
    assert [(f["name"], f["message"]) for f in result["failed"]] == [
        ("broken-c1", "the engine does not open"),
        ("broken-c2", "the engine does not open"),
    ]
    assert result["failed"][0]["command"] == "trtspec eval grpc://h:2 --name=broken --concurrency=1"
    assert [verdict["deployment"] for verdict in result["verdicts"]] == ["good, D=3"]
    code, said = answer("report", out)
    assert (
        code == 0 and len(said["result"]["runs"]) == 2 and said["result"]["html"] == str(out / "report.html")
    )
    assert [verdict["decision"] for verdict in said["result"]["verdicts"]] == [
        verdict["decision"] for verdict in result["verdicts"]
    ]
    _, said = answer("eval", "--sweep", sweep_file, "--out", out, "--dry-run")
    assert [run["finished"] for run in said["result"]["runs"]] == [True, True, False, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "s.yaml", "--concurrency", "4"], "not from --concurrency"),
        (["--sweep", "s.yaml", "out/a", "--seed", "0"], "not from --seed, targets"),
        (["out/a", "--ray", "auto"], "are for sweeps"),
        ([], "nothing to measure is named"),
        (["--sweep", "no-such.yaml"], "does not exist"),
    ],
)
def test_options_that_do_not_go_together_are_refused(answer, words: list[str], message: str) -> None:
    code, said = answer("eval", *words)
    assert code == 2 and message in said["error"]["message"]


def test_a_sweep_in_which_nothing_runs_is_an_error(answer, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(f"targets: [{{build: {tmp_path}/nothing}}]\n")
    code, said = answer("eval", "--sweep", tmp_path / "s.yaml", "--out", tmp_path / "runs")
    assert code == 5 and "not a build folder" in said["error"]["message"]


@pytest.mark.model
def test_a_build_is_swept_and_each_run_is_the_one_of_its_command(
    answer, quickstart_build: Path, tmp_path: Path
) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        f"targets: [{{build: {quickstart_build}, name: quick}}]\ndraft_length: [3]\noutput_length: 8\nprompts: 1\n"
    )
    code, said = answer("eval", "--sweep", path, "--out", tmp_path / "runs")
    assert code == 0 and [run["draft_length"] for run in said["result"]["runs"]] == [3]
    record = RunRecord.read(tmp_path / "runs" / "quick-d3-c1")
    assert record.lossless.checked == len(record.of("speculative")) and not record.lossless.mismatches
    words = shlex.split(record.command or "")
    assert answer(*words[1:], "--out", tmp_path / "again")[0] == 0
    again = RunRecord.read(tmp_path / "again")
    assert [r.token_ids for r in again.of("speculative")] == [r.token_ids for r in record.of("speculative")]
    made = (tmp_path / "runs" / "quick-d3-c1" / "run.json").stat().st_mtime_ns
    answer("eval", "--sweep", path, "--out", tmp_path / "runs")
    assert (tmp_path / "runs" / "quick-d3-c1" / "run.json").stat().st_mtime_ns == made


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_that_are_shipped_can_be_made(answer, path: Path, tmp_path: Path) -> None:
    code, said = answer("eval", "--sweep", path, "--out", tmp_path, "--dry-run")
    assert code == 0 and said["result"]["runs"] and not list(tmp_path.iterdir())


def test_every_field_of_a_sweep_is_documented() -> None:
    text = (SWEEPS / "README.md").read_text(encoding="utf-8")
    rows = [("targets[].", SweepTarget), ("", Sweep)]
    for prefix, model in rows:
        for name, info in model.model_fields.items():
            if not models_in(info.annotation):
                assert f"| `{prefix}{name}` | {info.description} |" in text
