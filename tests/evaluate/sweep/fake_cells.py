"""Cells whose engine is a fake one: the target needs no model, the rest is the code that real ones run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.evaluate.conftest import FakeTarget
from trtspec.errors import StageFailed
from trtspec.evaluate.data import Prompt, PromptSet
from trtspec.evaluate.record import RunSettings
from trtspec.evaluate.run import EvalRequest, evaluate
from trtspec.evaluate.sweep.cells import Cell, cells_of
from trtspec.evaluate.sweep.schema import Sweep
from trtspec.events import Emit

PROMPTS = tuple(Prompt(f"q{i}", "chat", (f"question {i}",)) for i in range(10))
REQUESTS = 2 * len(PROMPTS)
SENT = "sent"
ATTEMPT = "attempt"


class Logged(FakeTarget):
    """Writes the id of every request it answers to a file, which outlives the process."""

    def __init__(self, log: Path, **kwargs: object) -> None:
        super().__init__(seconds_per_step=0.01, **kwargs)
        self._log = log

    def chat(self, request_id, messages, sampling):
        write_line(self._log, request_id)
        return super().chat(request_id, messages, sampling)


def write_line(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def options_of(cell: Cell) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in cell.arguments if word.startswith("--"))


def measure(cell: Cell, emit: Emit) -> None:
    """One run of a fake build. A build called "broken" fails."""
    options = options_of(cell)
    if options["name"] == "broken":
        raise StageFailed("the engine does not open")
    cell.folder.mkdir(parents=True, exist_ok=True)
    write_line(cell.folder / SENT, f"{ATTEMPT} {os.getpid()}")
    log = cell.folder / SENT
    request = EvalRequest(
        options["name"],
        Logged(log, accepted=(2, 0)),
        Logged(log),
        PromptSet("here", PROMPTS, ()),
        PROMPTS,
        RunSettings(output_length=9, concurrency=int(options["concurrency"])),
        command=cell.command,
        config=(cell.build / "config.yaml").read_text() if cell.build else None,
    )
    evaluate(request, cell.folder, emit)


def cells_in(folder: Path, *names: str, concurrency: Sequence[int] = (1,)) -> tuple[Cell, ...]:
    """Cells of fake builds of some names, below `folder`."""
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.yaml").write_text(f"name: {name}\n")
    targets = [{"build": str(folder / name)} for name in names]
    return cells_of(Sweep(targets=targets, concurrency=list(concurrency)), folder / "out")


def attempts(cell: Cell) -> list[list[str]]:
    """Ids of the requests that each attempt at a cell sent, warm-ups left out."""
    found: list[list[str]] = []
    for line in (cell.folder / SENT).read_text().splitlines():
        if line.startswith(ATTEMPT):
            found.append([])
        elif not line.startswith("warm-up"):
            found[-1].append(line)
    return found


def pid_of(cell: Cell) -> int:
    """Of the process that works, or last worked, on a cell."""
    lines = [line for line in (cell.folder / SENT).read_text().splitlines() if line.startswith(ATTEMPT)]
    return int(lines[-1].split()[1])
