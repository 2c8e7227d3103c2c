"""One request inside the decode loop: what it has emitted, what its slot holds, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import NOTHING, Draft, State
from trtspec.engines.base import EngineSpec
from trtspec.values import Completion, Delta, FinishReason, GenerationRequest, StepRecord
from trtspec.verify.acceptance import Verdict
from trtspec.verify.draft_length import Pace
from trtspec.verify.probabilities import TargetDistribution
from trtspec.verify.randomness import PositionRandom
from trtspec.verify.text import StreamingText


@dataclass(slots=True)
class Sequence:
    """A request with its slot.

    limit: the most tokens it may emit. slot: of the engine, once it has one. stored: rows of it in the engine's KV.
    cached: prompt rows it found there. prompt_rows, draft: what it brings to the coming step, prompt rows while its
    prompt is not in, drafts afterwards. pace: what decides the length of its drafts, None for the full one.
    """

    request: GenerationRequest
    seed: int
    limit: int
    stop_ids: frozenset[int]
    target: TargetDistribution
    random: PositionRandom
    text: StreamingText | None
    submitted_s: float
    prompt: npt.NDArray[np.int64]
    state: State = None
    pace: Pace = None
    slot: int = -1
    stored: int = 0
    cached: int = 0
    prompt_rows: int = 0
    draft: Draft = NOTHING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    ttft_s: float = math.nan
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    ended: bool = False

    @property
    def decoding(self) -> bool:
        """The prompt is in: every further step is a verify step."""
        return self.stored >= len(self.prompt)

    @property
    def prompt_left(self) -> int:
        """Prompt rows not stored yet."""
        return max(len(self.prompt) - self.stored, 0)

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.limit - len(self.tokens)

    def emit(self, verdict: Verdict, logits: npt.NDArray[np.floating], drafted: int, now: float) -> Delta:
        """Take the tokens of one step up to the first one that ends the text; tokens past it are never
        counted.
        """
        step = len(self.steps) + 1 if self.tokens else 0
        emitted, released = 0, []
        for token in verdict.tokens:
            self.tokens.append(token)
            emitted += 1
            if token in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif self.text is not None:
                released.append(self.text.push(token))
                if self.text.stop is not None:
                    self.finish_reason, self.stop_reason = "stop", self.text.stop
            if self.finish_reason is None and self.remaining <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None:
            released.append(self._flush())
        logprobs = ()
        if self.request.sampling.logprobs:
            rows = (0, *(node + 1 for node in verdict.path))
            logprobs = tuple(self.target.logprob(logits[rows[i]], verdict.tokens[i]) for i in range(emitted))
            self.logprobs.extend(logprobs)
        accepted = min(len(verdict.path), emitted)
        if step == 0:
            self.ttft_s = now - self.submitted_s
        else:
            self.steps.append(StepRecord(drafted, accepted, emitted, now - self.submitted_s))
        return self._delta(step, verdict.tokens[:emitted], released, drafted, accepted, logprobs)

    def cancel(self) -> Delta:
        """End it where it stands."""
        self.finish_reason = "cancelled"
        step = len(self.steps) + 1 if self.tokens else 0
        return self._delta(step, (), [self._flush()], 0, 0, ())

    def completion(self, now: float) -> Completion:
        """The finished request."""
        logprobs = self.request.sampling.logprobs
        return Completion(
            request_id=self.request.request_id,
            prompt_tokens=len(self.prompt),
            token_ids=tuple(self.tokens),
            text="".join(self.released),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            steps=tuple(self.steps),
            ttft_s=self.ttft_s,
            total_s=now - self.submitted_s,
            seed=self.seed,
            cumulative_logprob=math.fsum(self.logprobs) if logprobs else None,
            logprobs=tuple(self.logprobs),
            cached_tokens=self.cached,
        )

    def _flush(self) -> str:
        if self.text is None:
            return ""
        rest = self.text.finish()
        if self.text.stop is not None and self.finish_reason == "length":
            # bytes held back until now completed a stop string
            self.finish_reason, self.stop_reason = "stop", self.text.stop
        return rest

    def _delta(
        self,
        step: int,
        tokens: tuple[int, ...],
        released: Items[str],
        drafted: int,
        accepted: int,
        logprobs: tuple[float, ...],
    ) -> Delta:
        text = "".join(released)
        self.released.append(text)
        return Delta(
            request_id=self.request.request_id,
            step=step,
            token_ids=tokens,
            text=text,
            drafted=drafted,
            accepted=accepted,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def check_request(request: GenerationRequest, spec: EngineSpec) -> None:
    """Raise ValueError, naming what is wrong, for a request that this engine cannot serve."""
    prompt, s = request.prompt, request.sampling
    if not prompt:
        raise ValueError("the prompt is empty")
    if len(prompt) >= spec.max_seq_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the context limit is {spec.max_seq_len}: "
            f"no token can follow it; shorten it to at most {spec.max_seq_len - 1}"
        )
    if not 0 <= min(prompt) <= max(prompt) < spec.tokenizer_vocab_size:
        raise ValueError(f"prompt token ids must be from 0 to {spec.tokenizer_vocab_size - 1}")
    if s.max_tokens is not None and s.max_tokens < 1:
        raise ValueError(f"max_tokens is {s.max_tokens}, must be at least 1")
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        raise ValueError(f"temperature is {s.temperature}, must be finite and at least 0")
    if s.top_k < 0:
        raise ValueError(f"top_k is {s.top_k}, must be at least 0 (0 is off)")
    if not 0 <= s.top_p <= 1:
        raise ValueError(f"top_p is {s.top_p}, must be from 0 to 1")
    if not (math.isfinite(s.repetition_penalty) and s.repetition_penalty > 0):
        raise ValueError(f"repetition_penalty is {s.repetition_penalty}, must be finite and above 0")
    if not (math.isfinite(s.presence_penalty) and math.isfinite(s.frequency_penalty)):
        raise ValueError("presence_penalty and frequency_penalty must be finite")
    if "" in s.stop:
        raise ValueError("a stop string is empty")
