"""What a stage of a build is, and how a list of them is run.

Each stage is data (`Stage`): what it depends on, and a function that fills a folder. What it depends on is
hashed into a key, the store finds or builds the artifact of that key, and the next stage sees its digest.
So a build that was killed continues where it was, and an unchanged one runs nothing. A dry run walks the same
code and stops before the first side effect.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import trtspec
from trtspec import manifest
from trtspec.errors import InternalError, SetupError
from trtspec.events import Emit, Event, Note, StageFinished, StageStarted, silent
from trtspec.files import (
    JSON,
    files_below,
    sha256_file,
)
from trtspec.store import Artifact, Store

if TYPE_CHECKING:
    from trtspec.config import Config


@dataclass(frozen=True, slots=True)
class Job:
    """What a stage may look at. `artifacts` holds the stages that came before."""

    config: Config
    models: Mapping[str, manifest.ModelSource]
    plan: Mapping[str, JSON]
    artifacts: Mapping[str, Artifact] = field(default_factory=lambda: MappingProxyType({}))

    def with_artifact(self, stage: str, artifact: Artifact) -> Job:
        return replace(self, artifacts=MappingProxyType({**self.artifacts, stage: artifact}))


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a build.

    folder: its place in the build folder, None for a part of a later stage's. needs: earlier stages whose
    artifacts it reads. code: the parts of trtspec (packages or modules) that decide its bytes. tools:
    distributions that do, and that it runs with.
    depends_on: the fields of the config and plan, and the model identities, that decide its bytes.
    run: fills an empty folder. expects: one line for a dry run. data: text it calibrates or judges on.
    lacking: of a stage that may be left to another machine, what this one lacks for it (None when nothing); a build
    here then ends before it. None for a stage whose tools every machine must have.
    finish: how another machine finishes such a build, for its reader; `{folder}` stands for its folder.
    """

    name: str
    folder: str | None
    run: Callable[[Job, Path, Emit], None]
    depends_on: Callable[[Job], Mapping[str, JSON]]
    expects: Callable[[Job], str]
    data: Callable[[Job], tuple[manifest.DataSet, ...]] = lambda _job: ()
    needs: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    lacking: Callable[[], str | None] | None = None
    finish: str = "copy this folder to a machine that has it, and there: trtspec build --resume {folder}"

    def key(self, job: Job) -> dict[str, JSON] | None:
        """Everything its result depends on, or None while an artifact it needs is not built."""
        if any(name not in job.artifacts for name in self.needs):
            return None
        return {
            "stage": self.name,
            "code": code_digest(self.code),
            "tools": {tool: tool_version(tool) for tool in self.tools},
            "needs": {name: job.artifacts[name].digest for name in self.needs},
            "depends_on": dict(self.depends_on(job)),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """What a build will do, or did, for one stage. expects: see `Stage`.

    missing: absent tools. last_seconds: what another artifact of this stage took to build, if there is one.
    """

    stage: str
    action: Literal["cached", "run"]
    reason: str
    expects: str
    missing: tuple[str, ...] = ()
    last_seconds: float | None = None
    artifact: Artifact | None = None
    seconds: float = 0.0


def run_stages(
    stages: Sequence[Stage],
    job: Job,
    store: Store,
    emit: Emit = silent,
    *,
    fresh: bool = False,
    dry_run: bool = False,
) -> tuple[Job, tuple[Step, ...]]:
    """Walk the stages; returns the job with their artifacts and what was done. A dry run writes nothing.

    Ends before the first stage that is left to another machine (see `Stage.lacking`). Raises SetupError before
    anything runs when a tool of an earlier stage is missing.
    """
    steps: list[Step] = []
    if not dry_run:
        stages = runnable(stages)
        require_tools(stages)
    for stage in stages:
        step = _foresee(stage, job, store, fresh)
        if not dry_run:
            step = _execute(stage, step, job, store, emit, fresh)
        if step.artifact:
            job = job.with_artifact(stage.name, step.artifact)
        steps.append(step)
    return job, tuple(steps)


def _foresee(stage: Stage, job: Job, store: Store, fresh: bool) -> Step:
    key = stage.key(job)
    expects = stage.expects(job)
    if not fresh and key is not None and (artifact := store.find(stage.name, key)):
        return Step(stage.name, "cached", "unchanged", expects, artifact=artifact)
    if fresh:
        reason = "built again on request"
    elif key is None:
        reason = f"after {next(name for name in stage.needs if name not in job.artifacts)}"
    else:
        reason = "not built yet with these inputs"
    return Step(stage.name, "run", reason, expects, missing_tools(stage), store.last_seconds(stage.name))


def _execute(stage: Stage, step: Step, job: Job, store: Store, emit: Emit, fresh: bool) -> Step:
    """Find or build the artifact of one stage; its own start and end events give way to ours."""
    if (key := stage.key(job)) is None:
        raise InternalError(
            f"stage {stage.name} is listed before one that it needs: {', '.join(stage.needs)}"
        )
    emit(StageStarted(stage.name, cached=step.action == "cached"))
    summary = ""

    def relay(event: Event) -> None:
        nonlocal summary
        if isinstance(event, StageFinished):
            summary = event.summary
        elif not isinstance(event, StageStarted):
            emit(event)

    began = time.monotonic()
    artifact = store.get_or_build(stage.name, key, lambda folder: stage.run(job, folder, relay), fresh=fresh)
    seconds = time.monotonic() - began
    if step.action == "run":
        emit(StageFinished(stage.name, seconds, summary, str(artifact.path)))
    return replace(step, artifact=artifact, seconds=seconds, action="cached" if artifact.cached else "run")


def runnable(stages: Sequence[Stage]) -> Sequence[Stage]:
    """The stages before the first that this machine lacks something for and another may finish."""
    for count, stage in enumerate(stages):
        if stage.lacking is not None and stage.lacking():
            return stages[:count]
    return stages


def require_tools(stages: Sequence[Stage]) -> None:
    """Raise SetupError when a stage's tool is missing (versions are in every key: it cannot be cached either)."""
    if lacking := {stage.name: lacks for stage in stages if (lacks := missing_tools(stage))}:
        names = ", ".join(dict.fromkeys(tool for tools in lacking.values() for tool in tools))
        raise SetupError(
            f"{', '.join(lacking)} needs {names}, not installed in this Python",
            hint="pip install 'trtspec[cpu]'; `trtspec doctor` shows what each backend lacks",
        )


def missing_tools(stage: Stage) -> tuple[str, ...]:
    """The stage's distributions that are not installed."""
    return tuple(tool for tool in stage.tools if tool_version(tool) is None)


@cache
def code_digest(parts: tuple[str, ...]) -> str:
    """Hex digest of the source of some parts of trtspec: what other code built is never taken for current."""
    root = Path(trtspec.__file__).parent
    total = hashlib.sha256()
    for part in sorted(parts):
        place = root / part
        files = files_below(place) if place.is_dir() else [place.with_suffix(".py")]
        for path in files:
            if "__pycache__" not in path.parts:
                total.update(f"{path.relative_to(root).as_posix()} {sha256_file(path)}\n".encode())
    return total.hexdigest()


@cache
def tool_version(distribution: str) -> str | None:
    """Installed version of a Python distribution, None when it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def notes_to(emit: Emit) -> Callable[[str], None]:
    """The store's notices as warnings of a build."""
    return lambda text: emit(Note("store", text, "warning"))
