"""Make the draft model a config names, from its target: layer-pruned, and distilled on the target's own answers.

The config's target is built first, as it will be served, and answers the prompts. The draft is written where
speculation.draft.model points; `trtspec build` on the same config then deploys the pair. After an interruption
the same command continues.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError

if TYPE_CHECKING:
    from trtspec.config import Config
    from trtspec.pipeline import Build
    from trtspec.store import Store

HELP = "make the draft model a config names, from its target"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the YAML config; its speculation.method is draft_model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a field; repeatable"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the draft's folder; default: speculation.draft.model"
    )
    parser.add_argument("--layers", type=_count, default=4, metavar="N", help="layers to keep; default: 4")
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="prompts to answer, as evaluation.data names them; default: packaged ones",
    )
    parser.add_argument(
        "--answer-tokens", type=_count, default=64, metavar="N", help="the longest answer; default: 64"
    )
    parser.add_argument(
        "--epochs", type=_count, default=4, metavar="N", help="passes over the answers; default: 4"
    )
    parser.add_argument("--learning-rate", type=_rate, default=1e-3, metavar="RATE", help="default: 0.001")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order of the batches; default: 0")


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    from trtspec.config import load_config
    from trtspec.events import StageFinished, StageStarted
    from trtspec.files import remove_tree, replace_folder
    from trtspec.store import Store
    from trtspec.train.draft_model import TrainRequest, train_draft_model

    config = load_config(arguments.config, arguments.set)
    out = _place(config, arguments.out).absolute()
    store = Store()
    teacher = _build_teacher(config, store, context)
    target, engine = teacher.job.models["target"], teacher.job.artifacts["compile"]
    request = TrainRequest(
        target=target.path,
        engine=engine.path,
        prompts=tuple(_prompts(arguments.data)),
        layers=arguments.layers,
        answer_tokens=arguments.answer_tokens,
        temperature=config.workload.temperature,
        epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        threads=config.engine.threads,
    )
    context.emit(StageStarted("train"))
    began = time.monotonic()
    partial = out.with_name(f".{out.name}.partial")
    with store.lock(f"train-{engine.digest}", "another process trains a draft for this target"):
        remove_tree(partial)
        partial.mkdir(parents=True)
        work = store.root / "training" / engine.digest[:16]
        licence = {"license": target.licence, "base_model": target.reference}
        report = train_draft_model(request, work, partial, licence, context.emit)
        replace_folder(partial, out)
    summary = (
        f"{len(report.kept_layers)} of the target's layers, {report.parameters / 1e6:.1f}M parameters; predicts "
        f"{report.agreement_after:.1%} of held-out answer tokens ({report.agreement_before:.1%} before)"
    )
    context.emit(StageFinished("train", time.monotonic() - began, summary, str(out)))
    return Outcome(
        {"out": str(out), **asdict(report)}, f"{out}: {summary}\nnext: trtspec build {arguments.config}"
    )


def _place(config: Config, out: Path | None) -> Path:
    """Where the draft goes. Raises ConfigError for a config without one, and for a folder that holds something else."""
    from trtspec.config.references import is_path
    from trtspec.train.draft_model import REPORT

    if config.speculation.method != "draft_model":
        raise ConfigError(
            f"speculation.method is {config.speculation.method}: only a draft model is made here",
            where="speculation.method",
            hint="speculation: {method: draft_model, draft: {model: ./draft}}",
        )
    named = config.speculation.draft.model
    if out is None and not is_path(named):
        raise ConfigError(
            f"speculation.draft.model is {named}, a published model: it is not made here",
            where="speculation.draft.model",
            hint="write a folder there (./draft), or name one with --out",
        )
    place = out or Path(named).expanduser()
    if place.is_file() or (place.is_dir() and any(place.iterdir()) and not (place / REPORT).is_file()):
        raise ConfigError(
            f"{place} holds files that are not a trained draft; it would be replaced",
            hint="name an empty or new folder with --out",
        )
    return place


def _build_teacher(config: Config, store: Store, context: Context) -> Build:
    """The target alone, built as it will be served."""
    from trtspec.config.speculation import NoSpeculation
    from trtspec.pipeline import build

    plain = config.model_copy(update={"speculation": NoSpeculation(method="none")})
    return build(
        plain, store.root / "training" / f"{config.name}-target", context.emit, store=store, until="compile"
    )


def _prompts(data: str | None) -> list[str]:
    from trtspec.evaluate.data import load_prompts
    from trtspec.train.responses import packaged_prompts

    return packaged_prompts() if data is None else [prompt.turns[0] for prompt in load_prompts(data).prompts]


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def _rate(text: str) -> float:
    if not 0 < (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: above 0 and below 1")
    return value
