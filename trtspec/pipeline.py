"""The only place that knows the order of a build: models → plan → quantize → compile → package → folder.

models    where each model comes from; fetched or converted where that is needed
plan      what will be built and why; arithmetic, done every time
STAGES    the expensive rest, each found in the store or run (see stage.py)
folder    all of it put in place in one step (see build_folder.py)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.build_folder import refuse_foreign, write_build
from trtspec.events import Emit, Note, StageFinished, StageStarted, silent
from trtspec.files import JSON
from trtspec.manifest import ModelSource
from trtspec.models import DRAFT, TARGET, describe_models, find_configs, pin_revisions
from trtspec.stage import Job, Step, notes_to, require_tools, run_stages
from trtspec.stages import STAGES, check_buildable, stages_for
from trtspec.store import Store

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
    hub's own cache. Raises any TrtspecError of the stages; what finished before stays in the store.
    """
    from trtspec.config import dump_config

    store = store or Store(notify=notes_to(emit))
    last = STAGE_NAMES[-1] if until is None else until
    chosen = STAGES[: STAGE_NAMES.index(last)]
    fetch = bool(chosen) and not dry_run
    refuse_foreign(out)
    if fetch:
        # What cannot be built is refused, on the config files alone, before anything is fetched or converted.
        require_tools(chosen)
        with find_configs(config, store.root) as configs:
            check_buildable(config.engine.backend, plan_config(config, configs).method)
    with describe_models(config, store.root, emit, fetch=fetch) as models:
        pinned = pin_revisions(config, models)
        job = Job(pinned, models, _plan(pinned, models, emit))
        if chosen:
            check_buildable(config.engine.backend, str(job.plan["method"]))
            chosen = stages_for(str(job.plan["method"]), last)
        job, steps = run_stages(chosen, job, store, emit, fresh=fresh, dry_run=dry_run)
    if dry_run:
        return Build(out, job, steps, None, False)
    digest, changed = write_build(job, chosen, out, dump_config(pinned), store)
    return Build(out, job, steps, digest, changed)


def plan_config(config: Config, configs: Mapping[str, Path], measured: Measured | None = None) -> Plan:
    """The plan of a config. configs: role → config.json or model folder; measured: a run to believe, if any.

    Raises ConfigError (files that do not fit together) and PlanInfeasible (with the nearest feasible change).
    """
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.heads import inspect_model
    from trtspec.plan import make_plan

    draft = inspect_model(configs[DRAFT]) if DRAFT in configs else None
    return make_plan(config, read_facts(configs[TARGET]), draft=draft, measured=measured)


def _plan(config: Config, models: Mapping[str, ModelSource], emit: Emit) -> dict[str, JSON]:
    from trtspec.plan.explain import summary

    emit(StageStarted(PLAN))
    began = time.monotonic()
    plan = plan_config(config, {role: model.config for role, model in models.items()})
    for text in plan.warnings:
        emit(Note(PLAN, text, "warning"))
    emit(StageFinished(PLAN, time.monotonic() - began, summary(plan)))
    return plan.as_json()
