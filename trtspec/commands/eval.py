"""Measure a build on prompts: acceptance, tokens per second against no speculation, losslessness.

BUILD runs the engine in this process. A running Triton server is named as grpc://HOST:PORT; with --build its
engine is the baseline, without there is none. Settings come from the build's config unless given here. Exit code
5 when a build that must be lossless is not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError, StageFailed

if TYPE_CHECKING:
    from trtspec.config import Config
    from trtspec.evaluate.targets import Target

HELP = "measure a build, in process or over a server: acceptance, speed-up, losslessness"

_GRPC = "grpc://"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="BUILD|URL", help="a build folder, or grpc://HOST:PORT of a Triton server"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run folder; default: runs/NAME-TIME")
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="with a URL: the build it serves, for the baseline"
    )
    parser.add_argument(
        "--model", help="with a URL: the model's name; default: as in the build, or tensorrt_llm"
    )
    parser.add_argument("--data", help="prompts: builtin, a file or folder, or a hub data set")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="run N prompts, taken in turn from each category"
    )
    parser.add_argument("--category", action="append", metavar="NAME", help="only this category; repeatable")
    parser.add_argument("--output-length", type=int, metavar="TOKENS", help="tokens per turn at most")
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests in flight")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--draft-length", type=int, metavar="D", help="in process: another than planned")
    parser.add_argument("--no-baseline", action="store_true", help="no speed-up, and no losslessness check")


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    from trtspec.evaluate.data import load_prompts, select_prompts
    from trtspec.evaluate.record import RunSettings
    from trtspec.evaluate.report import render_terminal
    from trtspec.evaluate.run import EvalRequest, evaluate

    url = arguments.target if arguments.target.startswith(_GRPC) else None
    folder = arguments.build if url else Path(arguments.target)
    config = _config_of(folder) if folder else None
    settings = _settings(arguments, config)
    data = load_prompts(settings["data"])
    prompts = select_prompts(data.prompts, count=settings["prompts"], categories=settings["categories"])
    name = config.name if config else "served"
    out = arguments.out or Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    with _targets(arguments, url, folder, config, settings["concurrency"]) as (target, baseline):
        record = evaluate(
            EvalRequest(
                name=name,
                target=target,
                baseline=baseline,
                data=data,
                prompts=prompts,
                settings=RunSettings(
                    output_length=settings["output_length"],
                    concurrency=settings["concurrency"],
                    temperature=settings["temperature"],
                    seed=settings["seed"],
                ),
                command=shlex.join(["trtspec", *sys.argv[1:]]),
                config=(folder / "config.yaml").read_text(encoding="utf-8") if folder else None,
                plan=json.loads((folder / "plan.json").read_text(encoding="utf-8")) if folder else None,
                tensor_parallel=config.engine.tensor_parallel if config else 1,
            ),
            out,
            context.emit,
        )
    result = {**record.summary(), "run": str(out)}
    text = f"{render_terminal([record])}\n{out}: written; next: trtspec report {out}"
    broken = record.lossless.mismatches and (config is None or config.lossless)
    return Outcome(result, text, StageFailed.exit_code if broken else 0)


def _config_of(folder: Path) -> Config:
    from trtspec.config import load_config
    from trtspec.manifest import read_manifest

    if read_manifest(folder) is None:
        raise ConfigError(
            "not a build folder", where=str(folder), hint="name a folder that `trtspec build` wrote"
        )
    return load_config(folder / "config.yaml")


def _settings(arguments: argparse.Namespace, config: Config | None) -> dict[str, Any]:
    """The evaluation section with what was given on the command line, checked as a config's is."""
    from pydantic import ValidationError

    from trtspec.config.schema import Evaluation

    given = {
        "data": arguments.data,
        "prompts": arguments.prompts,
        "categories": arguments.category,
        "output_length": arguments.output_length,
        "concurrency": arguments.concurrency,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
    }
    base = config.evaluation.model_dump() if config else {}
    try:
        return Evaluation(**{**base, **{k: v for k, v in given.items() if v is not None}}).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-").replace("categories", "category")
        raise ConfigError(
            f"{option}: {first['msg']}", where="command line", hint="trtspec eval --help"
        ) from error


@contextmanager
def _targets(
    arguments: argparse.Namespace,
    url: str | None,
    folder: Path | None,
    config: Config | None,
    concurrency: int,
) -> Iterator[tuple[Target, Target | None]]:
    """(what is measured, the baseline or None), closed at the end."""
    from trtspec.engines.info import EngineInfo
    from trtspec.evaluate.record import TargetFacts
    from trtspec.evaluate.targets import InProcess, TritonGrpc, engine_facts

    engine = folder / "engine" if folder else None

    def in_process(speculate: bool) -> Target:
        return InProcess.open(
            engine,
            speculate=speculate,
            draft_length=arguments.draft_length if speculate else None,
            max_queue=concurrency,
            threads=config.engine.threads,
        )

    def served() -> Target:
        model = arguments.model or (config.serving.model_name if config else "tensorrt_llm")
        transport = "triton grpc"
        if engine is None:  # of a server whose build is not here, nothing is known
            facts = TargetFacts(transport, "unknown", "unknown", None, location=url)
        else:
            facts = replace(engine_facts(EngineInfo.read(engine), engine, transport=transport), location=url)
        return TritonGrpc(url.removeprefix(_GRPC), model, facts)

    with ExitStack() as open_targets:

        def opened(target: Target) -> Target:
            open_targets.callback(target.close)
            return target

        target = opened(served() if url else in_process(speculate=True))
        baseline = opened(in_process(speculate=False)) if engine and not arguments.no_baseline else None
        yield target, baseline
