"""`trtspec eval --sweep`: read the file, build the configs it names, make the runs, say what they show."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError, StageFailed

if TYPE_CHECKING:
    from trtspec.config import Config
    from trtspec.evaluate.sweep.cells import Cell
    from trtspec.evaluate.sweep.schema import Sweep

_BELONG = {"command", "sweep", "out", "ray", "dry_run", "json", "log", "debug"}


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    from trtspec.commands.eval import broken, config_of, measure
    from trtspec.config import load_file
    from trtspec.evaluate.report import render_terminal
    from trtspec.evaluate.report.verdict import verdicts_of
    from trtspec.evaluate.sweep.cells import cells_of
    from trtspec.evaluate.sweep.on_ray import on_ray
    from trtspec.evaluate.sweep.run import in_process, run_sweep
    from trtspec.evaluate.sweep.schema import Sweep
    from trtspec.stage import notes_to
    from trtspec.store import Store

    given = {
        name for name, value in vars(arguments).items() if value is not False and value not in (None, [])
    }
    if other := sorted(given - _BELONG):
        options = ", ".join(
            "targets" if name == "targets" else f"--{name.replace('_', '-')}" for name in other
        )
        raise ConfigError(
            f"a sweep takes its settings from its file, not from {options}",
            where="command line",
            hint=f"write them in {arguments.sweep}",
        )
    sweep = load_file(arguments.sweep, Sweep)
    out = (arguments.out or Path("runs") / arguments.sweep.stem).absolute()
    configs = _configs(sweep)
    cells = cells_of(sweep, out)
    if arguments.dry_run:
        return _foreseen(cells, configs, out)
    runner = partial(on_ray, address=arguments.ray) if arguments.ray else in_process
    with Store(out, notify=notes_to(context.emit)).lock("sweep", "another process makes these runs"):
        _build(configs, out, context)
        swept = run_sweep(cells, measure, context.emit, runner)
    if not swept.records:
        cell, problem = next(iter(swept.failed.items()))
        raise StageFailed(f"no run of the sweep finished; the first: {problem}", where=cell.name)
    records = list(swept.records.values())
    result = {
        "out": str(out),
        "runs": [
            {"name": cell.name, "run": str(cell.folder), **record.summary()}
            for cell, record in swept.records.items()
        ],
        "failed": [
            {"name": cell.name, "message": problem, "command": cell.command}
            for cell, problem in swept.failed.items()
        ],
        "verdicts": [verdict.as_json() for verdict in verdicts_of(records)],
    }
    lines = [render_terminal(records)]
    lines += [f"{cell.name} failed: {problem}\n  {cell.command}" for cell, problem in swept.failed.items()]
    lines.append(f"{out}: {len(records)} of {len(cells)} runs; next: trtspec report {out}")
    wrong = any(
        broken(record, config_of(cell.build) if cell.build else None)
        for cell, record in swept.records.items()
    )
    return Outcome(result, "\n".join(lines), StageFailed.exit_code if swept.failed or wrong else 0)


def _configs(sweep: Sweep) -> dict[str, Config]:
    """The configs that are built first, by their targets' labels. Raises ConfigError for a faulty one."""
    from trtspec.config import load_config

    return {
        target.label: load_config(target.config, target.set or ())
        for target in sweep.targets
        if target.config
    }


def _build(configs: dict[str, Config], out: Path, context: Context) -> None:
    """Everything is built before anything is measured: a config that cannot be built costs no runs."""
    from trtspec.evaluate.sweep.cells import builds_in
    from trtspec.pipeline import build

    for label, config in configs.items():
        build(config, builds_in(out) / label, context.emit)


def _foreseen(cells: tuple[Cell, ...], configs: dict[str, Config], out: Path) -> Outcome:
    from trtspec.evaluate.sweep.cells import builds_in

    rows = [(cell, cell.is_finished()) for cell in cells]
    lines = [f"build     {builds_in(out) / label}" for label in configs]
    lines += [
        f"{'finished' if done else 'run':<9} {cell.name}\n          {cell.command}" for cell, done in rows
    ]
    missing = sum(not done for _, done in rows)
    lines.append(f"{missing} of {len(cells)} runs are to be made in {out}; nothing was written")
    runs = [
        {"name": cell.name, "run": str(cell.folder), "command": cell.command, "finished": done}
        for cell, done in rows
    ]
    return Outcome(
        {"out": str(out), "dry_run": True, "builds": list(configs), "runs": runs}, "\n".join(lines)
    )
