"""Make the draft a config names, from its target: any trained head, or a small draft model.

The config's target is built first, as it will be served, and answers the prompts of the `training` section; a held-out
part of the answers measures what is learned. The draft is written where speculation.draft.model points, and
`trtspec build` on the same config then deploys the pair. After an interruption the same command continues.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError

if TYPE_CHECKING:
    from trtspec.config import Config
    from trtspec.events import Emit
    from trtspec.pipeline import Build
    from trtspec.store import Store
    from trtspec.train.job import TrainRequest
    from trtspec.train.prompts import TrainingPrompt
    from trtspec.train.report import TrainingReport

_RESPONSE_LENGTH = 128

HELP = "make the draft a config names, from its target"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the YAML config; its training section says how")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a field; repeatable"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the draft's folder; default: speculation.draft.model"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done and how long it may take"
    )


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    from trtspec.config import load_config
    from trtspec.store import Store

    config = load_config(arguments.config, arguments.set)
    out = _place(config, arguments.out).absolute()
    store = Store()
    start = _start(config, store.root, context.emit)
    if arguments.dry_run:
        return _foreseen(config, out, store, context)
    report = _train(config, start, out, store, arguments, context)
    after, before = report.after, report.before
    result = {
        "out": str(out),
        "method": report.method,
        "parameters": report.parameters,
        "trained_parameters": report.trained_parameters,
        "response_tokens": report.response_tokens,
        "steps": report.steps,
        "vocabulary_coverage": report.vocabulary_coverage,
        "acceptance_length": after["acceptance_length"],
        "acceptance_length_before": before["acceptance_length"],
        "conditional_acceptance": list(after["conditional_acceptance"]),
        "by_kind": dict(after["by_kind"]),
    }
    return Outcome(result, f"{out}: {_summary(report)}\nnext: trtspec build {arguments.config}")


def _train(
    config: Config,
    start: Path | None,
    out: Path,
    store: Store,
    arguments: argparse.Namespace,
    context: Context,
) -> TrainingReport:
    from trtspec.events import StageFinished, StageStarted
    from trtspec.files import remove_tree, replace_folder
    from trtspec.models import TARGET
    from trtspec.train.job import train_draft

    teacher = _build_teacher(config, store, context)
    request = _request(config, teacher, _prompts(config), start)
    target, digest = teacher.job.models[TARGET], teacher.job.artifacts["compile"].digest
    began = time.monotonic()
    partial = out.with_name(f".{out.name}.partial")
    context.emit(StageStarted("train"))
    with store.lock(f"train-{digest}", "another process trains a draft for this target"):
        remove_tree(partial)
        partial.mkdir(parents=True)
        report = train_draft(
            request,
            store.root / "training" / digest[:16],
            partial,
            licence={"license": target.licence, "base_model": target.reference},
            command=shlex.join(["trtspec", "train", arguments.config, *_given(arguments)]),
            emit=context.emit,
        )
        replace_folder(partial, out)
    context.emit(StageFinished("train", time.monotonic() - began, _summary(report), str(out)))
    return report


def _foreseen(config: Config, out: Path, store: Store, context: Context) -> Outcome:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.models import find_config
    from trtspec.reporters import duration
    from trtspec.train.cost import Work, estimates

    training = config.training
    prompts = _prompts(config)
    wanted = len(prompts) * _response_length(config) if training.tokens is None else training.tokens
    with find_config(config.target.model, store.root, config.target.revision) as found:
        parameters = read_facts(found).parameters or 0
    work = Work(
        config.speculation.method,
        parameters,
        wanted,
        "self" in training.data,
        training.epochs,
        training.precision,
        training.draft_vocab_size is not None,
        training.options.first_position_share or 0.0,
    )
    teacher = _build_teacher(config, store, context, dry_run=True)
    stages = estimates(work, store.root / "training")
    lines = []
    for step in teacher.steps:
        took = f"; the last one took {duration(step.last_seconds)}" if step.last_seconds else ""
        lines.append(f"{step.stage:<9} {step.action:<7} {step.expects} ({step.reason}{took})")
    for one in stages:
        lines.append(
            f"{one.stage:<9} run     {one.tokens:,} tokens, about {duration(one.seconds)} by the rate of: {one.basis}"
        )
    lines.append(f"nothing was written; without --dry-run the draft goes to {out}")
    result = {
        "out": str(out),
        "method": config.speculation.method,
        "prompts": len(prompts),
        "response_tokens": wanted,
        "stages": [{"stage": one.stage, "tokens": one.tokens, "seconds": one.seconds} for one in stages],
    }
    return Outcome(result, "\n".join(lines))


def _request(
    config: Config, teacher: Build, prompts: tuple[TrainingPrompt, ...], start: Path | None
) -> TrainRequest:
    from trtspec.models import TARGET
    from trtspec.train.head_modules import METHODS
    from trtspec.train.job import TrainRequest
    from trtspec.train.prompts import FOLLOW_UP, SELF
    from trtspec.train.responses import ResponseSettings

    training, method = config.training, config.speculation.method
    # A head learns from the states it will read, the quantized target's; a draft model is cut from whole weights.
    whole = METHODS[method].layout is None
    temperature = config.workload.temperature if training.temperature is None else training.temperature
    return TrainRequest(
        method=method,
        model=teacher.job.models[TARGET].path if whole else teacher.job.artifacts["quantize"].path,
        engine=teacher.job.artifacts["compile"].path,
        prompts=prompts,
        responses=ResponseSettings(
            max_tokens=_response_length(config),
            temperature=temperature,
            tokens=training.tokens,
            invent=SELF in training.data,
            follow_up=FOLLOW_UP in training.data,
        ),
        options={name: value for name, value in training.options if value is not None},
        threads=config.engine.threads,
        start=start,
        **training.model_dump(
            exclude={"data", "tokens", "response_length", "temperature", "options", "start"}
        ),
    )


def _start(config: Config, cache: Path, emit: Emit) -> Path | None:
    """The folder of the head that training goes on from, fetched where it is on the hub, and found to be one."""
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.sources import resolve_model
    from trtspec.models import find_config
    from trtspec.train.start import read_start

    if config.training.start is None:
        return None
    folder = resolve_model(config.training.start, cache=cache, base=Path.cwd(), emit=emit).path
    with find_config(config.target.model, cache, config.target.revision) as found:
        read_start(folder, config.speculation.method, read_facts(found).layers)
    return folder


def _response_length(config: Config) -> int:
    if config.training.response_length is not None:
        return config.training.response_length
    return min(_RESPONSE_LENGTH, max(1, (config.engine.max_seq_len or 2 * _RESPONSE_LENGTH) // 2))


def _place(config: Config, out: Path | None) -> Path:
    """Where the draft goes. Raises ConfigError for a config without one, and for a folder that holds something else."""
    from trtspec.config.references import is_path
    from trtspec.train.head_modules import METHODS, REPORT

    speculation = config.speculation
    draft = getattr(speculation, "draft", None)
    if speculation.method not in METHODS:
        raise ConfigError(
            f"speculation.method is {speculation.method}: there is no draft to train",
            where="speculation.method",
            hint=f"training makes drafts for {', '.join(METHODS)}",
        )
    if out is None and draft is None:
        raise ConfigError(
            "speculation.draft is not set: there is no folder to write to",
            where="speculation.draft",
            hint="write draft: {model: ./draft}, or name a folder with --out",
        )
    if out is None and not is_path(draft.model):
        raise ConfigError(
            f"speculation.draft.model is {draft.model}, a published model: it is not made here",
            where="speculation.draft.model",
            hint="write a folder there (./draft), or name one with --out",
        )
    place = out or Path(draft.model).expanduser()
    if place.is_file() or (place.is_dir() and any(place.iterdir()) and not (place / REPORT).is_file()):
        raise ConfigError(
            f"{place} holds files that are not a trained draft; it would be replaced",
            hint="name an empty or new folder with --out",
        )
    return place


def _build_teacher(config: Config, store: Store, context: Context, *, dry_run: bool = False) -> Build:
    """The target alone, built as it will be served."""
    from trtspec.config.speculation import NoSpeculation
    from trtspec.pipeline import build

    plain = config.model_copy(update={"speculation": NoSpeculation(method="none")})
    out = store.root / "training" / f"{config.name}-target"
    return build(plain, out, context.emit, store=store, until="compile", dry_run=dry_run)


def _prompts(config: Config) -> tuple[TrainingPrompt, ...]:
    from trtspec.train.prompts import FOLLOW_UP, SELF, named_prompts

    given = [name for name in config.training.data if name not in (SELF, FOLLOW_UP)]
    return tuple(dict.fromkeys(prompt for name in given for prompt in named_prompts(name)))


def _given(arguments: argparse.Namespace) -> list[str]:
    """The options of this call, for whoever wants to repeat it."""
    sets = [part for value in arguments.set for part in ("--set", value)]
    return [*sets, *(["--out", str(arguments.out)] if arguments.out else [])]


def _summary(report: TrainingReport) -> str:
    return (
        f"{report.method}, {report.parameters / 1e6:.1f}M parameters, {report.response_tokens:,} response tokens; "
        f"held-out acceptance length {report.after['acceptance_length']:.2f} "
        f"({report.before['acceptance_length']:.2f} before)"
    )
