"""An engine folder opened for generation: engine, tokenizer, drafter and decode loop behind one object.

    submit ──▶ DecodeLoop (one engine thread steps it while there is work) ──▶ on_delta, on_done

The same `Runtime` is what `trtspec eval` measures in process and what the Triton model serves, so that both run
exactly the same code. Callbacks come from the engine thread and must not block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.policy import StepCost
from trtspec.engines.base import Engine
from trtspec.engines.info import EngineInfo
from trtspec.engines.selftest import inexact_steps
from trtspec.errors import InternalError, SetupError, TrtspecError
from trtspec.plan.schedule import Schedule
from trtspec.values import Completion, Delta, GenerationRequest
from trtspec.verify.draft_length import AdaptiveLength, DraftLengthPolicy, ScheduledLength
from trtspec.verify.loop import DecodeLoop, Refused, StepResult
from trtspec.verify.lossy import open_verifier

__all__ = ["Refused", "Runtime", "RuntimeStats"]

OnDelta = Callable[[Delta], None]
OnDone = Callable[[Completion | TrtspecError], None]

# Prompt rows a step may carry beside decoding sequences: a long prompt must not stall the others for long.
_PREFILL_ROWS = 64


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Requests running and waiting, and the slots there are."""

    active: int
    queued: int
    slots: int


@dataclass(slots=True)
class _Listener:
    on_delta: OnDelta | None
    on_done: OnDone | None


class Runtime:
    """Use `Runtime.open`. Methods are safe to call from any thread."""

    def __init__(
        self, info: EngineInfo, tokenizer: TextTokenizer | None, engine: Engine, loop: DecodeLoop
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._engine = engine
        self._loop = loop
        self._listeners: dict[str, _Listener] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._broken: TrtspecError | None = None
        self._thread = threading.Thread(target=self._run, name="trtspec-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        engine: Path,
        *,
        speculate: bool = True,
        draft_length: int | None = None,
        max_concurrency: int | None = None,
        max_queue: int = 64,
        reuse_prefixes: bool = True,
        threads: int | None = None,
    ) -> Runtime:
        """Open an engine folder.

        speculate: False runs the same engine without drafts, the baseline. draft_length: kept in every step; None takes
        the planned one and its policy. max_concurrency: sequences decoded together, None for all the engine's slots.
        max_queue: requests that may wait besides. reuse_prefixes: start from the longest beginning of a prompt that
        earlier requests left in the engine (see verify/slots.py). Raises SetupError for a folder that is no engine, and
        where an engine that claims to be exact is not on this processor; ConfigError for a draft model with another
        tokenizer.
        """
        from trtspec.engines.opening import open_engine

        runner = open_engine(engine, max_batch=max_concurrency, threads=threads)
        info = runner.info
        if info.spec.exact and (failures := inexact_steps(runner)):
            raise SetupError(
                f"this processor's kernels are not row-invariant ({'; '.join(failures[:3])}): speculative output "
                "could differ from plain output",
                where=str(engine),
                hint="build with `lossless: false` and `engine.numerics: fast`, or serve on another machine",
            )
        tokenizer = TextTokenizer.load(engine)
        planned = info.speculation.get("draft_length", 0) if draft_length is None else draft_length
        drafter = None
        if speculate and planned:
            drafter = open_drafter(
                info.speculation,
                special_ids=tokenizer.special_ids,
                cost=_planned_cost(info.speculation),
                engine=engine,
                slots=runner.spec.max_batch,
                threads=threads,
                target=runner,
            )
        loop = DecodeLoop(
            runner,
            drafter,
            draft_length=planned if drafter else 0,
            length_policy=_length_policy(info.speculation) if drafter and draft_length is None else None,
            stop_token_ids=info.stop_token_ids,
            open_text=tokenizer.stream,
            max_queue=max_queue,
            prefill_rows=_PREFILL_ROWS,
            reuse_prefixes=reuse_prefixes,
            verifier=open_verifier(info.speculation.get("verification")),
        )
        return cls(info, tokenizer, runner, loop)

    def submit(
        self, request: GenerationRequest, on_delta: OnDelta | None = None, on_done: OnDone | None = None
    ) -> None:
        """Start a request and return at once.

        on_delta gets every step's `Delta`, the last with a finish_reason; on_done gets the `Completion`, or the error
        that ended this request. Raises ValueError for a request the engine cannot serve, Refused when the queue is
        full, and the engine's own error when it has stopped.
        """
        with self._wake:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise SetupError("the runtime is closed")
            if request.request_id in self._listeners:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            # Listening starts first: the engine thread may step the request before `submit` returns.
            self._listeners[request.request_id] = _Listener(on_delta, on_done)
            try:
                self._loop.submit(request)
            except BaseException:
                del self._listeners[request.request_id]
                raise
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End a request within one step, with finish_reason "cancelled"; unknown and finished ids are ignored."""
        with self._wake:
            self._loop.cancel(request_id)
            self._wake.notify()

    def generate(self, request: GenerationRequest) -> Completion:
        """Run one request to its end. Raises what ended it, if an error did."""
        return self.generate_many([request])[0]

    def generate_many(
        self, requests: Iterable[GenerationRequest], on_done: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Run requests together, as many at a time as there are slots and queue; completions in request order."""
        waiting = list(requests)
        futures: list[Future[Completion]] = []
        room = threading.Semaphore(self._loop.slots)
        for request in waiting:
            future: Future[Completion] = Future()
            futures.append(future)
            room.acquire()

            def done(outcome: Completion | TrtspecError, future: Future[Completion] = future) -> None:
                room.release()
                if isinstance(outcome, TrtspecError):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
                    if on_done is not None:
                        on_done(outcome)

            self.submit(request, on_done=done)
        return [future.result() for future in futures]

    def stats(self) -> RuntimeStats:
        """Current load."""
        return RuntimeStats(self._loop.active, self._loop.waiting, self._loop.slots)

    def close(self) -> None:
        """Cancel what runs, stop the engine thread and release the engine; calling it twice is harmless."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            for request_id in self._listeners:
                self._loop.cancel(request_id)
            self._wake.notify()
        self._thread.join()
        if self._loop.drafter is not None:
            self._loop.drafter.close()
        self._engine.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The engine thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._loop.has_work and not self._closing:
                    self._wake.wait()
                if self._closing and not self._loop.has_work:
                    return
            try:
                self._deliver(self._loop.step())
            except Exception as cause:
                self._break(cause)
                return

    def _deliver(self, result: StepResult) -> None:
        for delta in result.deltas:
            listener = self._listeners.get(delta.request_id)
            if listener is not None and listener.on_delta is not None:
                listener.on_delta(delta)
        ended = [(completion.request_id, completion) for completion in result.completions]
        ended += [(failure.request_id, failure.error) for failure in result.failures]
        for request_id, outcome in ended:
            self._end(request_id, outcome)

    def _end(self, request_id: str, outcome: Completion | TrtspecError) -> None:
        with self._wake:
            listener = self._listeners.pop(request_id, None)
        if listener is not None and listener.on_done is not None:
            listener.on_done(outcome)

    def _break(self, cause: Exception) -> None:
        """The engine failed: every request ends with its error, and none is taken any more."""
        error = cause if isinstance(cause, TrtspecError) else InternalError(f"the engine stopped: {cause}")
        error.__cause__ = cause
        with self._wake:
            self._broken = error
            pending = list(self._listeners)
        for request_id in pending:
            self._end(request_id, error)


def _length_policy(speculation: Mapping[str, Any]) -> DraftLengthPolicy | None:
    """The plan's, from what the engine carries; None where the draft length is fixed."""
    match speculation.get("draft_length_policy", "fixed"):
        case "schedule":
            entries = tuple((int(most), length) for most, length in speculation["schedule"].items())
            return ScheduledLength(Schedule(tuple(sorted(entries))).at)
        case "adaptive":
            longest = speculation["draft_length"]
            times = speculation["draft_ms"][: longest + 1]
            return AdaptiveLength(longest, _planned_cost(speculation), times, speculation["acceptance"])
    return None


def _planned_cost(speculation: Mapping[str, Any]) -> StepCost | None:
    """The plan's step times by rows, where the engine carries them: draft lengths are then the same on every run."""
    step_ms = speculation.get("step_ms")
    return StepCost(tuple(range(1, len(step_ms) + 1)), tuple(step_ms)) if step_ms else None
