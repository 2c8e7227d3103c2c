"""The stages of a build as data: what each depends on, and how it is called. What each is asked: stage_requests.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.drafters.catalog import DRAFTERS, TOKEN_HEADS
from trtspec.engine_parts import DATASTORE, place_parts
from trtspec.errors import PlanInfeasible
from trtspec.events import Emit
from trtspec.manifest import DataSet
from trtspec.models import TARGET
from trtspec.stage import Job, Stage
from trtspec.stage_requests import (
    COMPILE_DRAFT,
    NOWHERE,
    QUANTIZE_DRAFT,
    compile_draft_request,
    compile_request,
    draft_source,
    drafts_with_head,
    head_model,
    head_request,
    mark,
    measuring_prompts,
    package_request,
    quantize_draft_request,
    quantize_request,
    settings_of,
    shipped_text,
)
from trtspec.tensorrt_llm_stages import stages_of as tensorrt_llm_stages_of
from trtspec.tensorrt_stages import check_runs
from trtspec.tensorrt_stages import stages_of as tensorrt_stages_of

if TYPE_CHECKING:
    from trtspec.config import Config


def check_buildable(config: Config, method: str) -> None:
    """Raise PlanInfeasible for a plan that no stage here can carry out."""
    backend = config.engine.backend
    runs = [spec.method for spec in DRAFTERS if backend in spec.backends]
    if method != "none" and method not in runs:
        raise PlanInfeasible(
            f"the {backend} backend does not run {method}",
            where="speculation.method",
            hint=f"it runs {', '.join(['none', *runs])}",
        )
    if backend == "tensorrt":
        check_runs(config, method)
    if backend == "tensorrt_llm":
        from trtspec.trtllm import derive

        derive.check_runs(config, method)


def _quantize(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.quantize import quantize

    quantize(quantize_request(job), into, emit)


def _quantize_data(job: Job) -> tuple[DataSet, ...]:
    return _calibration_data() if _quantizes(job) else ()


def _calibration_data() -> tuple[DataSet, ...]:
    return shipped_text("calibration.jsonl"), shipped_text("heldout.jsonl")


def _quantizes(job: Job) -> bool:
    return job.config.target.quantization != "none" or job.config.target.kv_cache != "auto"


def _quantize_draft(job: Job, into: Path, emit: Emit, number: int | None) -> None:
    from trtspec.quantize import quantize

    quantize(quantize_draft_request(job, number), into, emit)


def _compile(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.engine import compile_engine

    compile_engine(compile_request(job), into, emit)
    method = str(job.plan["method"])
    if drafts_with_head(method):
        from trtspec.compile.heads import compile_head

        compile_head(head_request(job), into, emit)
    if method in TOKEN_HEADS:
        from trtspec.compile.heads.measure import measure_head

        measure_head(method, into, measuring_prompts(into), emit)
    place_parts(job, into, COMPILE_DRAFT)


def _make_datastore(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.drafters.datastore_build import provide_datastore

    provide_datastore(job.config.speculation.datastore, job.models[TARGET].path or NOWHERE, into, emit)


def _datastore_identity(job: Job) -> str:
    from trtspec.drafters.datastore_build import datastore_identity

    return datastore_identity(job.config.speculation.datastore)


def _datastore_data(job: Job) -> tuple[DataSet, ...]:
    """Text whose beginnings become drafts; the licence of a user's own is the user's to know."""
    given = job.config.speculation.datastore
    named = ("Python standard library", "PSF-2.0") if given == "stdlib" else (Path(given).name, None)
    return (DataSet(*named, _datastore_identity(job)),)


def _compile_draft(job: Job, into: Path, emit: Emit, number: int | None) -> None:
    from trtspec.compile.engine import compile_engine

    compile_engine(compile_draft_request(job, number), into, emit)


def _package(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.package import package_triton

    package_triton(package_request(job), into, emit)


def _expect_quantize(job: Job) -> str:
    target = job.config.target
    if not _quantizes(job):
        return "the model as it is, linked"
    samples, tokens = target.calibration.samples, target.calibration.tokens
    size = job.plan["memory"]["weight_bytes"] / 1e6
    return f"{target.quantization}, calibrated on {samples} × {tokens} tokens at most; about {size:,.0f} MB"


def _expect_compile(job: Job) -> str:
    engine, plan = job.config.engine, job.plan
    return f"{engine.backend} on {engine.device}, {plan['method']} with draft length {plan['draft_length']}"


# What every build runs; `stages_for` adds what a method needs besides.
STAGES: tuple[Stage, ...] = (
    Stage(
        name="quantize",
        folder="target",
        run=_quantize,
        depends_on=lambda job: {
            "model": job.models[TARGET].identity,
            **settings_of(quantize_request(job), "model"),
        },
        expects=_expect_quantize,
        data=_quantize_data,
        code=("quantize", "checkpoints"),
        tools=("torch", "transformers", "nvidia-modelopt"),
    ),
    Stage(
        name="compile",
        folder="engine",
        run=_compile,
        depends_on=lambda job: settings_of(compile_request(job), "model"),
        expects=_expect_compile,
        needs=("quantize",),
        code=("compile", "engines", "checkpoints"),
        tools=("torch", "transformers", "onnx", "onnxruntime"),
    ),
    Stage(
        name="package",
        folder="repository",
        run=_package,
        depends_on=lambda job: settings_of(package_request(job), "engine"),
        expects=lambda job: (
            f"Triton model {job.config.serving.model_name}, {job.config.serving.instances} instance(s)"
        ),
        needs=("compile",),
        code=("package",),
    ),
)

_QUANTIZE, _COMPILE, _PACKAGE = STAGES

# A head's files are what its drafter reads, and its hits are counted on held-out text.
_COMPILE_WITH_HEAD = replace(
    _COMPILE,
    depends_on=lambda job: {
        **_COMPILE.depends_on(job),
        "head": head_model(job).identity,
        "measured_on": shipped_text("heldout.jsonl").sha256,
    },
    data=lambda _job: (shipped_text("heldout.jsonl"),),
    code=(*_COMPILE.code, "drafters", "quantize/corpora"),
)


def _stages_of_draft(number: int | None) -> tuple[Stage, Stage]:
    """A draft is quantized and compiled as a target is."""
    from trtspec.drafters.draft_model import draft_folder

    quantize = replace(
        _QUANTIZE,
        name=f"{QUANTIZE_DRAFT}{mark(number)}",
        folder=draft_folder(number),
        run=partial(_quantize_draft, number=number),
        depends_on=lambda job: {
            "model": draft_source(job, number)[0].identity,
            **settings_of(quantize_draft_request(job, number), "model"),
        },
        expects=lambda job: f"the draft's weights, format {draft_source(job, number)[1]}",
        data=lambda job: () if draft_source(job, number)[1] == "none" else _calibration_data(),
    )
    compile_it = replace(
        _COMPILE,
        name=f"{COMPILE_DRAFT}{mark(number)}",
        folder=None,
        run=partial(_compile_draft, number=number),
        depends_on=lambda job: settings_of(compile_draft_request(job, number), "model"),
        expects=lambda job: f"the draft's own engine on {job.config.engine.backend}",
        needs=(quantize.name,),
    )
    return quantize, compile_it


_MAKE_DATASTORE = Stage(
    name=DATASTORE,
    folder=None,
    run=_make_datastore,
    depends_on=lambda job: {"model": job.models[TARGET].identity, "text": _datastore_identity(job)},
    expects=lambda job: f"tokens and suffix array of {job.config.speculation.datastore}",
    data=_datastore_data,
    code=("drafters/datastore", "drafters/datastore_build"),
    tools=("tokenizers", "safetensors"),
)


def stages_for(method: str, last: str, backend: str, drafts: int = 0) -> tuple[Stage, ...]:
    """The stages of a build with this planned method, up to and including the one of STAGES named `last`.

    drafts: models that the config names besides the target.

    A draft model, and the target's own draft, is quantized and compiled like a target before the engine that it
    becomes a part of; so is a datastore made.
    """
    stages = STAGES
    numbers = range(drafts) if method == "specinfer" else (None,)
    of_drafts = {number: _stages_of_draft(number) for number in numbers}
    if backend == "tensorrt":
        quantize_drafts = {number: quantize for number, (quantize, _) in of_drafts.items()}
        exports = tensorrt_stages_of(method, quantize_drafts, _MAKE_DATASTORE)
        stages = (_QUANTIZE, *exports, _PACKAGE)
    elif backend == "tensorrt_llm":
        stages = tensorrt_llm_stages_of(_QUANTIZE, _stages_of_draft(None)[0], method, drafts > 0)
    elif method == "rest":
        with_datastore = replace(_COMPILE, needs=(*_COMPILE.needs, DATASTORE))
        stages = (_MAKE_DATASTORE, _QUANTIZE, with_datastore, _PACKAGE)
    elif method in ("draft_model", "quantspec", "specinfer"):
        engines = tuple(compiled.name for _, compiled in of_drafts.values())
        with_drafts = replace(_COMPILE, needs=(*_COMPILE.needs, *engines))
        stages = (_QUANTIZE, *chain.from_iterable(of_drafts.values()), with_drafts, _PACKAGE)
    elif drafts_with_head(method):
        stages = (_QUANTIZE, _COMPILE_WITH_HEAD, _PACKAGE)
    names = [stage.name for stage in stages]
    return stages[: names.index(last) + 1]
