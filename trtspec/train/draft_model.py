"""A draft model made from its target: answers of the target → layer-pruned copy → distillation → model folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoints.facts import read_facts
from trtspec.checkpoints.hf_folder import COMPANIONS, quiet_transformers
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.info import EngineInfo
from trtspec.errors import StageFailed
from trtspec.events import Emit, silent
from trtspec.files import pretty_json, remove_tree, sha256_json
from trtspec.train.responses import Example, answer

REPORT = "training_report.json"
_HELD_OUT = 10  # every tenth answer is never trained on


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """target: unquantized model folder the draft is cut from. engine: the target's engine folder, the teacher.

    prompts: what the teacher answers, at `temperature`, with `answer_tokens` at most. layers: decoder layers kept.
    threads: of the engine and of PyTorch, None for all; another number gives weights that differ in their last bits.
    """

    target: Path
    engine: Path
    prompts: tuple[str, ...]
    layers: int = 4
    answer_tokens: int = 64
    temperature: float = 0.0
    epochs: int = 4
    learning_rate: float = 1e-3
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class TrainReport:
    """kept_layers: of the target, 0-based. agreement_*: share of held-out answer tokens that the draft would have
    written too, given the true text before them: what is accepted at the first draft position of answers to prompts
    like these. Other prompts accept less.
    """

    kept_layers: tuple[int, ...]
    parameters: int
    trained_parameters: int
    answers: int
    answer_tokens: int
    heldout_tokens: int
    steps: int
    agreement_before: float
    agreement_after: float


def train_draft_model(
    request: TrainRequest, work: Path, into: Path, licence: Mapping[str, str | None], emit: Emit = silent
) -> TrainReport:
    """Write a draft model for `request.target` into the empty folder `into`.

    work: folder for answers and checkpoints, of these two models alone; the same request with the same folder goes
    on where it was killed. licence: `license` and `base_model` for the model card. Raises PlanInfeasible for a target
    that cannot be pruned, StageFailed when there is nothing to learn from or the loss is no number.
    """
    import torch

    from trtspec.train.distill_torch import Schedule, agreement, distill, pruned_copy

    examples = _answers(request, work, emit)
    heldout, training = examples[::_HELD_OUT], [e for i, e in enumerate(examples) if i % _HELD_OUT]
    if not training:
        raise StageFailed(
            f"{len(examples)} answers are too few to learn from",
            where=str(request.engine),
            hint=f"give at least {_HELD_OUT} prompts that fit the engine's context",
        )
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    with quiet_transformers():
        model, kept = pruned_copy(request.target, request.layers)
        before = agreement(model, heldout)
        schedule = Schedule(request.epochs, learning_rate=request.learning_rate, seed=request.seed)
        place = work / f"draft-{_key(request)}"
        place.mkdir(parents=True, exist_ok=True)
        steps = distill(model, training, schedule, place, emit)
        report = TrainReport(
            kept_layers=kept,
            parameters=sum(p.numel() for p in model.parameters()),
            trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            answers=len(examples),
            answer_tokens=sum(len(e.tokens) - e.start for e in training),
            heldout_tokens=sum(len(e.tokens) - e.start for e in heldout),
            steps=steps,
            agreement_before=before,
            agreement_after=agreement(model, heldout),
        )
        model.to(getattr(torch, read_facts(request.target).dtype or "float32")).save_pretrained(into)
    for name in COMPANIONS:
        if (request.target / name).is_file():
            shutil.copyfile(request.target / name, into / name)
    settings = {**_settings(request), "prompts": len(request.prompts)}
    (into / REPORT).write_text(pretty_json({"request": settings, "report": asdict(report)}))
    (into / "README.md").write_text(_card(request, report, licence), encoding="utf-8")
    remove_tree(place)  # the checkpoint: as large as the draft, three times over
    return report


def _answers(request: TrainRequest, work: Path, emit: Emit) -> list[Example]:
    from trtspec.engines.onnxruntime import OnnxRuntimeEngine

    settings = _settings(request)
    place = work / f"answers-{_digest(settings, ('prompts', 'answer_tokens', 'temperature'))}"
    place.mkdir(parents=True, exist_ok=True)
    engine = OnnxRuntimeEngine(request.engine, threads=request.threads)
    try:
        return answer(
            engine,
            TextTokenizer.load(request.engine),
            EngineInfo.read(request.engine).stop_token_ids,
            request.prompts,
            place,
            max_tokens=request.answer_tokens,
            temperature=request.temperature,
            emit=emit,
        )
    finally:
        engine.close()


def _settings(request: TrainRequest) -> dict[str, Any]:
    """What decides the draft besides the models, which `work` stands for."""
    return {name: value for name, value in asdict(request).items() if name not in ("target", "engine")}


def _key(request: TrainRequest) -> str:
    settings = _settings(request)
    return _digest(settings, tuple(settings))


def _digest(settings: Mapping[str, object], names: tuple[str, ...]) -> str:
    return sha256_json({name: settings[name] for name in names})[:16]


def _card(request: TrainRequest, report: TrainReport, licence: Mapping[str, str | None]) -> str:
    front = [f"{name}: {value}" for name, value in licence.items() if value]
    lines = [
        "---",
        *front,
        "---",
        f"# Draft model with {len(report.kept_layers)} layers",
        "",
        f"Layers {', '.join(map(str, report.kept_layers))} of its target, distilled by trtspec from the target's own "
        f"answers: {report.answer_tokens:,} tokens, {report.steps:,} steps, {request.epochs} epochs, seed "
        f"{request.seed}. It proposes tokens for that target to verify, and is no language model to talk to.",
        "",
        f"Share of {report.heldout_tokens:,} held-out answer tokens it predicts, given the true text before them: "
        f"{report.agreement_after:.1%} ({report.agreement_before:.1%} before distillation). The prompts were like "
        "those it was trained on; measure other text with `trtspec eval`.",
    ]
    return "\n".join(lines) + "\n"
