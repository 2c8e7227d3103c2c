"""From prompts to a draft in a folder: responses → held-out split → vocabulary → fit → weights, report, model card.

Everything on the way lies in a work folder under the digest of the settings it depends on, so that the same request
goes on where it was interrupted, and another one takes over what it can.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trtspec.checkpoints.facts import read_facts
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.hf_folder import COMPANIONS
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.info import EngineInfo
from trtspec.errors import PlanInfeasible, StageFailed
from trtspec.events import Emit, Note, silent
from trtspec.files import remove_tree, sha256_json
from trtspec.train import cost, vocabulary
from trtspec.train.fit_job import D2T, HELD_OUT, TRAINED, TRAINING, FitJob, run_job
from trtspec.train.head_modules import METHODS, REPORT, Option
from trtspec.train.prompts import TrainingPrompt
from trtspec.train.report import TrainingReport, model_card, render_training, report_json
from trtspec.train.responses import ResponseSettings, Teacher, collect, response_tokens
from trtspec.train.start import earlier_runs, read_start, weights_digest
from trtspec.train.texts import Text, write_texts

PAGE = "training_report.html"
_HELD_OUT_AT_MOST = 10  # one of ten prompts


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """method: of head_modules.METHODS. model: folder whose states are learned from. engine: the target as it is served,
    which answers. prompts: what it is asked.

    start: folder of a trained head to go on from, which settles captured layers and vocabulary.
    held_out_prompts: never trained on, at most a tenth. captured_layers, draft_vocab_size, learning_rate: None takes
    the method's own. processes: of one machine. The rest: see ResponseSettings and FitJob.
    """

    method: str
    model: Path
    engine: Path
    prompts: tuple[TrainingPrompt, ...]
    responses: ResponseSettings
    epochs: int = 2
    batch_tokens: int = 512
    learning_rate: float | None = None
    warm_up_steps: int = 20
    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    draft_length: int = 4
    captured_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    held_out_prompts: int = 64
    evaluations: int = 10
    checkpoint_steps: int = 50
    processes: int = 1
    threads: int | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    start: Path | None = None


def train_draft(
    request: TrainRequest,
    work: Path,
    into: Path,
    *,
    licence: Mapping[str, str | None],
    command: str,
    emit: Emit = silent,
) -> TrainingReport:
    """Write a draft for the target into the empty folder `into`.

    work: folder for responses and checkpoints, of this target alone; the same request with the same folder goes on
    where it was killed, and ends with the same weights. licence: `license` and `base_model` for the model card.
    command: what the user typed. Raises PlanInfeasible for a target this method cannot be trained for, StageFailed
    when there is nothing to learn from or the loss is no number.
    """
    head = None
    if request.start is not None:
        head = read_start(request.start, request.method, read_facts(request.model).layers)
    job = _job(request, head)
    pairs = _responses(request, work, emit)
    training, held_out = split(pairs, request.held_out_prompts)
    if not training:
        raise StageFailed(
            f"{len(pairs)} responses are too few to learn from",
            where=str(request.engine),
            hint=f"give at least {_HELD_OUT_AT_MOST} prompts that fit the engine's context",
        )
    place = work / f"fit-{_digest(_job_settings(request, job), [p.text for p, _ in pairs])}"
    place.mkdir(parents=True, exist_ok=True)
    known = _vocabulary(request, head, [t for _, t in training], [t for _, t in held_out], place, emit)
    write_texts([text for _, text in training], place / TRAINING)
    write_texts([text for _, text in held_out], place / HELD_OUT)
    job.write(place)
    curves = _fit(request, [text for _, text in training], place, work.parent, emit)
    report = TrainingReport(
        method=request.method,
        command=command,
        responses=len(pairs),
        response_tokens=sum(len(text.tokens) - text.start for _, text in training),
        held_out_tokens=sum(len(text.tokens) - text.start for _, text in held_out),
        prompts_by_kind=_kinds(training),
        settings=_settings(request, job),
        earlier=[] if request.start is None else earlier_runs(request.start),
        **known,
        **curves,
    )
    shutil.copytree(place / TRAINED, into, dirs_exist_ok=True)
    if METHODS[request.method].layout is None:
        for name in COMPANIONS:
            if (request.model / name).is_file():
                shutil.copyfile(request.model / name, into / name)
    (into / REPORT).write_text(report_json(report))
    (into / PAGE).write_text(render_training(report), encoding="utf-8")
    (into / "README.md").write_text(model_card(report, licence), encoding="utf-8")
    remove_tree(place)  # its checkpoint is as large as the draft, three times over
    return report


def split(
    pairs: Sequence[tuple[TrainingPrompt, Text]], held_out: int
) -> tuple[list[tuple[TrainingPrompt, Text]], list[tuple[TrainingPrompt, Text]]]:
    """Training and held-out pairs: those whose prompts have the lowest digests are held out, `held_out` of them or a
    tenth of all, whichever is less. A prompt is on one side only, with all tasks about its answer.
    """
    count = max(1, min(held_out, len(pairs) // _HELD_OUT_AT_MOST)) if pairs else 0
    chosen = set(sorted({prompt.order for prompt, _ in pairs})[:count])
    return [x for x in pairs if x[0].order not in chosen], [x for x in pairs if x[0].order in chosen]


def _responses(request: TrainRequest, work: Path, emit: Emit) -> list[tuple[TrainingPrompt, Text]]:
    from trtspec.engines.onnxruntime import OnnxRuntimeEngine

    settings = asdict(request.responses)
    del settings["tokens"]  # more of them go on from fewer
    place = work / f"responses-{_digest(settings, [p.text for p in request.prompts])}"
    place.mkdir(parents=True, exist_ok=True)
    began, before = time.monotonic(), response_tokens(place)
    engine = OnnxRuntimeEngine(request.engine, threads=request.threads)
    try:
        info = EngineInfo.read(request.engine)
        teacher = Teacher(engine, TextTokenizer.load(request.engine), info.stop_token_ids)
        pairs = collect(teacher, request.prompts, request.responses, place, emit)
    finally:
        engine.close()
    rate, written = cost.write_rate(request.responses.invent), response_tokens(place) - before
    cost.remember(work.parent, rate, _parameters(request), written, time.monotonic() - began)
    return pairs


def _fit(
    request: TrainRequest, training: Sequence[Text], place: Path, rates: Path, emit: Emit
) -> Mapping[str, Any]:
    """Carry out the job; what it took is remembered in folder `rates` where it began at its first step."""
    anew = not any((place / name).exists() for name in ("checkpoint", TRAINED))
    began = time.monotonic()
    curves = run_job(place, request.processes, emit)
    if anew:
        first = float(request.options.get("first_position_share", 0))
        name = cost.fit_rate(request.method, request.precision, request.draft_vocab_size is not None, first)
        tokens = request.epochs * sum(len(text.tokens) for text in training)
        cost.remember(rates, name, _parameters(request), tokens, time.monotonic() - began)
    return curves


def _parameters(request: TrainRequest) -> int:
    return read_facts(request.model).parameters or 0


def _vocabulary(
    request: TrainRequest,
    start: Head | None,
    training: Sequence[Text],
    held_out: Sequence[Text],
    place: Path,
    emit: Emit,
) -> dict[str, Any]:
    """Choose and store the reduced vocabulary, if one is asked for or the head `start` has one; what the report says
    about it.
    """
    vocab_size = read_facts(request.model).vocab_size
    size = request.draft_vocab_size
    if start is not None:
        size = None if start.d2t is None else len(start.d2t)
    if size is None or size >= vocab_size:
        return {"draft_vocab_size": vocab_size, "vocabulary_coverage": 1.0}
    if start is None:
        ids = vocabulary.frequent_tokens(vocabulary.frequencies(training, vocab_size), size)
    else:
        ids = vocabulary.target_ids(start.d2t)
    covered = vocabulary.coverage(ids, vocabulary.frequencies(held_out, vocab_size))
    np.save(place / D2T, vocabulary.offsets(ids))
    emit(
        Note(
            "train", f"{size} of {vocab_size} tokens in the draft vocabulary: {covered:.1%} of held-out text"
        )
    )
    return {"draft_vocab_size": size, "vocabulary_coverage": covered}


def _job(request: TrainRequest, start: Head | None) -> FitJob:
    method = METHODS[request.method]
    layers = read_facts(request.model).layers
    captured = request.captured_layers if start is None else start.captured_layers
    if captured is None:
        captured = method.captured_layers(layers)
    if captured and captured[-1] >= layers:
        raise PlanInfeasible(
            f"layer {captured[-1]} cannot be captured, the target has {layers}, numbered from 0",
            where="training.captured_layers",
            hint=f"name layers from 0 to {layers - 1}",
        )
    return FitJob(
        model=str(request.model),
        method=request.method,
        captured_layers=captured,
        draft_length=request.draft_length,
        epochs=request.epochs,
        batch_tokens=request.batch_tokens,
        learning_rate=request.learning_rate or method.learning_rate,
        warm_up_steps=request.warm_up_steps,
        seed=request.seed,
        precision=request.precision,
        evaluations=request.evaluations,
        checkpoint_steps=request.checkpoint_steps,
        threads=request.threads,
        options={**method.options, **request.options},
        start=None if request.start is None else str(request.start),
    )


def _job_settings(request: TrainRequest, job: FitJob) -> dict[str, Any]:
    vocabulary_and_split = {
        "draft_vocab_size": request.draft_vocab_size,
        "held_out_prompts": request.held_out_prompts,
        "processes": request.processes,
        "responses": asdict(request.responses),
    }
    if request.start is not None:
        vocabulary_and_split["start"] = weights_digest(request.start)
    return _without_places(job) | vocabulary_and_split


def _settings(request: TrainRequest, job: FitJob) -> dict[str, Any]:
    """What was asked for, for the report: everything but places and the prompts themselves."""
    settings = {**_without_places(job), **asdict(request.responses), "processes": request.processes}
    del settings["method"]
    return settings


def _without_places(job: FitJob) -> dict[str, Any]:
    return {name: value for name, value in asdict(job).items() if name not in ("model", "start")}


def _kinds(pairs: Sequence[tuple[TrainingPrompt, Text]]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for prompt, _ in pairs:
        kinds[prompt.kind] = kinds.get(prompt.kind, 0) + 1
    return dict(sorted(kinds.items()))


def _digest(settings: Mapping[str, Any], prompts: Sequence[str]) -> str:
    return sha256_json({"settings": settings, "prompts": list(prompts)})[:16]
