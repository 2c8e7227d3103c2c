"""Measure a build on prompts: acceptance, tokens per second against no speculation, losslessness.

BUILD runs the engine in this process. A running Triton server is named as grpc://HOST:PORT, an OpenAI-compatible one
(vLLM, SGLang, trtllm-serve, `trtspec serve --openai`) as http://HOST:PORT/v1; with --build its engine is the
baseline, without there is none. Settings come from the build's config unless given here. Exit code 5 when a build
that must be lossless is not.

An OpenAI-compatible server sends text, whose tokens the tokenizer of --build or --tokenizer counts. How its drafts
fared comes from its answers, else from its vLLM counters (at concurrency 1), else from the tokens of each chunk,
which takes --build or --draft-length; the record names the source. A server's key is read from TRTSPEC_API_KEY.

Several builds of one target take turns at every prompt and are compared with one baseline (engines of another
numerics or KV format with their own): DIR/comparison.md is a table of mechanism × category, with acceptance length
and speed-up. Settings come from the first one's config.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError, StageFailed

if TYPE_CHECKING:
    from trtspec.checkpoints.tokenizer import TextTokenizer
    from trtspec.config import Config
    from trtspec.evaluate.data import Prompt, PromptSet
    from trtspec.evaluate.record import RunRecord
    from trtspec.evaluate.run import EvalRequest
    from trtspec.evaluate.targets import Target

HELP = "measure a build, in process or over a server: acceptance, speed-up, losslessness"

_GRPC = "grpc://"
_HTTP = ("http://", "https://")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="BUILD|URL",
        help="a build folder or several, grpc://HOST:PORT of a Triton server, or http://HOST:PORT/v1",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run folder; an unfinished run in it goes on; default: runs/NAME-TIME",
    )
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="with a URL: the build it serves, for the baseline"
    )
    parser.add_argument(
        "--model", help="with a URL: the model's name; default: as in the build, or tensorrt_llm"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="with http://: the model's tokenizer; default: the build's",
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
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="D",
        help="in process: another than planned; with http://: the server's",
    )
    parser.add_argument("--no-baseline", action="store_true", help="no speed-up, and no losslessness check")


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    if len(arguments.targets) > 1:
        return _run_together(arguments, context)
    from trtspec.evaluate.report import render_terminal
    from trtspec.evaluate.run import evaluate

    (given,) = arguments.targets
    url = given if given.startswith((_GRPC, *_HTTP)) else None
    folder = arguments.build if url else Path(given)
    config = _config_of(folder) if folder else None
    settings = _settings(arguments, config)
    prompts = _prompts(settings)
    out = _out(arguments, config.name if config else "served")
    with _targets(arguments, url, folder, config, settings["concurrency"]) as (target, baseline):
        request = _request(settings, prompts, target, baseline, folder, config)
        record = evaluate(request, out, context.emit)
    result = {**record.summary(), "run": str(out)}
    text = f"{render_terminal([record])}\n{out}: written; next: trtspec report {out}"
    return Outcome(result, text, StageFailed.exit_code if _broken(record, config) else 0)


def _run_together(arguments: argparse.Namespace, context: Context) -> Outcome:
    """Several builds of one target, in turns, against the same engine without speculation."""
    from trtspec.engines.info import EngineInfo
    from trtspec.evaluate.compare import comparison, render_markdown
    from trtspec.evaluate.report import render_terminal
    from trtspec.evaluate.run import evaluate_together
    from trtspec.files import write_atomic

    served = [target for target in arguments.targets if target.startswith((_GRPC, *_HTTP))]
    if served or arguments.build or arguments.model:
        raise ConfigError(
            "several targets are compared in this process: a server can only be measured alone",
            where="command line",
            hint="name build folders only",
        )
    folders = [Path(target) for target in arguments.targets]
    configs = [_config_of(folder) for folder in folders]
    _check_comparable(folders)
    settings = _settings(arguments, configs[0])
    prompts = _prompts(settings)
    names = [config.name for config in configs]
    out = _out(arguments, "comparison")
    with ExitStack() as open_targets:

        def in_process(folder: Path, config: Config, *, speculate: bool) -> Target:
            target = _in_process(arguments, folder, config, settings["concurrency"], speculate=speculate)
            open_targets.callback(target.close)
            return target

        baselines: dict[Hashable, Target] = {}

        def baseline(folder: Path, config: Config) -> Target | None:
            """Shared by all engines whose plain output is the same by construction."""
            if arguments.no_baseline:
                return None
            info = EngineInfo.read(folder / "engine")
            numerics = info.kv_group, info.spec.exact
            if numerics not in baselines:
                baselines[numerics] = in_process(folder, config, speculate=False)
            return baselines[numerics]

        requests = {}
        for number, (name, folder, config) in enumerate(zip(names, folders, configs, strict=True), 1):
            target = in_process(folder, config, speculate=True)
            plain = baseline(folder, config)
            run_folder = out / (f"{name}-{number}" if names.count(name) > 1 else name)
            requests[run_folder] = _request(settings, prompts, target, plain, folder, config)
        records = evaluate_together(requests, context.emit)
    table = out / "comparison.md"
    compared = comparison(records)
    write_atomic(table, render_markdown(records) + "\n")
    write_atomic(out / "comparison.json", json.dumps(compared, indent=1, ensure_ascii=False) + "\n")
    result = {**compared, "table": str(table), "folders": [str(folder) for folder in requests]}
    text = f"{render_terminal(records)}\n{table}: written; next: trtspec report {out}/*/"
    broken = any(_broken(record, config) for record, config in zip(records, configs, strict=True))
    return Outcome(result, text, StageFailed.exit_code if broken else 0)


def _prompts(settings: Mapping[str, Any]) -> tuple[PromptSet, tuple[Prompt, ...]]:
    """The data set, and the part of it that was asked for."""
    from trtspec.evaluate.data import load_prompts, select_prompts

    data = load_prompts(settings["data"])
    chosen = select_prompts(data.prompts, count=settings["prompts"], categories=settings["categories"])
    return data, chosen


def _request(
    settings: Mapping[str, Any],
    prompts: tuple[PromptSet, tuple[Prompt, ...]],
    target: Target,
    baseline: Target | None,
    folder: Path | None,
    config: Config | None,
) -> EvalRequest:
    from trtspec.evaluate.record import RunSettings
    from trtspec.evaluate.run import EvalRequest

    data, chosen = prompts
    return EvalRequest(
        name=config.name if config else "served",
        target=target,
        baseline=baseline,
        data=data,
        prompts=chosen,
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
    )


def _out(arguments: argparse.Namespace, name: str) -> Path:
    return arguments.out or Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def _broken(record: RunRecord, config: Config | None) -> bool:
    found = record.lossless
    return bool(found.mismatches) and not found.lossy and (config is None or config.lossless)


def _check_comparable(folders: Sequence[Path]) -> None:
    """Raise ConfigError unless all builds hold the same target."""
    from trtspec.manifest import read_manifest

    def weights(folder: Path) -> set[tuple[str, str]]:
        files = read_manifest(folder)["files"]
        return {
            (f["name"], f["sha256"])
            for f in files
            if f["name"].startswith("target/") and f["name"].endswith(".safetensors")
        }

    first = weights(folders[0])
    for folder in folders[1:]:
        if weights(folder) != first:
            raise ConfigError(
                f"not a build of the same target as {folders[0]}: its weights differ",
                where=str(folder),
                hint="one baseline serves all builds; evaluate builds of different targets one by one",
            )


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
    from trtspec.evaluate.openai_target import OpenAIChat
    from trtspec.evaluate.record import TargetFacts
    from trtspec.evaluate.targets import TritonGrpc, engine_facts

    over_http = url is not None and url.startswith(_HTTP)
    engine = folder / "engine" if folder else None

    def in_process(speculate: bool) -> Target:
        return _in_process(arguments, folder, config, concurrency, speculate=speculate)

    def served() -> Target:
        if over_http and not (arguments.model or config):
            raise ConfigError(
                "an OpenAI-compatible server may serve several models",
                where="command line",
                hint=f"add --model NAME; {url.rstrip('/')}/models lists them",
            )
        model = arguments.model or (config.serving.model_name if config else "tensorrt_llm")
        transport = "openai http" if over_http else "triton grpc"
        if engine is None:  # of a server whose build is not here, nothing is known but what the user says
            length = arguments.draft_length if over_http else None
            facts = TargetFacts(transport, model if over_http else "unknown", "unknown", length, location=url)
        else:
            length = arguments.draft_length if over_http else None
            facts = engine_facts(EngineInfo.read(engine), engine, draft_length=length, transport=transport)
            facts = replace(facts, location=url)
        if over_http:
            return OpenAIChat(url, model, _tokenizer(arguments, engine), facts, alone=concurrency == 1)
        return TritonGrpc(url.removeprefix(_GRPC), model, facts)

    with ExitStack() as open_targets:

        def opened(target: Target) -> Target:
            open_targets.callback(target.close)
            return target

        target = opened(served() if url else in_process(speculate=True))
        baseline = opened(in_process(speculate=False)) if engine and not arguments.no_baseline else None
        yield target, baseline


def _tokenizer(arguments: argparse.Namespace, engine: Path | None) -> TextTokenizer:
    """What counts the tokens of a server that sends text."""
    from trtspec.checkpoints.tokenizer import TextTokenizer

    folder = arguments.tokenizer or engine
    if folder is None:
        raise ConfigError(
            "an OpenAI-compatible server sends text: its tokens are counted by the model's tokenizer",
            where="command line",
            hint="add --tokenizer DIR, the model's folder, or --build DIR",
        )
    return TextTokenizer.load(folder)


def _in_process(
    arguments: argparse.Namespace, folder: Path, config: Config, concurrency: int, *, speculate: bool
) -> Target:
    from trtspec.evaluate.targets import InProcess

    return InProcess.open(
        folder / "engine",
        speculate=speculate,
        draft_length=arguments.draft_length if speculate else None,
        max_queue=concurrency,
        threads=config.engine.threads,
    )
