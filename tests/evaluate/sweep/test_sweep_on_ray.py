"""On two nodes of a Ray cluster a lost worker, or a lost node, costs no finished run and no finished request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.evaluate.sweep.fake_cells import REQUESTS, attempts, cells_in, measure, pid_of
from trtspec.errors import SetupError
from trtspec.evaluate.journal import JOURNAL_FILE
from trtspec.evaluate.sweep import on_ray
from trtspec.evaluate.sweep.cells import Cell
from trtspec.evaluate.sweep.run import Swept, run_sweep
from trtspec.events import Event, Note, silent

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "trtspec[ray]"')


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """Two nodes of one CPU each, as processes of this machine."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def sweep(cluster, cells: tuple[Cell, ...], emit=silent) -> Swept:
    return run_sweep(cells, measure, emit, partial(on_ray.on_ray, address=cluster.address))


def started(cell: Cell, requests: int = 3) -> None:
    """Waits until a cell's run has finished so many requests."""
    journal = cell.folder / JOURNAL_FILE
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b'"request"') < requests:
        assert time.monotonic() < deadline, f"{cell.name} did not begin"
        time.sleep(0.02)


def meanwhile(strike) -> tuple[threading.Thread, list[BaseException]]:
    """Runs `strike` beside the sweep; what it raised is in the list."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            strike()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_runs_are_spread_over_the_nodes_one_at_a_time_on_each(cluster, tmp_path: Path) -> None:
    cells = cells_in(tmp_path, "a", "b", "broken", "c")
    swept = sweep(cluster, cells)
    assert [cell.name for cell in swept.records] == ["a-c1", "b-c1", "c-c1"]
    assert list(swept.failed.values()) == ["the engine does not open"]
    assert all(record.complete and len(record.requests) == REQUESTS for record in swept.records.values())
    assert pid_of(cells[0]) != pid_of(cells[1]), "two workers were at it"
    assert len(sweep(cluster, cells[:2]).records) == 2
    assert [len(attempts(cell)) for cell in cells[:2]] == [1, 1], "and finished runs are not made again"


def test_a_killed_worker_costs_no_finished_request(cluster, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(on_ray, "_REST_S", 0.5)
    cells = cells_in(tmp_path, "a", "b", "c", "d")
    events: list[Event] = []

    def kill() -> None:
        started(cells[1])
        os.kill(pid_of(cells[1]), signal.SIGKILL)

    thread, raised = meanwhile(kill)
    swept = sweep(cluster, cells, events.append)
    thread.join()
    assert not raised and not swept.failed
    assert all(len(record.requests) == REQUESTS for record in swept.records.values())
    lost = [e.text for e in events if isinstance(e, Note) and "its worker was lost" in e.text]
    assert len(lost) == 1 and lost[0].startswith("b-c1")
    assert [len(attempts(cell)) for cell in cells] == [1, 2, 1, 1]
    before, after = attempts(cells[1])
    assert len(before) >= 3 and len(set(before) & set(after)) <= 1, "only what was under way is repeated"


def test_a_cell_that_takes_its_worker_down_each_time_is_a_failure(
    cluster, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(on_ray, "_REST_S", 0.1)
    (cell,) = cells_in(tmp_path, "a")
    swept = run_sweep([cell], _die, silent, partial(on_ray.on_ray, address=cluster.address))
    assert "its worker was lost 3 times" in swept.failed[cell]


def _die(cell: Cell, emit: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_folder_that_a_node_does_not_see_is_named(tmp_path: Path) -> None:
    (cell,) = cells_in(tmp_path, "a")
    _, problem = on_ray._on_node(measure, cell)
    assert problem is not None and f"does not see {cell.folder}" in problem


def test_a_lost_node_costs_no_finished_run(cluster, tmp_path: Path) -> None:
    cells = cells_in(tmp_path, "a", "b", "c")
    (doomed,) = cluster.worker_nodes

    def remove() -> None:
        for cell in cells[:2]:
            started(cell)
        cluster.remove_node(doomed, allow_graceful=False)

    thread, raised = meanwhile(remove)
    swept = sweep(cluster, cells)
    thread.join()
    assert not raised and not swept.failed and len(swept.records) == 3
    assert sorted(len(attempts(cell)) for cell in cells) == [1, 1, 2]


def test_a_cluster_that_is_not_there_is_a_matter_of_setup(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot join the Ray cluster"):
        list(on_ray.on_ray(cells_in(tmp_path, "a"), measure, silent, address="127.0.0.1:1"))
