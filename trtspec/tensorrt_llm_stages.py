"""The stages of the `tensorrt_llm` backend: checkpoints, version-correct settings, a Triton repository.

Nothing is compiled ahead; TensorRT-LLM loads checkpoints. Settings follow from the plan alone, so where a model's
weights are not on this machine everything else is built, and another machine adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.events import Emit, Note
from trtspec.files import files_below, link_or_copy
from trtspec.manifest import ModelSource
from trtspec.models import DRAFT, TARGET
from trtspec.stage import Job, Stage
from trtspec.stage_requests import QUANTIZE_DRAFT

if TYPE_CHECKING:
    from trtspec.trtllm.derive import Settings

FOLDER = "trtllm"


def _settings(job: Job) -> Settings:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.trtllm.derive import derive

    settings = derive(job.config, job.plan, read_facts(job.models[TARGET].config))
    if DRAFT in job.models:
        _check_head(job, settings.version)
    return settings


def _check_head(job: Job, version: str) -> None:
    """Raise PlanInfeasible for a head that this version loads and runs wrongly."""
    from trtspec.checkpoints.heads import HeadFacts, inspect_model
    from trtspec.trtllm.contract import contract_for
    from trtspec.trtllm.pair import head_faults

    contract, draft = contract_for(version), inspect_model(job.models[DRAFT].config)
    decoding = contract.type_of(str(job.plan["method"]))
    if decoding is None or not isinstance(draft, HeadFacts):
        return
    for fault in head_faults(contract, decoding, draft):
        raise PlanInfeasible(fault.message, where="speculation.draft.model", hint=fault.instead)


def _identity(job: Job) -> Mapping[str, object]:
    """What the settings are made of; equal settings are equal files."""
    settings = _settings(job)
    serving = job.config.serving
    return {
        "version": settings.version,
        "values": dict(settings.values),
        "reasons": dict(settings.reasons),
        "notes": list(settings.notes),
        "model_name": serving.model_name,
        "instances": serving.instances,
        "http_port": serving.http_port,
        "max_queue_size": serving.max_queue_size,
    }


def _configure(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.trtllm.package import write_settings
    from trtspec.trtllm.repository import write_own_repository

    settings, serving = _settings(job), job.config.serving
    for note in settings.notes:
        emit(Note("compile", note))
    write_settings(settings, serving.model_name, serving.instances, serving.http_port, into)
    repository = into / "repository"
    write_own_repository(settings, serving.model_name, serving.instances, serving.max_queue_size, repository)


def _package(job: Job, into: Path, _emit: Emit) -> None:
    from trtspec.trtllm.package import write_repository

    write_repository(_settings(job), job.config.serving.model_name, job.config.serving.instances, into)


def _place_head(job: Job, into: Path, _emit: Emit) -> None:
    """The head's folder as it is: TensorRT-LLM reads its config and weights itself."""
    source = job.models[DRAFT].path
    if source is None:
        raise ConfigError("the draft has no weights on this machine", where="speculation.draft.model")
    for file in files_below(source):
        place = into / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(file, place)


CONFIGURE = Stage(
    name="compile",
    folder=FOLDER,
    run=_configure,
    depends_on=_identity,
    expects=lambda job: f"settings of TensorRT-LLM {_settings(job).version}; nothing is compiled ahead",
    code=("trtllm", "tensorrt_llm_stages", "package"),
    tools=("pyyaml", "tritonclient"),
)
PACKAGE = Stage(
    name="package",
    folder="repository",
    run=_package,
    depends_on=_identity,
    expects=lambda job: f"Triton model {job.config.serving.model_name}, the container's own code",
    needs=("compile",),
    code=("trtllm", "tensorrt_llm_stages", "package"),
    tools=("tritonclient",),
)
PLACE_HEAD = Stage(
    name="draft",
    folder="draft",
    run=_place_head,
    depends_on=lambda job: {"model": job.models[DRAFT].identity},
    expects=lambda _job: "the draft as it is, linked",
    code=("tensorrt_llm_stages",),
)


def stages_of(quantize: Stage, quantize_draft: Stage, method: str, with_draft: bool) -> tuple[Stage, ...]:
    """The stages of a build. quantize, quantize_draft: those of the other backends, for a target and a draft model."""
    draft = (quantize_draft if method == "draft_model" else PLACE_HEAD,) if with_draft else ()
    return (quantize, *draft, CONFIGURE, PACKAGE)


def without_weights(stages: Sequence[Stage], models: Mapping[str, ModelSource]) -> tuple[Stage, ...]:
    """The stages with those that need weights this machine lacks moved to the end and left to another one.

    models: after they were fetched; `path` is None where that was not possible.
    """
    absent = [model for model in models.values() if model.path is None]
    if not absent:
        return tuple(stages)
    names = " and ".join(model.reference for model in absent)
    fields = {TARGET: "target.model", DRAFT: "speculation.draft.model"}
    given = [f"--set {fields[model.role]}=FOLDER" for model in absent if model.kind == "config"]
    command = " ".join(["trtspec build {folder}/config.yaml --out {folder}", *given])
    finish = f"copy this folder to a machine that has them, or can fetch them, and beside it: {command}"
    without = {TARGET: ("quantize",), DRAFT: (PLACE_HEAD.name, QUANTIZE_DRAFT)}
    left = [name for model in absent for name in without[model.role]]
    here = [stage for stage in stages if stage.name not in left]
    elsewhere = [
        replace(stage, lacking=lambda: f"the weights of {names}", finish=finish)
        for stage in stages
        if stage.name in left
    ]
    return (*here, *elsewhere)
