"""The only place that knows the order of a build: models → plan → quantize → compile → package → folder.

models    where each model comes from; fetched or converted where that is needed
plan      what will be built and why; arithmetic, done every time
STAGES    the expensive rest, each found in the store or run (see stage.py)
folder    all of it put in place in one step (see build_folder.py)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from trtspec import manifest
from trtspec.acceptance_gate import with_acceptance_gate
from trtspec.build_folder import refuse_foreign, write_build
from trtspec.errors import ConfigError, SetupError
from trtspec.events import Emit, Note, StageFinished, StageStarted, silent
from trtspec.files import JSON
from trtspec.manifest import ModelSource
from trtspec.models import TARGET, describe_models, find_configs, pin_revisions
from trtspec.stage import Job, Stage, Step, notes_to, require_tools, run_stages, runnable
from trtspec.stages import STAGES, check_buildable, stages_for
from trtspec.store import Store
from trtspec.tensorrt_llm_stages import without_weights

if TYPE_CHECKING:
    from trtspec.config import Config
    from trtspec.plan import Plan
    from trtspec.plan.measured import Measured

PLAN = "plan"
STAGE_NAMES = (PLAN, *(stage.name for stage in STAGES))


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build, or in a dry run the foreseen one.

    job: what the stages saw. steps: one for each stage after the plan. digest: over all files, None in a dry
    run. changed: whether anything in `out` was written.
    """

    out: Path
    job: Job
    steps: tuple[Step, ...]
    digest: str | None
    changed: bool


def build(
    config: Config,
    out: Path,
    emit: Emit = silent,
    *,
    store: Store | None = None,
    until: str | None = None,
    fresh: bool = False,
    dry_run: bool = False,
) -> Build:
    """Build `config` into folder `out`, up to and including stage `until` (None: all of STAGE_NAMES).

    A dry run writes nothing but, for a hub model whose config.json is not on this machine, that file in the
    hub's own cache. Raises any TrtspecError of the stages; what finished before stays in the store. A build that
    another machine must finish is written as far as it goes, and then SetupError says how (see `resume`).
    """
    from trtspec.config import dump_config

    store = store or Store(notify=notes_to(emit))
    last = STAGE_NAMES[-1] if until is None else until
    backend = config.engine.backend
    chosen = () if last == PLAN else stages_for("none", last, backend)
    fetch = bool(chosen) and not dry_run
    refuse_foreign(out)
    if fetch:
        # What cannot be built is refused, on the config files alone, before anything is fetched or converted.
        require_tools(runnable(chosen))
        with find_configs(config, store.root) as configs:
            check_buildable(config, plan_config(config, configs).method)
    # TensorRT-LLM's settings need no weights: what this machine lacks of them, another one adds.
    may_lack = backend == "tensorrt_llm"
    with describe_models(config, store.root, emit, fetch=fetch, may_lack=may_lack) as models:
        pinned = pin_revisions(config, models)
        job = Job(pinned, models, _plan(pinned, models, emit))
        if chosen:
            check_buildable(config, str(job.plan["method"]))
            needed = stages_for(str(job.plan["method"]), last, backend, drafts=len(models) - 1)
            chosen = with_acceptance_gate(needed, pinned)
            if fetch and may_lack:
                chosen = without_weights(chosen, models)
        job, steps = run_stages(chosen, job, store, emit, fresh=fresh, dry_run=dry_run)
    if dry_run:
        return Build(out, job, steps, None, False)
    digest, changed = write_build(job, chosen, out, dump_config(pinned), store)
    _refuse_unfinished(chosen[len(steps) :], out)
    return Build(out, job, steps, digest, changed)


def resume(folder: Path, emit: Emit = silent, *, store: Store | None = None) -> Build:
    """Finish on this machine a build that another one left in `folder`, from the first stage it could not run.

    A finished one is built again from there: a plan belongs to one TensorRT and one GPU. Needs nothing but the
    folder. Raises ConfigError for a folder that is no such build, and SetupError when a file of it is damaged or
    this machine lacks something too.
    """
    from trtspec.config import load_config

    store = store or Store(notify=notes_to(emit))
    record = manifest.read_manifest(folder)
    if record is None:
        raise ConfigError(f"{folder} is not a trtspec build", hint="name the folder `trtspec build` wrote")
    if damaged := manifest.damaged_files(folder, record):
        raise SetupError(
            "the build is not as it was written:\n  " + "\n  ".join(damaged),
            where=str(folder),
            hint="copy the folder again",
        )
    config = load_config(folder / "config.yaml")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    models = manifest.sources_of(record)
    method, backend = str(plan["method"]), config.engine.backend
    chosen = stages_for(method, STAGE_NAMES[-1], backend, drafts=len(models) - 1)
    here = next((count for count, stage in enumerate(chosen) if stage.lacking is not None), None)
    if here is None:
        raise ConfigError(
            f"builds of the {backend} backend are not resumed: the command that made one continues it",
            where=str(folder),
            hint=f"trtspec build {folder / 'config.yaml'} --out {folder}",
        )
    _refuse_unfinished(chosen[here:] if runnable(chosen) != chosen else (), folder)
    kept = {
        stage.name: manifest.artifact_of(folder, record, stage.name, stage.folder)
        for stage in chosen[:here]
        if stage.folder  # any other is in the folder of the stage that it is a part of
    }
    job = Job(config, models, plan, MappingProxyType(kept))
    job, steps = run_stages(chosen[here:], job, store, emit)
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    digest, changed = write_build(job, chosen, folder, text, store, earlier=record)
    return Build(folder, job, steps, digest, changed)


def _refuse_unfinished(rest: Sequence[Stage], out: Path) -> None:
    """Raise SetupError, naming the command that finishes the build, when stages are left to another machine."""
    if rest and rest[0].lacking is not None:
        raise SetupError(
            f"stage {rest[0].name} needs {rest[0].lacking()}, not on this machine; everything before it is built",
            where=str(out),
            hint=rest[0].finish.format(folder=out.absolute().name),
        )


def plan_config(config: Config, configs: Mapping[str, Path], measured: Measured | None = None) -> Plan:
    """The plan of a config. configs: role → config.json or model folder; measured: a run to believe, if any.

    Raises ConfigError (files that do not fit together) and PlanInfeasible (with the nearest feasible change).
    """
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.heads import inspect_model
    from trtspec.plan import make_plan

    drafts = [inspect_model(place) for role, place in configs.items() if role != TARGET]
    first = drafts[0] if drafts else None
    return make_plan(config, read_facts(configs[TARGET]), draft=first, others=drafts[1:], measured=measured)


def _plan(config: Config, models: Mapping[str, ModelSource], emit: Emit) -> dict[str, JSON]:
    from trtspec.plan.explain import summary

    emit(StageStarted(PLAN))
    began = time.monotonic()
    plan = plan_config(config, {role: model.config for role, model in models.items()})
    for text in plan.warnings:
        emit(Note(PLAN, text, "warning"))
    emit(StageFinished(PLAN, time.monotonic() - began, summary(plan)))
    return plan.as_json()
