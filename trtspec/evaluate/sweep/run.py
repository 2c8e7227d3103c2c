"""Making the runs of a sweep that are not made yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trtspec.errors import TrtspecError
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.sweep.cells import Cell, Measure
from trtspec.events import Emit, Event, Note, Progress, StageFinished, StageStarted

STAGE = "sweep"

Runner = Callable[[Sequence[Cell], Measure, Emit], Iterator[tuple[Cell, str | None]]]
"""Makes the runs of cells, in any order, and gives each cell once it has ended: with None, or with why it failed."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep gave. records: of the cells that finished, in their order. failed: the others, and why."""

    records: dict[Cell, RunRecord]
    failed: dict[Cell, str]


def in_process(cells: Sequence[Cell], measure: Measure, emit: Emit) -> Iterator[tuple[Cell, str | None]]:
    """One cell after the other, here."""
    for cell in cells:
        yield cell, attempt(measure, cell, emit)


def run_sweep(cells: Sequence[Cell], measure: Measure, emit: Emit, runner: Runner = in_process) -> Swept:
    """Make every run that is not there yet. A cell that fails does not keep the others from running.

    After a kill or KeyboardInterrupt the same call goes on: finished cells stay, and an unfinished one repeats no
    finished request. Raises ConfigError, before anything runs, when a folder holds the run of another sweep.
    """
    started = time.monotonic()
    emit(StageStarted(STAGE))
    missing = [cell for cell in cells if not cell.is_finished()]
    done = len(cells) - len(missing)
    if done:
        emit(Note(STAGE, f"{done} of {len(cells)} runs were finished before"))
    failed: dict[Cell, str] = {}
    for cell, problem in runner(missing, measure, emit) if missing else ():
        if problem is not None:
            failed[cell] = problem
            emit(Note(STAGE, f"{cell.name} failed: {problem}", "warning"))
        done += 1
        emit(Progress(STAGE, "runs", done, len(cells), "runs"))
    records = {cell: RunRecord.read(cell.folder) for cell in cells if cell not in failed}
    summary = f"{len(records)} of {len(cells)} runs are there"
    emit(StageFinished(STAGE, time.monotonic() - started, summary))
    return Swept(records, failed)


def attempt(measure: Measure, cell: Cell, emit: Emit) -> str | None:
    """Make one cell's run; why it failed, or None. Its progress and notes are told with its name."""

    def told(event: Event) -> None:
        match event:
            case Note():
                event = replace(event, text=f"{cell.name}: {event.text}")
            case Progress():
                event = replace(event, task=cell.name)
        emit(event)

    try:
        measure(cell, told)
    except TrtspecError as error:
        return str(error)
    except Exception as error:
        # One deployment that breaks must not cost the runs of the others; the cell's command shows its traceback.
        return f"{type(error).__name__}: {error}"
    return None
