"""The runs of a sweep on the nodes of a Ray cluster, one at a time on each, so that no two disturb each other.

Every node reads builds and writes run folders at the same paths: a file system they share. A cell whose worker or node
is lost goes to a node again and goes on from its journal there.
"""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from trtspec.errors import SetupError
from trtspec.evaluate.sweep.cells import Cell, Measure
from trtspec.evaluate.sweep.run import STAGE, attempt
from trtspec.events import Emit, Event, Note

ATTEMPTS = 3
"""How often a cell is begun: one that takes its worker down with it every time is a failure of its own."""

_POLL_S = 1.0
_REST_S = 10.0
_ANSWERS_S = 10.0


def on_ray(
    cells: Sequence[Cell], measure: Measure, emit: Emit, *, address: str
) -> Iterator[tuple[Cell, str | None]]:
    """Make the runs on a cluster; see `run.Runner`. address: as `ray.init` takes it, "auto" finds the local one.

    `measure` is sent by reference: the nodes have trtspec installed. Each run claims all CPUs and GPUs of its node,
    and waits where other work of the cluster holds some. Raises SetupError when Ray or the cluster is not there, or
    no node is left.
    """
    ray = _connected(address)
    try:
        for cell in cells:
            cell.folder.mkdir(parents=True, exist_ok=True)
        yield from _Dispatch(ray, measure, emit).run(cells)
    finally:
        ray.shutdown()


class _Dispatch:
    """Gives waiting cells to idle nodes. A node that lost a worker rests, so that another one is tried first."""

    def __init__(self, ray: Any, measure: Measure, emit: Emit) -> None:
        self._ray = ray
        self._measure = measure
        self._emit = emit
        self._task = ray.remote(_on_node)
        self._running: dict[Any, tuple[Cell, str]] = {}
        self._rests_until: dict[str, float] = {}

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, str | None]]:
        waiting, losses = list(cells), Counter[Cell]()
        while waiting or self._running:
            self._start(waiting)
            if not self._running:  # every node rests
                time.sleep(_POLL_S)
                continue
            done, _ = self._ray.wait(list(self._running), timeout=_POLL_S)
            for reference in done:
                cell, node = self._running.pop(reference)
                try:
                    notes, problem = self._ray.get(reference)
                except self._ray.exceptions.RayTaskError as error:
                    yield cell, f"the node could not begin it: {error.cause}"
                except self._ray.exceptions.RayError as error:
                    losses[cell] += 1
                    self._rests_until[node] = time.monotonic() + _REST_S
                    reason = f"{type(error).__name__}, attempt {losses[cell]} of {ATTEMPTS}"
                    self._emit(Note(STAGE, f"{cell.name}: its worker was lost ({reason})", "warning"))
                    if cell.is_finished():
                        yield cell, None
                    elif losses[cell] < ATTEMPTS:
                        waiting.insert(0, cell)
                    else:
                        yield cell, f"its worker was lost {ATTEMPTS} times: {error}"
                else:
                    for note in notes:
                        self._emit(note)
                    yield cell, problem

    def _start(self, waiting: list[Cell]) -> None:
        """Begin as many cells as there are idle nodes and servers that nothing else loads."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node, resources in self._idle_nodes(waiting):
            loaded = {cell.server for cell, _ in self._running.values()}
            cell = next((c for c in waiting if c.server is None or c.server not in loaded), None)
            if cell is None:
                return
            waiting.remove(cell)
            task = self._task.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            self._running[task.remote(self._measure, cell)] = (cell, node)

    def _idle_nodes(self, waiting: Sequence[Cell]) -> list[tuple[str, dict[str, float]]]:
        alive = {
            node["NodeID"]: node["Resources"]
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU")
        }
        if not alive and not self._running:
            raise SetupError(
                f"no node of the Ray cluster can run anything: {len(waiting)} runs are not made",
                hint="add a node with CPUs; the same command goes on from here",
            )
        busy = {node for _, node in self._running.values()}
        now = time.monotonic()
        return [
            (node, resources)
            for node, resources in alive.items()
            if node not in busy and self._rests_until.get(node, now) <= now
        ]


def _on_node(measure: Measure, cell: Cell) -> tuple[list[Note], str | None]:
    """On the node: one cell's run; its warnings, and why it failed or None."""
    if not cell.folder.is_dir():
        return [], (
            f"node {platform.node()} does not see {cell.folder}: "
            "name an --out, and builds, on a file system that all nodes share"
        )
    warnings: list[Note] = []

    def keep(event: Event) -> None:
        if isinstance(event, Note) and event.level == "warning":
            warnings.append(event)

    return warnings, attempt(measure, cell, keep)


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise SetupError("--ray needs Ray", hint='pip install "trtspec[ray]"') from error
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdigit():  # Ray itself asks an address that does not answer for many minutes
            socket.create_connection((host, int(port)), timeout=_ANSWERS_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise SetupError(
            f"cannot join the Ray cluster: {error}",
            where=address,
            hint="`ray start --head` begins one; --ray auto finds the one of this machine",
        ) from error
    return ray
