"""One evaluation: warm up, serve every prompt on both arms, compare the arms, write the record.

The two arms take turns block by block, and the one that goes first alternates, so that a machine that slows
down or speeds up during the run does so under both. At concurrency 1 a block is one prompt; otherwise it
is two prompts per request in flight, which both arms start and drain the same way.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trtspec.errors import StageFailed
from trtspec.evaluate import lossless, specdec_bench
from trtspec.evaluate.data import Prompt, PromptSet, selection_identity
from trtspec.evaluate.environment import read_environment
from trtspec.evaluate.record import (
    Arm,
    BlockRecord,
    DataFacts,
    Failure,
    RequestRecord,
    RunRecord,
    RunSettings,
)
from trtspec.evaluate.targets import Answer, Message, Target
from trtspec.evaluate.text import number, ratio
from trtspec.events import Emit, Note, Progress, StageFinished, StageStarted
from trtspec.values import SamplingParams

STAGE = "evaluate"
_WARMUP_TEXT = "Count from one to twenty, then back to one."
_WARMUP_TOKENS = 32


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
    """Run it and write run.json and the specdec_bench files into folder `into` (created if needed).

    Requests that fail are recorded and counted, and the run goes on. Raises StageFailed when the target does
    not answer the warm-up or finishes no request at all.
    """
    started = time.monotonic()
    emit(StageStarted(STAGE))
    arms: dict[Arm, Target] = {"speculative": request.target}
    if request.baseline is not None:
        arms["baseline"] = request.baseline
    for arm, target in arms.items():
        _warm_up(arm, target, request.settings.warmup)
    client = _Client(request, arms, emit)
    blocks = tuple(client.serve(index, block) for index, block in enumerate(_blocks(request)))
    if not any(r.arm == "speculative" for r in client.requests):
        raise StageFailed(
            f"all {len(client.failures)} requests failed; the first: {client.failures[0].message}",
            where=request.target.facts.location,
        )
    record = RunRecord(
        name=request.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=request.settings,
        data=DataFacts(
            name=request.data.name,
            prompts=len(request.prompts),
            selection_sha256=selection_identity(request.prompts),
            revision=request.data.revision,
            files=request.data.files,
        ),
        speculative=request.target.facts,
        baseline=request.baseline.facts if request.baseline else None,
        environment=read_environment(),
        requests=tuple(client.requests),
        blocks=blocks,
        lossless=_check_lossless(request, client),
        failures=tuple(client.failures),
        command=request.command,
        config=request.config,
        plan=request.plan,
        tensor_parallel=request.tensor_parallel,
    )
    path = record.write(into)
    specdec_bench.write(record, request.prompts, into)
    for text in (*_prompt_warnings(request.prompts), *_warnings(record)):
        emit(Note(STAGE, text, "warning"))
    emit(StageFinished(STAGE, time.monotonic() - started, _one_line(record), str(path)))
    return record


class _Client:
    """Sends blocks of conversations to the arms and keeps what came back."""

    def __init__(self, request: EvalRequest, arms: dict[Arm, Target], emit: Emit) -> None:
        self.requests: list[RequestRecord] = []
        self.failures: list[Failure] = []
        self.prompts: dict[tuple[str, int], tuple[int, ...]] = {}
        """Token ids of each speculative request's prompt, for the losslessness check."""
        self._settings = request.settings
        self._arms = arms
        self._emit = emit
        self._total = len(arms) * sum(len(prompt.turns) for prompt in request.prompts)
        self._done = 0
        self._clock: dict[Arm, float] = dict.fromkeys(arms, 0.0)
        self._lock = threading.Lock()

    def serve(self, index: int, prompts: Sequence[Prompt]) -> BlockRecord:
        """Serve one block on each arm, first the one whose turn it is."""
        order = list(self._arms) if index % 2 == 0 else list(reversed(self._arms))
        failed_before, busy, tokens = len(self.failures), {}, {}
        for arm in order:
            before = len(self.requests)
            begin = time.perf_counter()
            pool = ThreadPoolExecutor(self._settings.concurrency, thread_name_prefix=f"eval-{arm}")
            try:
                for future in [pool.submit(self._converse, arm, index, prompt, begin) for prompt in prompts]:
                    future.result()
            finally:
                # On Ctrl-C nothing new is started; closing the target ends what runs.
                pool.shutdown(wait=False, cancel_futures=True)
            busy[arm] = time.perf_counter() - begin
            self._clock[arm] += busy[arm]
            tokens[arm] = sum(len(r.token_ids) for r in self.requests[before:])
        return BlockRecord(
            index=index,
            first=order[0],
            whole=len(self.failures) == failed_before,
            speculative_s=busy["speculative"],
            speculative_tokens=tokens["speculative"],
            baseline_s=busy.get("baseline"),
            baseline_tokens=tokens.get("baseline"),
        )

    def _converse(self, arm: Arm, block: int, prompt: Prompt, begin: float) -> None:
        """Hold one conversation; each turn follows the model's own answers to the earlier ones."""
        messages: list[Message] = [Message("system", prompt.system)] if prompt.system else []
        for turn, text in enumerate(prompt.turns):
            messages.append(Message("user", text))
            seed = _request_seed(self._settings.seed, prompt.question_id, turn)
            sampling = SamplingParams(
                max_tokens=self._settings.output_length,
                temperature=self._settings.temperature,
                seed=seed,
                ignore_eos=self._settings.ignore_eos,
            )
            start_s = self._clock[arm] + time.perf_counter() - begin
            try:
                answer = self._arms[arm].chat(f"{prompt.question_id}-{turn}-{arm}", messages, sampling)
            except Exception as error:
                # Whatever a target raises belongs in the record: one refused prompt must not cost the others.
                message = f"{type(error).__name__}: {error}"
                self._count(
                    Failure(arm, prompt.question_id, prompt.category, turn, message), len(prompt.turns) - turn
                )
                return
            self._count(_record(arm, block, prompt, turn, seed, start_s, answer), 1)
            if arm == "speculative" and answer.prompt is not None:
                self.prompts[prompt.question_id, turn] = answer.prompt
            messages.append(Message("assistant", answer.completion.text))

    def _count(self, outcome: RequestRecord | Failure, requests: int) -> None:
        with self._lock:
            if isinstance(outcome, Failure):
                self.failures.append(outcome)
            else:
                self.requests.append(outcome)
            self._done += requests
            self._emit(Progress(STAGE, "requests", self._done, self._total, "requests"))


def _record(
    arm: Arm, block: int, prompt: Prompt, turn: int, seed: int, start_s: float, answer: Answer
) -> RequestRecord:
    done = answer.completion
    return RequestRecord(
        arm=arm,
        question_id=prompt.question_id,
        category=prompt.category,
        turn=turn,
        block=block,
        prompt_tokens=done.prompt_tokens,
        prompt_sha256=hashlib.sha256(repr(answer.prompt).encode()).hexdigest()
        if answer.prompt is not None
        else None,
        token_ids=done.token_ids,
        text=done.text,
        finish_reason=done.finish_reason,
        stop_reason=done.stop_reason,
        seed=seed,
        start_s=start_s,
        ttft_s=done.ttft_s,
        total_s=done.total_s,
        steps=done.steps,
    )


def _blocks(request: EvalRequest) -> Iterator[Sequence[Prompt]]:
    concurrency = request.settings.concurrency
    size = 1 if concurrency == 1 else 2 * concurrency
    for begin in range(0, len(request.prompts), size):
        yield request.prompts[begin : begin + size]


def _request_seed(seed: int, question_id: str, turn: int) -> int:
    """Of 32 bits; depends on nothing but the run's seed, the question and the turn."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{question_id}/{turn}".encode()).digest()[:4], "big")


def _warm_up(arm: Arm, target: Target, requests: int) -> None:
    # The text is in no data set, so a cache it leaves behind serves no measured prompt.
    sampling = SamplingParams(max_tokens=_WARMUP_TOKENS, seed=0)
    for i in range(requests):
        try:
            target.chat(f"warm-up-{i}-{arm}", [Message("user", _WARMUP_TEXT)], sampling)
        except Exception as error:
            raise StageFailed(
                f"the {arm} target does not answer: {type(error).__name__}: {error}",
                where=target.facts.location,
                hint="check that it is up and that its build is whole",
            ) from error


def _check_lossless(request: EvalRequest, client: _Client) -> lossless.LosslessReport:
    reason = _why_not_comparable(request)
    if reason:
        return lossless.LosslessReport(0, 0, 0, not_checked=reason)
    facts = request.target.facts

    def score(record: RequestRecord) -> lossless.Floats | None:
        prompt = client.prompts.get((record.question_id, record.turn))
        if request.baseline is None or prompt is None:
            return None
        return request.baseline.score(prompt, record.token_ids)

    arms = {arm: [r for r in client.requests if r.arm == arm] for arm in ("speculative", "baseline")}
    return lossless.check(
        arms["speculative"], arms["baseline"], exact=facts.exact, dtype=facts.logits_dtype, score=score
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
    if record.failures:
        first = record.failures[0]
        found.append(
            f"{len(record.failures)} requests failed; the first: {first.message} ({first.question_id})"
        )
    if record.lossless.mismatches:
        found.append(
            f"{record.lossless.mismatches} requests differ from the baseline: this deployment is not lossless"
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
