"""Measure a build on prompts: acceptance, tokens per second against no speculation, losslessness.

BUILD runs the engine in this process. A running Triton server is named as grpc://HOST:PORT or, over HTTP, as
http://HOST:PORT/v2, an OpenAI-compatible one (vLLM, SGLang, trtllm-serve, `trtspec serve --openai`) as
http://HOST:PORT/v1; with --build its engine is the baseline, without there is none. Settings come from the build's
config unless given here. Exit code 5 when a build that must be lossless is not.

--concurrency keeps that many conversations in flight. --rate begins so many per second, at random, whatever is in
flight; every time is then counted from the scheduled arrival. Ctrl-C keeps what had finished, marked as partial.

An OpenAI-compatible server sends text, whose tokens the tokenizer of --build or --tokenizer counts. How its drafts
fared comes from its answers, else from its vLLM counters (at concurrency 1), else from the tokens of each chunk,
which takes --build or --draft-length; the record names the source. A server's key is read from TRTSPEC_API_KEY.

Several builds of one target take turns at every prompt and are compared with one baseline (engines of another
numerics or KV format with their own): DIR/comparison.md is a table of mechanism × category, with acceptance length
and speed-up. Settings come from the first one's config.

A sweep is a YAML file of targets (builds, configs, servers), data, temperatures, draft lengths and loads; each
combination is a run in a folder of its own below --out, and one that fails does not stop the others. The same command
goes on where it stopped. --ray runs one at a time on each node of a Ray cluster whose nodes share a file system.
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
    from trtspec.evaluate.sweep.cells import Cell
    from trtspec.evaluate.targets import Target
    from trtspec.events import Emit

HELP = "measure a build, in process or over a server: acceptance, speed-up, losslessness"

_GRPC = "grpc://"
_HTTP = ("http://", "https://")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="BUILD|URL",
        help="a build folder or several, grpc://HOST:PORT or http://HOST:PORT/v2 of a Triton server, or "
        "http://HOST:PORT/v1",
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
    parser.add_argument("--data", help="prompts: builtin, a file or folder, a hub data set, or random:TOKENS")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="run N prompts, taken in turn from each category"
    )
    parser.add_argument("--category", action="append", metavar="NAME", help="only this category; repeatable")
    parser.add_argument("--output-length", type=int, metavar="TOKENS", help="tokens per turn at most")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="conversations in flight")
    load.add_argument("--rate", type=float, metavar="R", help="conversations that begin per second (Poisson)")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="begin none after so long a time of serving per arm",
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument(
        "--chat-template-args",
        type=_json_object,
        metavar="JSON",
        help="what the chat template gets besides the messages, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="D",
        help="in process: another than planned; with http://: the server's",
    )
    parser.add_argument("--no-baseline", action="store_true", help="no speed-up, and no losslessness check")
    parser.add_argument("--name", help="one target: what reports call it; default: the name of its build")
    sweep = parser.add_argument_group("sweeps")
    sweep.add_argument("--sweep", type=Path, metavar="FILE", help="make the runs a YAML file describes")
    sweep.add_argument(
        "--ray", metavar="ADDRESS", help="with --sweep: on a Ray cluster; auto finds the one of this machine"
    )
    sweep.add_argument("--dry-run", action="store_true", help="with --sweep: show its runs, make none")


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    if arguments.sweep is not None:
        from trtspec.commands import eval_sweep

        return eval_sweep.run(arguments, context)
    if not arguments.targets:
        raise ConfigError(
            "nothing to measure is named", where="command line", hint="name a build, a URL or a --sweep"
        )
    if arguments.ray or arguments.dry_run:
        raise ConfigError("--ray and --dry-run are for sweeps", where="command line", hint="add --sweep FILE")
    if len(arguments.targets) > 1:
        return _run_together(arguments, context)
    from trtspec.evaluate.report import render_terminal

    record, config, out = _measure(arguments, shlex.join(["trtspec", *sys.argv[1:]]), context.emit)
    result = {**record.summary(), "run": str(out)}
    text = f"{render_terminal([record])}\n{out}: written; next: trtspec report {out}"
    return Outcome(result, text, StageFailed.exit_code if broken(record, config) else 0)


def measure(cell: Cell, emit: Emit) -> None:
    """Make one run of a sweep. See `trtspec.evaluate.sweep.cells.Measure`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    _measure(parser.parse_args([*cell.arguments, f"--out={cell.folder}"]), cell.command, emit)


def _measure(
    arguments: argparse.Namespace, command: str, emit: Emit
) -> tuple[RunRecord, Config | None, Path]:
    """One target's run: its record, the config of its build and its folder."""
    from trtspec.evaluate.run import evaluate

    (given,) = arguments.targets
    url = given if given.startswith((_GRPC, *_HTTP)) else None
    folder = arguments.build if url else Path(given)
    config = config_of(folder) if folder else None
    settings = _settings(arguments, config)
    prompts = _prompts(arguments, settings, folder)
    out = _out(arguments, arguments.name or (config.name if config else "served"))
    in_flight = _in_flight(settings, prompts)
    with _targets(arguments, url, folder, config, in_flight) as (target, baseline):
        request = _request(settings, prompts, target, baseline, folder, config)
        named = replace(request, name=arguments.name or request.name, command=command)
        return evaluate(named, out, emit), config, out


def _run_together(arguments: argparse.Namespace, context: Context) -> Outcome:
    """Several builds of one target, in turns, against the same engine without speculation."""
    from trtspec.engines.info import EngineInfo
    from trtspec.evaluate.compare import comparison, render_markdown
    from trtspec.evaluate.report import render_terminal
    from trtspec.evaluate.run import evaluate_together
    from trtspec.files import write_atomic

    served = [target for target in arguments.targets if target.startswith((_GRPC, *_HTTP))]
    if served or arguments.build or arguments.model or arguments.name:
        raise ConfigError(
            "several targets are compared in this process: a server can only be measured alone",
            where="command line",
            hint="name build folders only; --build, --model and --name are for one target",
        )
    folders = [Path(target) for target in arguments.targets]
    configs = [config_of(folder) for folder in folders]
    _check_comparable(folders)
    settings = _settings(arguments, configs[0])
    prompts = _prompts(arguments, settings, folders[0])
    in_flight = _in_flight(settings, prompts)
    names = [config.name for config in configs]
    out = _out(arguments, "comparison")
    with ExitStack() as open_targets:

        def in_process(folder: Path, config: Config, *, speculate: bool) -> Target:
            target = _in_process(arguments, folder, config, in_flight, speculate=speculate)
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
    failed = any(broken(record, config) for record, config in zip(records, configs, strict=True))
    return Outcome(result, text, StageFailed.exit_code if failed else 0)


def _prompts(
    arguments: argparse.Namespace, settings: Mapping[str, Any], folder: Path | None
) -> tuple[PromptSet, tuple[Prompt, ...]]:
    """The data set, and the part of it that was asked for."""
    from trtspec.evaluate.data import load_prompts, select_prompts
    from trtspec.evaluate.random_tokens import prompt_length, random_prompts

    length = prompt_length(settings["data"])
    if length is None:
        data = load_prompts(settings["data"])
    elif settings["prompts"] is None:
        raise ConfigError("random tokens have no end", where="evaluation.prompts", hint="add --prompts N")
    else:
        tokenizer = _tokenizer(
            arguments, folder / "engine" if folder else None, "random tokens are drawn from its vocabulary"
        )
        data = random_prompts(tokenizer, length, settings["prompts"], settings["seed"])
    chosen = select_prompts(data.prompts, count=settings["prompts"], categories=settings["categories"])
    return data, chosen


def _in_flight(settings: Mapping[str, Any], prompts: tuple[PromptSet, tuple[Prompt, ...]]) -> int:
    """The most requests that may be under way at once: in an open loop all."""
    return settings["concurrency"] if settings["rate_per_s"] is None else len(prompts[1])


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
            rate_per_s=settings["rate_per_s"],
            time_limit_s=settings["time_limit_s"],
            chat_template_args=settings["chat_template_args"],
        ),
        command=shlex.join(["trtspec", *sys.argv[1:]]),
        config=(folder / "config.yaml").read_text(encoding="utf-8") if folder else None,
        plan=json.loads((folder / "plan.json").read_text(encoding="utf-8")) if folder else None,
        tensor_parallel=config.engine.tensor_parallel if config else 1,
    )


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


def _out(arguments: argparse.Namespace, name: str) -> Path:
    return arguments.out or Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def broken(record: RunRecord, config: Config | None) -> bool:
    """Whether a deployment that must be lossless is not."""
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


def config_of(folder: Path) -> Config:
    """The config of a build. Raises ConfigError for a folder that is none."""
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
        "rate_per_s": arguments.rate,
        "time_limit_s": arguments.time_limit,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
    }
    base = config.evaluation.model_dump() if config else {}
    if arguments.rate is not None or arguments.concurrency is not None:  # either load replaces the config's
        base = {k: v for k, v in base.items() if k not in ("rate_per_s", "concurrency")}
    try:
        checked = Evaluation(**{**base, **{k: v for k, v in given.items() if v is not None}})
        return {**checked.model_dump(), "chat_template_args": arguments.chat_template_args}
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).removesuffix("_per_s").removesuffix("_s")
        option = "--" + name.replace("_", "-").replace("categories", "category")
        raise ConfigError(
            f"{option}: {first['msg']}", where="command line", hint="trtspec eval --help"
        ) from error


@contextmanager
def _targets(
    arguments: argparse.Namespace,
    url: str | None,
    folder: Path | None,
    config: Config | None,
    in_flight: int,
) -> Iterator[tuple[Target, Target | None]]:
    """(what is measured, the baseline or None), closed at the end."""
    from trtspec.engines.info import EngineInfo
    from trtspec.evaluate.openai_target import OpenAIChat
    from trtspec.evaluate.record import TargetFacts
    from trtspec.evaluate.targets import engine_facts
    from trtspec.evaluate.triton import TritonGrpc, TritonHttp

    transport = _transport(url) if url else "in process"
    openai = transport == "openai http"
    engine = folder / "engine" if folder else None

    def in_process(speculate: bool) -> Target:
        return _in_process(arguments, folder, config, in_flight, speculate=speculate)

    def served() -> Target:
        if openai and not (arguments.model or config):
            raise ConfigError(
                "an OpenAI-compatible server may serve several models",
                where="command line",
                hint=f"add --model NAME; {url.rstrip('/')}/models lists them",
            )
        model = arguments.model or (config.serving.model_name if config else "tensorrt_llm")
        length = arguments.draft_length if openai else None
        if engine is None:  # of a server whose build is not here, nothing is known but what the user says
            facts = TargetFacts(transport, model if openai else "unknown", "unknown", length, location=url)
        else:
            facts = engine_facts(EngineInfo.read(engine), engine, draft_length=length, transport=transport)
            facts = replace(facts, location=url)
        if openai:
            tokenizer = _tokenizer(
                arguments, engine, "the server sends text, and the model's tokenizer counts it"
            )
            template_args = arguments.chat_template_args
            return OpenAIChat(url, model, tokenizer, facts, alone=in_flight == 1, template_args=template_args)
        if arguments.chat_template_args:
            raise ConfigError(
                "the served model applies its chat template by itself",
                where="--chat-template-args",
                hint="measure in process",
            )
        if transport == "triton http":
            return TritonHttp(url, model, facts)
        return TritonGrpc(url.removeprefix(_GRPC), model, facts)

    with ExitStack() as open_targets:

        def opened(target: Target) -> Target:
            open_targets.callback(target.close)
            return target

        target = opened(served() if url else in_process(speculate=True))
        baseline = opened(in_process(speculate=False)) if engine and not arguments.no_baseline else None
        yield target, baseline


def _transport(url: str) -> str:
    """How a server is spoken to: KServe's HTTP protocol has /v2 where OpenAI's has /v1."""
    if url.startswith(_GRPC):
        return "triton grpc"
    return "triton http" if url.rstrip("/").endswith("/v2") else "openai http"


def _tokenizer(arguments: argparse.Namespace, engine: Path | None, why: str) -> TextTokenizer:
    """The model's tokenizer, from --tokenizer or the build."""
    from trtspec.checkpoints.tokenizer import TextTokenizer

    folder = arguments.tokenizer or engine
    if folder is None:
        raise ConfigError(
            f"there is no tokenizer: {why}",
            where="command line",
            hint="add --tokenizer DIR, the model's folder, or --build DIR",
        )
    return TextTokenizer.load(folder)


def _in_process(
    arguments: argparse.Namespace, folder: Path, config: Config, in_flight: int, *, speculate: bool
) -> Target:
    from trtspec.evaluate.targets import InProcess

    return InProcess.open(
        folder / "engine",
        speculate=speculate,
        draft_length=arguments.draft_length if speculate else None,
        max_queue=in_flight,
        threads=config.engine.threads,
        template_args=arguments.chat_template_args,
    )
