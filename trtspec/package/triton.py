"""Write the Triton model repository of an engine: self-contained, linted, ready for any Triton with Python.

<model_name>/config.pbtxt        tensors, decoupled, CPU instances
<model_name>/1/model.py          imports the model from the installed trtspec
<model_name>/1/model.yaml        settings a user may edit
<model_name>/1/engine/           the engine's files, hard-linked where the filesystem allows
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trtspec.engines.info import FILE as ENGINE_JSON
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, PlanInfeasible, StageFailed
from trtspec.events import Emit, Note, silent
from trtspec.files import files_below, link_or_copy
from trtspec.package.contract import render_config
from trtspec.package.lint import lint_repository
from trtspec.package.settings import MODEL_YAML, ModelSettings, ServedRuntime, dump_settings

STAGE = "package"
ENGINE_FOLDER = "engine"

MODEL_PY = '''\
"""Served by trtspec: the model is in the installed package, its settings in model.yaml beside this file."""

from trtspec.package.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True, slots=True)
class PackageRequest:
    """What to package and how it is to be served.

    engine: folder with `engine.json`. model_name: the name clients use. max_concurrency: requests decoded at
    once, None for all of the engine's slots. max_queue_size: requests that may wait. reuse_prefixes: see
    `Runtime.open`. instances: copies of the engine, each in its own process. draft_length: None for the engine's
    own. threads: per instance.
    """

    engine: Path
    model_name: str
    max_concurrency: int | None = None
    max_queue_size: int = 64
    reuse_prefixes: bool = True
    instances: int = 1
    draft_length: int | None = None
    speculate: bool = True
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class PackageReport:
    """repository: what to point Triton at. files: their names in it. linked: how many are hard links."""

    repository: Path
    model_name: str
    files: tuple[str, ...]
    linked: int


def package_triton(request: PackageRequest, into: Path, emit: Emit = silent) -> PackageReport:
    """Write `into/<model_name>` and lint it. `into` must not hold that model yet.

    Raises ConfigError for a name Triton cannot carry, PlanInfeasible when the engine cannot do what is asked
    of it, SetupError when `engine` is no engine folder, StageFailed when what was written fails the lint.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", request.model_name):
        raise ConfigError(
            f"{request.model_name!r} cannot name a model",
            where="serving.model_name",
            hint="use letters, digits, '_', '-' and '.', beginning with a letter or digit",
        )
    info = EngineInfo.read(request.engine)
    _check_capacity(request, info)
    model = into / request.model_name
    version = model / "1"
    version.mkdir(parents=True)
    (model / "config.pbtxt").write_text(render_config(request.model_name, request.instances), "utf-8")
    (version / "model.py").write_text(MODEL_PY, "utf-8")
    (version / MODEL_YAML).write_text(dump_settings(_settings(request, info)), "utf-8")
    linked = _place_engine(request.engine, version / ENGINE_FOLDER)
    findings = lint_repository(into)
    if findings:
        raise StageFailed(
            "the packaged repository breaks its own rules:\n  " + "\n  ".join(map(str, findings)),
            where=str(model),
        )
    files = tuple(path.relative_to(into).as_posix() for path in files_below(into))
    emit(Note(STAGE, f"{request.model_name}: {len(files)} files, {linked} of them linked to the engine's"))
    return PackageReport(into, request.model_name, files, linked)


def _settings(request: PackageRequest, info: EngineInfo) -> ModelSettings:
    return ModelSettings(
        model=ENGINE_FOLDER,
        backend=info.backend,
        trtspec=ServedRuntime(
            max_concurrency=request.max_concurrency,
            max_queue_size=request.max_queue_size,
            reuse_prefixes=request.reuse_prefixes,
            speculate=request.speculate,
            draft_length=request.draft_length,
            threads=request.threads,
        ),
    )


def _check_capacity(request: PackageRequest, info: EngineInfo) -> None:
    """Ask of the engine only what it was compiled for: rows of one verify step, and slots."""
    where = str(request.engine / ENGINE_JSON)
    longest = info.spec.max_rows - 1
    length = request.draft_length
    if length is None:
        length = info.speculation.get("draft_length") or 0
    if request.speculate and length > longest:
        raise PlanInfeasible(
            f"draft length {length} > {longest}, the most draft tokens this engine verifies in one step",
            where=where,
            hint=f"set speculation.draft_length to {longest} or less, or compile for more rows",
        )
    slots = info.spec.max_batch
    if request.max_concurrency is not None and request.max_concurrency > slots:
        raise PlanInfeasible(
            f"max_concurrency {request.max_concurrency} > {slots}: this engine has {slots} slots",
            where=where,
            hint=f"set serving.max_concurrency to {slots} or less, or raise engine.max_batch_size",
        )


def _place_engine(engine: Path, target: Path) -> int:
    """Link or copy every engine file below `target`; how many share their content with the original."""
    linked = 0
    for source in files_below(engine):
        place = target / source.relative_to(engine)
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source, place)
        linked += place.samefile(source)
    return linked
