"""Serving prompts on several arms that take turns, and keeping what came back with the arm it came from.

An arm is one deployment under test, or the baseline of one or several. Each block is served by every arm, one after the
other; the arm that goes first changes from block to block.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import TypeVar

from trtspec.errors import StageFailed
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.journal import Journal, Served
from trtspec.evaluate.load import arrivals
from trtspec.evaluate.record import Arm, Failure, RequestRecord, RunSettings
from trtspec.evaluate.targets import Answer, Message, Target
from trtspec.events import Emit, Progress
from trtspec.values import SamplingParams

STAGE = "evaluate"
BASELINE = "baseline"  # what names of such arms begin with
_WARMUP_TEXT = "Count from one to twenty, then back to one."
_WARMUP_TOKENS = 32

_Outcome = TypeVar("_Outcome", RequestRecord, Failure)


class Client:
    """Sends blocks of conversations to the arms and keeps what came back, with the arm it came from.

    What the journal holds already is not sent again; what comes back is written to it.
    """

    def __init__(
        self,
        arms: Mapping[str, Target],
        prompts: Sequence[Prompt],
        settings: RunSettings,
        emit: Emit,
        journal: Journal,
    ) -> None:
        self.requests = list(journal.requests)
        self.failures = list(journal.failures)
        self.prompts = dict(journal.prompts)
        """Token ids of each request's prompt, for the losslessness check."""
        self._journal = journal
        self._found = {(arm, r.question_id, r.turn): r for arm, r in journal.requests}
        self._stopped = threading.Event()
        self._settings = settings
        self._arms = arms
        self._emit = emit
        self._total = len(arms) * sum(len(prompt.turns) for prompt in prompts)
        turns = {prompt.question_id: len(prompt.turns) for prompt in prompts}
        self._done = len(self.requests) + sum(turns[f.question_id] - f.turn for _, f in self.failures)
        self._clock: dict[str, float] = dict.fromkeys(arms, 0.0)
        self._lock = threading.Lock()

    def of(
        self, arms: Collection[str | None], outcomes: Sequence[tuple[str, _Outcome]]
    ) -> tuple[_Outcome, ...]:
        """Those of some arms, in the order they came in."""
        return tuple(outcome for arm, outcome in outcomes if arm in arms)

    @property
    def busy_s(self) -> float:
        """How long the arm that was served longest has been served."""
        return max(self._clock.values())

    def serve(self, index: int, prompts: Sequence[Prompt]) -> dict[str, Served]:
        """Serve one block on each arm, first the one whose turn it is."""
        arms = list(self._arms)
        turn = index % len(arms)
        served = {}
        for place, arm in enumerate((*arms[turn:], *arms[:turn])):
            found = self._journal.served.get((index, arm))
            if found is None:
                failed = len(self.failures)
                found = self._serve_on(arm, place, index, prompts)
                self._journal.block(index, arm, found, [failure for _, failure in self.failures[failed:]])
            self._clock[arm] += found.seconds
            served[arm] = found
        return served

    def _serve_on(self, arm: str, place: int, index: int, prompts: Sequence[Prompt]) -> Served:
        before, failed_before = len(self.requests), len(self.failures)
        earlier = [r for other, r in self.requests if other == arm and r.block == index]
        left = [pair for pair in self._due(prompts) if not self._answered(arm, pair[1])]
        # The clock of an interrupted block goes on from the last request that had finished, in an open loop from the
        # first arrival that is left, so that none of them is late already.
        spent = max((r.start_s + r.total_s - self._clock[arm] for r in earlier), default=0.0)
        if earlier and left and left[0][0] is not None:
            spent = left[0][0]
        begin = time.perf_counter() - spent
        # In an open loop no arrival waits for a thread; they start as they are needed.
        places = self._settings.concurrency if self._settings.rate_per_s is None else len(prompts)
        pool = ThreadPoolExecutor(places, thread_name_prefix=f"eval-{arm}")
        futures: list[Future[None]] = []
        try:
            for due_s, prompt in left:
                if due_s is not None and self._stopped.wait(max(0.0, begin + due_s - time.perf_counter())):
                    break
                futures.append(pool.submit(self._converse, arm, index, prompt, begin, due_s))
            for future in futures:
                future.result()
        except BaseException:
            # On Ctrl-C nothing new is started; closing the target ends what runs, which is no failure of a request.
            with self._lock:
                self._stopped.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        seconds = time.perf_counter() - begin
        tokens = sum(len(r.token_ids) for r in (*earlier, *(r for _, r in self.requests[before:])))
        whole = not earlier and len(self.failures) == failed_before
        return Served(place, seconds, tokens, whole)

    def _due(self, prompts: Sequence[Prompt]) -> Iterator[tuple[float | None, Prompt]]:
        """When each conversation of a block is due, in seconds from its start; None as soon as there is a place."""
        rate = self._settings.rate_per_s
        if rate is None:
            return zip(repeat(None), prompts)
        return zip(arrivals(len(prompts), rate, self._settings.seed), prompts)

    def _answered(self, arm: str, prompt: Prompt) -> bool:
        """Whether the journal holds the last turn of a conversation, and so all of them."""
        return (arm, prompt.question_id, len(prompt.turns) - 1) in self._found

    def _converse(self, arm: str, block: int, prompt: Prompt, begin: float, due_s: float | None) -> None:
        try:
            self._hold(arm, block, prompt, begin, due_s)
        except BaseException:
            self._stopped.set()  # an open loop must not go on sending until somebody asks for this result
            raise

    def _hold(self, arm: str, block: int, prompt: Prompt, begin: float, due_s: float | None) -> None:
        """Hold one conversation; each turn follows the model's own answers to the earlier ones.

        due_s: its scheduled arrival, which the first turn is timed from.
        """
        role = _role(arm)
        messages: list[Message] = [Message("system", prompt.system)] if prompt.system else []
        for turn, text in enumerate(prompt.turns):
            messages.append(Message("user", text))
            found = self._found.get((arm, prompt.question_id, turn))
            if found is not None:
                messages.append(_quote(found))
                continue
            if self._stopped.is_set():
                return
            seed = _request_seed(self._settings.seed, prompt.question_id, turn)
            sampling = SamplingParams(
                max_tokens=self._settings.output_length,
                temperature=self._settings.temperature,
                seed=seed,
                ignore_eos=self._settings.ignore_eos,
            )
            sent_s = time.perf_counter() - begin
            late_s = None if due_s is None or turn else sent_s - due_s
            try:
                answer = self._arms[arm].chat(f"{prompt.question_id}-{turn}-{arm}", messages, sampling)
            except Exception as error:
                # Whatever a target raises belongs in the record: one refused prompt must not cost the others.
                message = f"{type(error).__name__}: {error}"
                failure = Failure(role, prompt.question_id, prompt.category, turn, message)
                self._count(arm, failure, len(prompt.turns) - turn)
                return
            start_s = self._clock[arm] + sent_s - (late_s or 0.0)
            record = _record(role, block, prompt, turn, seed, start_s, late_s, answer)
            self._count(arm, record, 1, answer.prompt)
            messages.append(_quote(record))

    def _count(
        self,
        arm: str,
        outcome: RequestRecord | Failure,
        requests: int,
        prompt: tuple[int, ...] | None = None,
    ) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            if isinstance(outcome, Failure):
                self.failures.append((arm, outcome))
            else:
                self.requests.append((arm, outcome))
                self._journal.request(arm, outcome, prompt)
                if prompt is not None:
                    self.prompts[arm, outcome.question_id, outcome.turn] = prompt
            self._done += requests
            self._emit(Progress(STAGE, "requests", self._done, self._total, "requests"))


def warm_up(arm: str, target: Target, requests: int) -> None:
    """Send unrecorded requests. Raises StageFailed when the target does not answer."""
    # The text is in no data set, so a cache it leaves behind serves no measured prompt.
    sampling = SamplingParams(max_tokens=_WARMUP_TOKENS, seed=0)
    for i in range(requests):
        try:
            target.chat(f"warm-up-{i}-{arm}", [Message("user", _WARMUP_TEXT)], sampling)
        except Exception as error:
            raise StageFailed(
                f"the {_role(arm)} target does not answer: {type(error).__name__}: {error}",
                where=target.facts.location,
                hint="check that it is up and that its build is whole",
            ) from error


def _role(arm: str) -> Arm:
    return "baseline" if arm.startswith(BASELINE) else "speculative"


def _quote(request: RequestRecord) -> Message:
    """What the next turn says the model answered."""
    return Message("assistant", request.text if request.quoted is None else request.quoted)


def _record(
    arm: Arm,
    block: int,
    prompt: Prompt,
    turn: int,
    seed: int,
    start_s: float,
    late_s: float | None,
    answer: Answer,
) -> RequestRecord:
    """The record of an answer, its times moved from when it was sent to when it was due."""
    done, late = answer.completion, late_s or 0.0
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
        ttft_s=late + done.ttft_s,
        total_s=late + done.total_s,
        steps=tuple(replace(step, at_s=late + step.at_s) for step in done.steps),
        cached_tokens=answer.cached_tokens,
        quoted=answer.quoted,
        late_s=late_s,
    )


def _request_seed(seed: int, question_id: str, turn: int) -> int:
    """Of 32 bits; depends on nothing but the run's seed, the question and the turn."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{question_id}/{turn}".encode()).digest()[:4], "big")
