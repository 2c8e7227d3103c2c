"""Build the deployment a config describes: plan, quantize, compile, package.

What was finished is kept: after an interruption the same command continues, and an unchanged config does no
work. --dry-run shows what would be done and writes nothing. A TensorRT build on a machine without TensorRT or a GPU
leaves a folder that is complete but for the plan, and exit code 3: `trtspec build --resume` finishes it on another.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError
from trtspec.reporters import duration

if TYPE_CHECKING:
    from trtspec.pipeline import Build

HELP = "plan, quantize, compile and package a config into a build folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from trtspec.pipeline import STAGE_NAMES

    parser.add_argument("config", nargs="?", help="the YAML config")
    parser.add_argument(
        "--resume", type=Path, metavar="BUILD", help="finish a build folder that another machine could not"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the build folder; default: out/NAME")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a field; repeatable"
    )
    parser.add_argument("--until", choices=STAGE_NAMES, help="stop after this stage")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done; write nothing")
    parser.add_argument("--fresh", action="store_true", help="run every stage, cached or not")


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    built = _resumed(arguments, context) if arguments.resume else _built(arguments, context)
    stages = [
        {
            "stage": step.stage,
            "action": step.action,
            "reason": step.reason,
            "expects": step.expects,
            "missing": list(step.missing),
            "last_seconds": step.last_seconds,
            "seconds": round(step.seconds, 3),
            "digest": step.artifact.digest if step.artifact else None,
            "bytes": step.artifact.bytes if step.artifact else None,
        }
        for step in built.steps
    ]
    result = {
        "name": built.job.config.name,
        "out": str(built.out),
        "dry_run": arguments.dry_run,
        "digest": built.digest,
        "changed": built.changed,
        "plan": dict(built.job.plan),
        "stages": stages,
    }
    return Outcome(result, "\n".join(_foreseen(built) if arguments.dry_run else _done(built)))


def _built(arguments: argparse.Namespace, context: Context) -> Build:
    from trtspec.config import load_config
    from trtspec.pipeline import build

    if arguments.config is None:
        raise ConfigError("no config and no --resume", where="command line", hint="trtspec build --help")
    config = load_config(arguments.config, arguments.set)
    return build(
        config,
        arguments.out or Path("out") / config.name,
        context.emit,
        until=arguments.until,
        fresh=arguments.fresh,
        dry_run=arguments.dry_run,
    )


def _resumed(arguments: argparse.Namespace, context: Context) -> Build:
    from trtspec.pipeline import resume

    given = ("config", "out", "set", "until", "dry_run", "fresh")
    if others := [name for name in given if getattr(arguments, name)]:
        raise ConfigError(
            f"--resume takes the build as it is, without {', '.join(others)}",
            where="command line",
            hint="trtspec build --resume BUILD",
        )
    return resume(arguments.resume, context.emit)


def _foreseen(built: Build) -> Iterator[str]:
    plan = built.job.plan
    yield f"plan      {plan['method']}, draft length {plan['draft_length']}"
    for step in built.steps:
        took = f"; the last one took {duration(step.last_seconds)}" if step.last_seconds else ""
        yield f"{step.stage:<9} {step.action:<7} {step.expects} ({step.reason}{took})"
        if step.missing:
            fix = f"trtspec doctor --backend {built.job.config.engine.backend}"
            yield f"{'':17} needs {', '.join(step.missing)}, not installed here: {fix}"
    yield f"nothing was written; without --dry-run the build goes to {built.out}"


def _done(built: Build) -> Iterator[str]:
    for step in built.steps:
        size = f"{step.artifact.bytes / 1e6:,.1f} MB" if step.artifact else ""
        spent = "unchanged" if step.action == "cached" else duration(step.seconds)
        yield f"{step.stage:<9} {spent:>12} {size:>13}"
    yield f"{built.out}: {'written' if built.changed else 'unchanged'}, digest {str(built.digest)[:16]}"
    if built.steps and built.steps[-1].stage == "package":
        own = built.job.config.engine.backend != "tensorrt_llm"
        yield f"next: trtspec serve {built.out}" if own else f"next: {built.out / 'trtllm' / 'README.md'}"
