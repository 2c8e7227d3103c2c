"""One evaluation: warm up, serve every prompt on both arms, compare the arms, write the record.

The arms take turns block by block (see `load.in_blocks`), and the one that goes first changes from block to block, so
that a machine that slows down or speeds up during the run does so under all of them. Several deployments of one target
can be evaluated together: each is an arm, and all are compared with one baseline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trtspec.errors import StageFailed
from trtspec.evaluate import lossless, specdec_bench
from trtspec.evaluate.arms import BASELINE, STAGE, Client, warm_up
from trtspec.evaluate.data import Prompt, PromptSet, selection_identity
from trtspec.evaluate.environment import read_environment
from trtspec.evaluate.export import write_aiperf
from trtspec.evaluate.journal import Journal, Served
from trtspec.evaluate.load import in_blocks
from trtspec.evaluate.record import (
    RUN_FILE,
    BlockRecord,
    DataFacts,
    RequestRecord,
    RunRecord,
    RunSettings,
)
from trtspec.evaluate.targets import Target
from trtspec.evaluate.text import number, ratio
from trtspec.events import Emit, Note, StageFinished, StageStarted


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What to evaluate. prompts: the selected part of `data`, in the order they are sent.

    baseline: the same engine without speculation; None measures no speed-up and checks no losslessness.
    command: what reproduces the run; config, plan: of the build. All are kept in the record for its report.
    """

    name: str
    target: Target
    baseline: Target | None
    data: PromptSet
    prompts: tuple[Prompt, ...]
    settings: RunSettings
    command: str | None = None
    config: str | None = None
    plan: Mapping[str, Any] | None = None
    tensor_parallel: int = 1


def evaluate(request: EvalRequest, into: Path, emit: Emit) -> RunRecord:
    """Run it and write run.json, the specdec_bench files and AIPerf's prompts into folder `into` (created if needed).

    Requests that fail are recorded and counted, and the run goes on. A run that was killed goes on in the same folder
    without repeating what had finished; after KeyboardInterrupt run.json holds that, marked as incomplete. Raises
    StageFailed when the target does not answer the warm-up or finishes no request at all, ConfigError when the folder
    holds an unfinished run of something else.
    """
    (record,) = evaluate_together({into: request}, emit)
    return record


def evaluate_together(runs: Mapping[Path, EvalRequest], emit: Emit) -> list[RunRecord]:
    """Run several deployments in turns, and write each one's record into its folder; see `evaluate`.

    All of `runs` have the same prompts and settings. A baseline that several of them name is served once.
    """
    started = time.monotonic()
    emit(StageStarted(STAGE))
    requests = list(runs.values())
    first = requests[0]
    targets = {f"deployment-{number}": request.target for number, request in enumerate(requests)}
    pairs = [
        (arm, _baseline_arm(request.baseline, targets)) for arm, request in zip(tuple(targets), requests)
    ]
    folder = next(iter(runs))
    blocks = in_blocks(first.prompts, first.settings)
    journal = Journal.open(folder, _identity(requests))
    if journal.requests:
        emit(Note(STAGE, f"{len(journal.requests)} requests were finished before; going on in {folder}"))
    for arm, target in targets.items():
        warm_up(arm, target, first.settings.warmup)
    client = Client(targets, [prompt for block in blocks for prompt in block], first.settings, emit, journal)
    served: list[Mapping[str, Served]] = []

    def finished(*, complete: bool) -> list[RunRecord]:
        sent = sum(len(block) for block in blocks[: len(served)])
        return [
            _finish(
                *(request, client, arm, plain),
                [_block(i, block, arm, plain) for i, block in enumerate(served)],
                complete=complete,
                unsent=len(first.prompts) - sent if complete else 0,
            )
            for (arm, plain), request in zip(pairs, requests, strict=True)
        ]

    try:
        for index, block in enumerate(blocks):
            if first.settings.time_limit_s is not None and client.busy_s >= first.settings.time_limit_s:
                break
            served.append(client.serve(index, block))
    except KeyboardInterrupt:
        if all(client.of((arm,), client.requests) for arm, _ in pairs):
            for record, into in zip(finished(complete=False), runs, strict=True):
                record.write(into)
        emit(
            Note(STAGE, f"interrupted; the same command with --out {_out(runs)} goes on from here", "warning")
        )
        raise
    finally:
        journal.close()
    try:
        records = finished(complete=True)
    except StageFailed:
        journal.remove()  # it holds nothing but failures
        raise
    for record, request, into in zip(records, requests, runs, strict=True):
        record.write(into)
        specdec_bench.write(record, request.prompts, into)
        write_aiperf(request.prompts, into)
        for text in _warnings(record):
            emit(Note(STAGE, f"{record.name}: {text}" if len(records) > 1 else text, "warning"))
    journal.remove()
    for text in _prompt_warnings(first.prompts):
        emit(Note(STAGE, text, "warning"))
    said = "; ".join(f"{r.name}: {_one_line(r)}" if len(records) > 1 else _one_line(r) for r in records)
    where = folder / RUN_FILE if len(runs) == 1 else _out(runs)
    emit(StageFinished(STAGE, time.monotonic() - started, said, str(where)))
    return records


def _out(runs: Mapping[Path, EvalRequest]) -> Path:
    """The folder that a command named: of one run its own, of several the one around them."""
    folder = next(iter(runs))
    return folder if len(runs) == 1 else folder.parent


def _identity(requests: Sequence[EvalRequest]) -> dict[str, Any]:
    """What has to be equal for two commands to be of one run; where a server listens is not part of it."""

    def facts(target: Target | None) -> dict[str, Any] | None:
        return target and asdict(replace(target.facts, location=None, acceptance_source=""))

    first = requests[0]
    return {
        "settings": asdict(first.settings),
        "selection of prompts": selection_identity(first.prompts),
        "deployment": [[r.name, facts(r.target), r.config] for r in requests],
        "baseline": [facts(r.baseline) for r in requests],
    }


def _baseline_arm(baseline: Target | None, targets: dict[str, Target]) -> str | None:
    """The arm of a baseline, which is added to `targets` where it is not among them yet."""
    if baseline is None:
        return None
    known = next((arm for arm, target in targets.items() if target is baseline), None)
    if known is None:
        known = f"{BASELINE}-{len(targets)}"
        targets[known] = baseline
    return known


def _finish(
    request: EvalRequest,
    client: Client,
    arm: str,
    plain: str | None,
    blocks: Sequence[BlockRecord],
    *,
    complete: bool,
    unsent: int,
) -> RunRecord:
    """The record of one deployment: its own requests and the baseline's. complete: not interrupted. unsent: prompts the
    time limit left out."""
    failures = client.of((arm, plain), client.failures)
    if not any(other == arm for other, _ in client.requests):
        raise StageFailed(
            f"all {len(failures)} requests failed; the first: {failures[0].message}",
            where=request.target.facts.location,
        )
    return RunRecord(
        name=request.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=request.settings,
        data=DataFacts(
            name=request.data.name,
            prompts=len(request.prompts),
            selection_sha256=selection_identity(request.prompts),
            revision=request.data.revision,
            files=request.data.files,
            caution=request.data.caution,
        ),
        speculative=request.target.facts,
        baseline=request.baseline.facts if request.baseline else None,
        environment=read_environment(),
        requests=client.of((arm, plain), client.requests),
        blocks=tuple(blocks),
        lossless=_check_lossless(request, client, arm, plain, complete=complete),
        failures=failures,
        command=request.command,
        config=request.config,
        plan=request.plan,
        tensor_parallel=request.tensor_parallel,
        complete=complete,
        unsent_prompts=unsent,
    )


def _block(index: int, served: Mapping[str, Served], arm: str, baseline: str | None) -> BlockRecord:
    own, plain = served[arm], served.get(baseline)
    return BlockRecord(
        index=index,
        first="baseline" if plain is not None and plain.turn < own.turn else "speculative",
        whole=own.whole and (plain is None or plain.whole),
        speculative_s=own.seconds,
        speculative_tokens=own.tokens,
        baseline_s=plain.seconds if plain else None,
        baseline_tokens=plain.tokens if plain else None,
    )


def _check_lossless(
    request: EvalRequest, client: Client, arm: str, plain: str | None, *, complete: bool
) -> lossless.LosslessReport:
    # Near ties are judged by the engine, which an interruption must not wait for.
    reason = _why_not_comparable(request) if complete else "the run was interrupted"
    if reason:
        return lossless.LosslessReport(
            0, 0, 0, not_checked=reason, acceptance=request.target.facts.acceptance
        )
    facts = request.target.facts

    def score(record: RequestRecord) -> lossless.Floats | None:
        prompt = client.prompts.get((arm, record.question_id, record.turn))
        if request.baseline is None or prompt is None:
            return None
        return request.baseline.score(prompt, record.token_ids)

    return lossless.check(
        [found for other, found in client.requests if other == arm],
        [found for other, found in client.requests if other == plain],
        exact=facts.exact,
        dtype=facts.logits_dtype,
        score=score,
        acceptance=facts.acceptance,
        by_text=facts.token_ids == "from text",
    )


def _why_not_comparable(request: EvalRequest) -> str | None:
    """Why equal output cannot be expected of the two arms; None when it can."""
    facts = request.target.facts
    if request.baseline is None:
        return "there is no baseline to compare with"
    if request.settings.temperature == 0:
        return None
    if not facts.seed_identical:
        return f"sampled output with {facts.method} equals the target's in distribution, not token for token"
    if not facts.exact:
        return "sampled output is compared token for token on an exact engine only"
    return None


def _prompt_warnings(prompts: Sequence[Prompt]) -> list[str]:
    repeated = len(prompts) - len({(prompt.system, prompt.turns) for prompt in prompts})
    if not repeated:
        return []
    return [
        f"{repeated} of the prompts repeat another word for word: repetition inflates acceptance and warms caches"
    ]


def _warnings(record: RunRecord) -> list[str]:
    found = []
    if record.data.caution:
        found.append(record.data.caution)
    if record.unsent_prompts:
        found.append(
            f"the time limit of {record.settings.time_limit_s:g} s per arm left {record.unsent_prompts} of "
            f"{record.data.prompts} prompts unsent"
        )
    if record.failures:
        first = record.failures[0]
        found.append(
            f"{len(record.failures)} requests failed; the first: {first.message} ({first.question_id})"
        )
    if record.lossless.mismatches:
        why = (
            f"{record.lossless.acceptance} acceptance is lossy, and this is what it changed"
            if record.lossless.lossy
            else "this deployment is not lossless"
        )
        found.append(f"{record.lossless.mismatches} requests differ from the baseline: {why}")
    if record.speculative.acceptance_source.startswith("none:"):
        found.append(
            f"acceptance was not measured, {record.speculative.acceptance_source.removeprefix('none: ')}"
        )
    if record.lossless.not_checked:
        found.append(f"losslessness not checked in full: {record.lossless.not_checked}")
    if record.baseline and record.baseline.transport != record.speculative.transport:
        found.append(
            f"the baseline ran {record.baseline.transport}, the deployment over {record.speculative.transport}: "
            "the speed-up includes the transport"
        )
    return found


def _one_line(record: RunRecord) -> str:
    summary = record.summary()
    return (
        f"acceptance length {number(summary['acceptance_length']['token_weighted'])} token-weighted, "
        f"{number(summary['tokens_per_s'], 1)} tokens/s, speed-up {ratio(summary['speedup'])}, "
        f"{record.lossless.mismatches} mismatches in {record.lossless.checked} checked requests"
    )
