"""The decode loop: draft → verify → commit for many requests over the slots of one engine.

Every step runs one forward pass with **every active sequence** in it: decoding ones with their last token and its
drafts, new ones with a piece of their prompt. When one leaves, its slot goes to the next waiting request, which
starts from the prompt rows that the slots hold already (see slots.py).

`submit` and `cancel` may be called from any thread; `step` from one only.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from trtspec.drafters.base import NOTHING, Ask, Draft, Drafter, check_draft
from trtspec.engines.base import Engine, SlotLogits, SlotStep
from trtspec.errors import InternalError, TrtspecError
from trtspec.values import Completion, Delta, GenerationRequest
from trtspec.verify.acceptance import Verifier, verify
from trtspec.verify.draft_length import DraftLengthPolicy
from trtspec.verify.probabilities import TargetDistribution
from trtspec.verify.randomness import PositionRandom
from trtspec.verify.sequence import Sequence, check_request
from trtspec.verify.slots import Slots
from trtspec.verify.text import StreamingText

log = logging.getLogger(__name__)

_NO_HIDDEN = np.empty((0, 0), np.float32)


class Refused(RuntimeError):
    """The queue is full; the request was not taken and may be sent again later."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended in an error of its own; the others went on."""

    request_id: str
    error: TrtspecError


@dataclass(slots=True)
class StepResult:
    """What one step did. A request's last entry is its completion or its failure, exactly one of them."""

    deltas: list[Delta] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class DecodeLoop:
    """Continuous batching with speculation.

    engine: the target. drafter: None decodes plainly. draft_length: most tokens one proposal may have; the
    engine's rows, the context limit and max_tokens bound it further. length_policy: how many of them in each
    step, None for as many as there may be. stop_token_ids: the model's own.
    open_text: makes the text of one request from its stop strings; None emits ids only. max_concurrency:
    slots in use, at most the engine's. max_queue: waiting requests, past which `submit` refuses.
    prefill_rows: prompt tokens one step takes while others decode (None: as many as fit), so that a long
    prompt does not stall running streams; results do not depend on it. reuse_prefixes: a request starts from the
    longest prefix that a slot holds, where the engine is exact and the drafter reads no hidden states (there are none
    of rows that are not computed). verifier: the acceptance rule. clock: seconds, monotonic.

    Raises ValueError for settings that do not fit the engine. An error of the engine itself leaves `step` as
    it is and ends the loop; an error of one request (logits that are not finite, a drafter that broke its
    contract) ends that one.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None = None,
        *,
        draft_length: int = 0,
        length_policy: DraftLengthPolicy | None = None,
        stop_token_ids: Collection[int] = (),
        open_text: Callable[[tuple[str, ...]], StreamingText] | None = None,
        max_concurrency: int | None = None,
        max_queue: int = 64,
        prefill_rows: int | None = None,
        reuse_prefixes: bool = True,
        verifier: Verifier = verify,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spec = engine.spec
        if drafter is not None and not 1 <= draft_length < spec.max_rows:
            raise ValueError(
                f"draft_length is {draft_length}, must be from 1 to max_rows - 1 = {spec.max_rows - 1}"
            )
        if drafter is not None and drafter.spec.shape == "tree" and not spec.trees:
            raise ValueError(f"{drafter.spec.method} proposes token trees and this engine runs chains only")
        if prefill_rows is not None and prefill_rows < 1:
            raise ValueError(f"prefill_rows is {prefill_rows}, must be at least 1")
        if max_concurrency is not None and not 1 <= max_concurrency <= spec.max_batch:
            raise ValueError(f"max_concurrency is {max_concurrency}, must be from 1 to {spec.max_batch}")
        self.engine = engine
        self.drafter = drafter
        self.draft_length = draft_length
        self._length_policy = length_policy
        self._stop_ids = frozenset(stop_token_ids)
        self._open_text = open_text
        self._max_queue = max_queue
        self._prefill_rows = min(prefill_rows or spec.max_rows, spec.max_rows)
        self._verify = verifier
        self._clock = clock
        self._lock = threading.Lock()  # guards the three below
        self._waiting: deque[Sequence] = deque()
        self._known: set[str] = set()
        self._cancelled: set[str] = set()
        blind = drafter is None or drafter.spec.hidden_states == "none"
        self._slots = Slots(
            engine, max_concurrency or spec.max_batch, reuse=reuse_prefixes and spec.exact and blind
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ValueError when it cannot be served, Refused when the queue is full."""
        check_request(request, self.engine.spec)
        sequence = self._sequence(request)
        with self._lock:
            if request.request_id in self._known:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            if len(self._waiting) >= self._max_queue + self.slots - self.active:
                raise Refused(
                    f"{self._max_queue} requests are waiting already (max_queue_size); try again later"
                )
            self._known.add(request.request_id)
            self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step with what it has; unknown and finished ids are ignored."""
        with self._lock:
            if request_id in self._known:
                self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._known)

    @property
    def slots(self) -> int:
        """Requests that run together at most."""
        return len(self._slots)

    @property
    def active(self) -> int:
        """Requests in a slot."""
        return len(self._slots.running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def step(self) -> StepResult:
        """Run one forward pass and give back what it emitted. Does nothing without work."""
        result = StepResult()
        self._end_cancelled(result)
        self._schedule(result)
        self._propose(result)
        running = self._slots.running
        if not running:
            return result
        steps = [self._rows(sequence) for sequence in running]
        outputs = self.engine.forward(steps)
        now = self._clock()
        for step, sequence, output in zip(steps, running, outputs, strict=True):
            self._contained(sequence, result, self._advance, step, output, now, result)
        return result

    # -- before the forward pass

    def _sequence(self, request: GenerationRequest) -> Sequence:
        spec, sampling = self.engine.spec, request.sampling
        if sampling.stop and self._open_text is None:
            raise ValueError("stop strings need a tokenizer, and this loop has none")
        room = spec.max_seq_len - len(request.prompt)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        model_stops = frozenset() if sampling.ignore_eos else self._stop_ids
        return Sequence(
            request=request,
            seed=seed,
            limit=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            stop_ids=model_stops.union(sampling.stop_token_ids),
            target=TargetDistribution(sampling, spec.tokenizer_vocab_size, request.prompt),
            random=PositionRandom(seed),
            text=self._open_text(sampling.stop) if self._open_text else None,
            submitted_s=self._clock(),
            prompt=np.array(request.prompt, np.int64),
        )

    def _end_cancelled(self, result: StepResult) -> None:
        with self._lock:
            ids, self._cancelled = self._cancelled, set()
            if not ids:
                return
            queued = [s for s in self._waiting if s.request.request_id in ids]
            self._waiting = deque(s for s in self._waiting if s.request.request_id not in ids)
        running = [s for s in self._slots.running if s.request.request_id in ids]
        for sequence in (*queued, *running):
            result.deltas.append(sequence.cancel())
            self._finish(sequence, result)

    def _schedule(self, result: StepResult) -> None:
        """Fill the slots and give each prompt its piece of this step.

        The step's budget of prompt rows goes to prompts in order of arrival, and no request takes a slot
        before there is budget for it: finishing one prompt before starting the next gives the lowest mean
        time to first token.
        """
        running = self._slots.running
        budget = self._prefill_rows if any(s.decoding for s in running) else self.engine.spec.max_rows
        for sequence in running:
            if not sequence.decoding:  # at most one, or there would have been no budget for the second
                sequence.prompt_rows = min(sequence.prompt_left, budget)
                budget -= sequence.prompt_rows
        while budget > 0 and self._slots.free and (sequence := self._next_waiting()) is not None:
            self._slots.take(sequence)
            sequence.prompt_rows = min(sequence.prompt_left, budget)
            budget -= sequence.prompt_rows
            if self.drafter is not None:
                self._contained(sequence, result, self._open_draft)

    def _next_waiting(self) -> Sequence | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _open_draft(self, sequence: Sequence) -> None:
        sequence.state = self.drafter.open(sequence.request, sequence.seed)
        # A text sampled with the help of a q would be another one, equally distributed, at other draft lengths.
        if self._length_policy is not None and (self.drafter.spec.deterministic or sequence.target.greedy):
            sequence.pace = self._length_policy.open()
        if sequence.stored:
            self._observe(sequence, sequence.request.prompt[1 : sequence.stored + 1], _NO_HIDDEN)

    def _propose(self, result: StepResult) -> None:
        """Ask the drafter for every sequence that has room for a draft."""
        if self.drafter is None:
            return
        spec = self.engine.spec
        running = self._slots.running
        rows = sum(1 if s.decoding else s.prompt_rows for s in running)
        decoding = [s for s in running if s.decoding]
        asking: list[Sequence] = []
        asks: list[Ask] = []
        for sequence, length in zip(decoding, self._draft_lengths(decoding, rows), strict=True):
            # the pending token takes one row, and every step emits one token of the target's own
            depth = min(length, sequence.remaining - 1)
            nodes = min(length, spec.max_seq_len - sequence.stored - 1)
            if min(nodes, depth) > 0:
                asking.append(sequence)
                room = min(spec.max_rows, spec.max_seq_len - sequence.stored) - 1
                asks.append(Ask(sequence.state, nodes, depth, spec.max_branches, room, sequence.slot))
        if not asks:
            return
        try:
            drafts: list[Draft | None] = list(self.drafter.propose(asks, rows))
            if len(drafts) != len(asks):
                raise ValueError(f"{len(drafts)} drafts for {len(asks)} sequences")
        except Exception:
            # One of them broke it. Asked one by one, the others go on and the culprit fails by itself.
            log.warning(
                "drafter %s failed for a batch of %d", self.drafter.spec.method, len(asks), exc_info=True
            )
            drafts = [None] * len(asks)
        for sequence, ask, draft in zip(asking, asks, drafts, strict=True):
            self._contained(sequence, result, self._take_draft, ask, draft, rows)

    def _draft_lengths(self, decoding: list[Sequence], rows: int) -> list[int]:
        """Most tokens each sequence's draft may have in this step."""
        paced = [s for s in decoding if s.pace is not None]
        if not paced:
            return [self.draft_length] * len(decoding)
        rows += self.draft_length * (len(decoding) - len(paced))
        lengths = iter(self._length_policy.lengths([s.pace for s in paced], len(decoding), rows))
        return [
            self.draft_length if s.pace is None else min(next(lengths), self.draft_length) for s in decoding
        ]

    def _take_draft(self, sequence: Sequence, ask: Ask, draft: Draft | None, rows: int) -> None:
        if draft is None:
            (draft,) = self.drafter.propose([ask], rows)
        check_draft(draft, ask, self.engine.spec.tokenizer_vocab_size)
        sequence.draft = draft

    def _rows(self, sequence: Sequence) -> SlotStep:
        slot, start = sequence.slot, sequence.stored
        if not sequence.decoding:
            rows = sequence.prompt[start : start + sequence.prompt_rows]
            last = start + len(rows) == len(sequence.prompt)
            return SlotStep(slot, start, rows, logits_from=len(rows) - last)
        tree = sequence.draft.tree.beside(sequence.draft.probe)
        tokens = np.array((sequence.tokens[-1], *tree.tokens), np.int64)
        if tree.is_chain:
            return SlotStep(slot, start, tokens)
        return SlotStep(slot, start, tokens, np.array((-1, *(p + 1 for p in tree.parents)), np.int64))

    # -- after it

    def _advance(
        self, sequence: Sequence, step: SlotStep, output: SlotLogits, now: float, result: StepResult
    ) -> None:
        """Judge one sequence's rows, emit its tokens and commit what stays."""
        following: tuple[int, ...] = ()
        if not sequence.decoding:
            sequence.stored += len(step.tokens)
            following = sequence.request.prompt[step.start + 1 : sequence.stored + 1]
            if not sequence.decoding:
                self._observe(sequence, following, output.hidden)
                return
        draft, sequence.draft = sequence.draft, NOTHING
        verdict = self._verify(
            draft, output.logits, sequence.target, sequence.random, position=len(sequence.tokens)
        )
        first = not sequence.tokens
        delta = sequence.emit(verdict, output.logits, len(draft.tree), now)
        result.deltas.append(delta)
        if delta.finish_reason is not None:
            self._finish(sequence, result)
            return
        if first:
            self._observe(sequence, following + verdict.tokens, output.hidden)
            return
        if draft.probe:
            rows = (0, *range(1 + len(draft.tree), len(step.tokens)))
            likely = output.logits[rows, : self.engine.spec.tokenizer_vocab_size].argmax(axis=1)
            self.drafter.learn(sequence.state, likely.tolist())
        if sequence.pace is not None and draft.tree:
            self._length_policy.learn(sequence.pace, draft.tree, verdict.path)
        kept = [0, *(node + 1 for node in verdict.path)]
        if step.parents is not None:  # a chain's rows lie in place; where a tree's lie only the engine knows
            self.engine.commit(step.slot, step.start, kept)
        sequence.stored += len(kept)
        self._observe(sequence, verdict.tokens, output.hidden[kept] if output.hidden.size else output.hidden)

    def _observe(self, sequence: Sequence, tokens: tuple[int, ...], hidden: np.ndarray) -> None:
        if self.drafter is not None:
            self.drafter.observe(sequence.state, tokens, hidden)

    def _finish(self, sequence: Sequence, result: StepResult) -> None:
        self._leave(sequence)
        result.completions.append(sequence.completion(self._clock()))

    def _leave(self, sequence: Sequence) -> None:
        sequence.ended = True
        with self._lock:
            self._known.discard(sequence.request.request_id)
            self._cancelled.discard(sequence.request.request_id)
        state, sequence.state = sequence.state, None
        if self.drafter is not None and state is not None:
            self.drafter.release(state)

    def _contained(
        self, sequence: Sequence, result: StepResult, work: Callable[..., None], *args: object
    ) -> None:
        """Do `work` for one sequence; whatever it raises ends that sequence alone."""
        if sequence.ended:
            return
        try:
            work(sequence, *args)
        except Exception as cause:
            name = f"request {sequence.request.request_id!r}"
            error = InternalError(f"{name}: {cause}", where=f"output position {len(sequence.tokens)}")
            error.__cause__ = cause
            result.failures.append(Failure(sequence.request.request_id, error))
            self._leave(sequence)
