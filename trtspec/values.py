"""Frozen values that cross stages and parts: requests, deltas and completions of generation.

Words (one word, one thing): *draft length* D tokens proposed per step; *accepted* a of them (0..D);
*acceptance length* tokens emitted per verify step = a + 1. The prefill token is never counted as a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Penalties follow OpenAI's definition (over generated tokens);
    `repetition_penalty` follows CTRL (1909.05858, over prompt and generated tokens).

    max_tokens: None means up to the context limit. temperature: 0 is greedy, ties to the lowest id.
    top_k: 0 is off. top_p: 1 is off. seed: None draws a fresh one, which the completion reports.
    stop: strings, matched on decoded text; the earliest match ends the text before it.
    ignore_eos: the model's own stop ids do not end the text (stop_token_ids still do).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, already tokenized (chat template and BOS applied exactly once by the caller)."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to one request.

    step: 0 for the prefill token, then 1, 2, … for verify steps. drafted, accepted: of this step (0 at step 0);
    accepted counts emitted draft tokens only, never any past a stop. token_ids: tokens emitted by this step.
    text: text released by them (may be empty while a character or a stop string is incomplete).
    logprobs: target log-probability of each token, empty unless asked for. finish_reason: on the last delta only.
    stop_reason: the stop string or stop id that ended the text, if one did.
    """

    request_id: str
    step: int
    token_ids: tuple[int, ...]
    text: str
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One verify step of a finished request: tokens drafted, accepted, emitted; at_s: seconds from submit to end."""

    drafted: int
    accepted: int
    emitted: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `token_ids` ends with the stop id when one ended the text; `text` excludes stop strings.

    ttft_s: seconds from submit to the prefill token. seed: the one that was used. steps: verify steps in order.
    cached_tokens: prompt tokens whose KV was there already.
    """

    request_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    steps: tuple[StepRecord, ...]
    ttft_s: float
    total_s: float
    seed: int
    cumulative_logprob: float | None = None
    logprobs: tuple[float, ...] = ()
    cached_tokens: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per verify step, None when the prefill token was the only one."""
        return sum(s.emitted for s in self.steps) / len(self.steps) if self.steps else None
