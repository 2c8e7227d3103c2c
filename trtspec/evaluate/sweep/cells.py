"""The runs a sweep stands for: cells. Each is a command line of `trtspec eval` and the folder its run goes to."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from trtspec.errors import ConfigError
from trtspec.evaluate.record import RUN_FILE, RunRecord
from trtspec.evaluate.sweep.schema import Sweep, SweepTarget, as_folder_name
from trtspec.events import Emit


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. arguments: of `trtspec eval`, without --out. folder: where the run goes, absolute.

    build: whose engine it opens, None without one. server: the address that no two cells may load at once, None for
    an engine in this process.
    """

    arguments: tuple[str, ...]
    folder: Path
    build: Path | None = None
    server: str | None = None

    @property
    def name(self) -> str:
        """What it is called in its sweep."""
        return self.folder.name

    @property
    def command(self) -> str:
        """What makes the same run on its own."""
        return shlex.join(["trtspec", "eval", *self.arguments])

    def is_finished(self) -> bool:
        """Whether its run is all there. Raises ConfigError when its folder holds the run of another cell."""
        built = self.build is None or (self.build / "config.yaml").is_file()
        if not built or not (self.folder / RUN_FILE).is_file():
            return False
        record = RunRecord.read(self.folder)
        config = (self.build / "config.yaml").read_text(encoding="utf-8") if self.build else None
        if record.command != self.command:
            difference = f"made by another command: {record.command}"
        elif record.config != config:
            difference = "of a build with another config"
        else:
            return record.complete
        raise ConfigError(
            f"the run here is {difference}",
            where=str(self.folder),
            hint="delete it, or name another --out",
        )


Measure = Callable[[Cell, Emit], None]
"""Makes a cell's run in its folder, or goes on with it, and raises what `trtspec eval` would."""


def builds_in(out: Path) -> Path:
    """Where the builds of a sweep's configs lie, each by its target's label. out: the sweep's own folder."""
    return out / "builds"


def cells_of(sweep: Sweep, out: Path) -> tuple[Cell, ...]:
    """All runs, target by target, concurrency innermost. out: the sweep's folder, absolute."""
    data_names = _data_names(sweep.data or ())
    cells = []
    for target in sweep.targets:
        # A server's draft length is its own: the sweep may know it, and cannot set it.
        lengths = (target.draft_length,) if target.url else sweep.draft_length or (None,)
        axes = (sweep.data or (None,), sweep.temperature or (None,), lengths, _loads(sweep))
        build = builds_in(out) / target.label if target.config else target.build and Path(target.build)
        for data, temperature, length, (load, value) in product(*axes):
            parts = [
                target.label,
                *([data_names[data]] if data else []),
                *([f"t{temperature:g}"] if temperature is not None else []),
                *([f"d{length}"] if length else []),
                f"{load[0]}{value:g}",
            ]
            own = {
                "--data": data,
                "--temperature": temperature,
                "--draft-length": length,
                f"--{load}": value,
            }
            arguments = (*_of_target(target, build), *_options(own), *_of_all(sweep))
            cells.append(Cell(arguments, out / "-".join(parts), build, target.url))
    return tuple(cells)


def _loads(sweep: Sweep) -> list[tuple[str, float]]:
    """Option and value of each load: closed loops, then open ones."""
    closed = sweep.concurrency or (() if sweep.rate_per_s else (1,))
    return [*(("concurrency", n) for n in closed), *(("rate", rate) for rate in sweep.rate_per_s or ())]


def _of_target(target: SweepTarget, build: Path | None) -> list[str]:
    named = {"--name": target.label, "--model": target.model, "--tokenizer": target.tokenizer}
    if target.url:
        return [target.url, *_options({"--build": build, **named})]
    return [str(build), *_options(named)]


def _of_all(sweep: Sweep) -> list[str]:
    shared = {
        "--output-length": sweep.output_length,
        "--prompts": sweep.prompts,
        "--time-limit": sweep.time_limit_s,
        "--seed": sweep.seed,
    }
    categories = [f"--category={name}" for name in sweep.categories or ()]
    return [*_options(shared), *categories, *([] if sweep.baseline else ["--no-baseline"])]


def _options(values: dict[str, object]) -> list[str]:
    """Options that have a value; with an equals sign, as a value may begin with a dash."""
    return [f"{option}={value}" for option, value in values.items() if value is not None]


def _data_names(data: Sequence[str]) -> dict[str, str]:
    """A short name of each data set, numbered where two would share one."""
    names: dict[str, str] = {}
    for one in data:
        stem = as_folder_name(Path(one).stem)
        taken = sum(name == stem or name.rpartition("-")[0] == stem for name in names.values())
        names[one] = f"{stem}-{taken + 1}" if taken else stem
    return names
