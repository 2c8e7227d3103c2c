"""A sweep makes each run once, whatever stops it in between, and one broken deployment costs no other its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.evaluate.sweep.fake_cells import REQUESTS, attempts, cells_in, measure
from trtspec.errors import ConfigError
from trtspec.evaluate.journal import JOURNAL_FILE
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.sweep.cells import Cell
from trtspec.evaluate.sweep.run import attempt, run_sweep
from trtspec.events import Emit, Note, Progress, silent

ROOT = Path(__file__).parents[3]


def test_each_cell_is_an_ordinary_run_that_its_own_command_reproduces(tmp_path: Path) -> None:
    cells = cells_in(tmp_path, "a", concurrency=[1, 2])
    events = []
    swept = run_sweep(cells, measure, events.append)
    assert list(swept.records) == list(cells) and not swept.failed
    for cell, record in swept.records.items():
        assert RunRecord.read(cell.folder) == record
        assert record.command == cell.command and record.complete
    assert [r.settings.concurrency for r in swept.records.values()] == [1, 2]
    assert [(e.done, e.total) for e in events if isinstance(e, Progress) and e.stage == "sweep"] == [
        (1, 2),
        (2, 2),
    ]


def test_finished_runs_are_not_made_again(tmp_path: Path) -> None:
    cells = cells_in(tmp_path, "a", concurrency=[1])
    run_sweep(cells, measure, silent)
    longer = cells_in(tmp_path, "a", concurrency=[1, 2])
    events = []
    swept = run_sweep(longer, measure, events.append)
    assert [len(attempts(cell)) for cell in longer] == [1, 1] and len(swept.records) == 2
    assert any(isinstance(e, Note) and "1 of 2 runs were finished before" in e.text for e in events)


def test_a_broken_deployment_does_not_cost_the_others_their_runs(tmp_path: Path) -> None:
    cells = cells_in(tmp_path, "a", "broken", "b")
    swept = run_sweep(cells, measure, silent)
    assert [cell.name for cell in swept.records] == ["a-c1", "b-c1"]
    assert {cell.name: problem for cell, problem in swept.failed.items()} == {
        "broken-c1": "the engine does not open"
    }


def test_what_a_run_has_to_say_is_told_with_its_name(tmp_path: Path) -> None:
    events = []

    def slow(cell: Cell, emit: Emit) -> None:
        emit(Progress("evaluate", "requests", 1, 2, "requests"))
        emit(Note("evaluate", "the machine is busy", "warning"))
        raise ZeroDivisionError("steps")

    (cell,) = cells_in(tmp_path, "a")
    assert attempt(slow, cell, events.append) == "ZeroDivisionError: steps"
    assert events == [
        Progress("evaluate", "a-c1", 1, 2, "requests"),
        Note("evaluate", "a-c1: the machine is busy", "warning"),
    ]


def test_a_run_of_another_sweep_is_neither_taken_nor_overwritten(tmp_path: Path) -> None:
    (cell,) = cells_in(tmp_path, "a")
    run_sweep([cell], measure, silent)
    (tmp_path / "a" / "config.yaml").write_text("name: a\nlossless: false\n")
    with pytest.raises(ConfigError, match="of a build with another config") as refused:
        run_sweep([cell], measure, silent)
    assert refused.value.where == str(cell.folder)
    assert len(attempts(cell)) == 1


_SWEEP = """
import sys
from pathlib import Path
from tests.evaluate.sweep.fake_cells import cells_in, measure
from trtspec.evaluate.sweep.run import run_sweep
from trtspec.events import silent

swept = run_sweep(cells_in(Path(sys.argv[1]), "a", "b", "c"), measure, silent)
print(len(swept.records))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path, how: signal.Signals) -> None:
    first, second, third = cells = cells_in(tmp_path, "a", "b", "c")
    running = subprocess.Popen(
        [sys.executable, "-c", _SWEEP, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    journal = second.folder / JOURNAL_FILE
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b'"request"') < 5:
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(running.pid, how)
    running.wait()
    assert first.is_finished() and not second.is_finished() and not third.folder.exists()
    swept = run_sweep(cells, measure, silent)
    assert len(swept.records) == 3 and all(len(r.requests) == REQUESTS for r in swept.records.values())
    assert [len(attempts(cell)) for cell in cells] == [1, 2, 1]
    before, after = attempts(second)
    # The request that was under way is the only one that may have been sent twice.
    assert len(set(before) & set(after)) <= 1 and set(before) | set(after) == set(attempts(third)[0])
