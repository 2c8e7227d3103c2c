"""What is measured, behind one protocol: a runtime in this process (triton.py: a Triton server; openai_target.py: any
OpenAI-compatible server).

All take a conversation and give the finished request with its step records, so that nothing later needs to
know which it was. A conversation is rendered by the target's own chat template, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from trtspec.engines.base import Engine, SlotStep
from trtspec.engines.info import EngineInfo
from trtspec.evaluate.lossless import Floats
from trtspec.evaluate.record import TargetFacts
from trtspec.values import Completion, GenerationRequest, SamplingParams, StepRecord

if TYPE_CHECKING:
    from trtspec.runtime import Runtime
    from trtspec.serve.client import Chunk


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request, and the token ids its conversation was rendered to, where the target reveals them.

    cached_tokens, quoted: see `RequestRecord`.
    """

    completion: Completion
    prompt: tuple[int, ...] | None
    cached_tokens: int | None = None
    quoted: str | None = None


class Target(Protocol):
    """Something that answers conversations. `chat` blocks and may be called from many threads at once."""

    facts: TargetFacts

    def chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        """Answer the last message. Raises whatever the transport raises when the request is refused or lost."""

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> Floats | None:
        """Target logits float32 [len(continuation), vocab] that predict each continuation token; None if it cannot."""

    def close(self) -> None:
        """Release what the target holds; calling it twice is harmless."""


class InProcess:
    """A runtime in this process. Owns it: `close` closes it. engine: its folder, for scoring. template_args: what the
    chat template gets besides the messages."""

    def __init__(
        self,
        runtime: Runtime,
        facts: TargetFacts,
        engine: Path | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._template_args = template_args or {}
        self.facts = facts

    @classmethod
    def open(
        cls,
        engine: Path,
        *,
        speculate: bool = True,
        draft_length: int | None = None,
        max_concurrency: int | None = None,
        max_queue: int = 64,
        threads: int | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> InProcess:
        """Open an engine folder; the other arguments are `Runtime.open`'s, and so are the errors."""
        from trtspec.runtime import Runtime

        runtime = Runtime.open(
            engine,
            speculate=speculate,
            draft_length=draft_length,
            max_concurrency=max_concurrency,
            max_queue=max_queue,
            threads=threads,
        )
        facts = engine_facts(runtime.info, engine, speculate=speculate, draft_length=draft_length)
        return cls(runtime, facts, engine, template_args)

    def chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        conversation = [asdict(message) for message in messages]
        prompt = tuple(self._runtime.tokenizer.chat(conversation, **self._template_args))
        done = self._runtime.generate(GenerationRequest(request_id, prompt, sampling))
        return Answer(done, prompt, done.cached_tokens)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> Floats | None:
        """Runs the tokens through a second instance of the engine: the runtime's own slots stay as they are."""
        if self._engine is None:
            return None
        from trtspec.engines.opening import open_engine

        engine = open_engine(self._engine, max_batch=1)
        try:
            return teacher_forced_logits(engine, prompt, continuation)
        finally:
            engine.close()

    def close(self) -> None:
        self._runtime.close()


def teacher_forced_logits(engine: Engine, prompt: Sequence[int], continuation: Sequence[int]) -> Floats:
    """Logits float32 [len(continuation), vocab] that predict each continuation token. Overwrites slot 0.

    Raises ValueError when the tokens do not fit the engine.
    """
    tokens = np.array([*prompt, *continuation[:-1]], dtype=np.int64)
    first, rows = len(prompt) - 1, []
    for start in range(0, len(tokens), engine.spec.max_rows):
        piece = tokens[start : start + engine.spec.max_rows]
        wanted = min(max(first - start, 0), len(piece))
        (result,) = engine.forward([SlotStep(0, start, piece, logits_from=wanted)])
        rows.append(np.array(result.logits[:, : engine.spec.tokenizer_vocab_size]))
    return np.concatenate(rows)


def engine_facts(
    info: EngineInfo,
    folder: Path,
    *,
    speculate: bool = True,
    draft_length: int | None = None,
    transport: str = "in process",
    device: str = "cpu",
) -> TargetFacts:
    """What an engine folder says about a target that runs it. draft_length: None takes the planned one."""
    from trtspec.drafters.catalog import spec_of

    method = info.speculation.get("method", "none") if speculate else "none"
    length = info.speculation.get("draft_length", 0) if draft_length is None else draft_length
    drafter = spec_of(method) if method != "none" else None
    return TargetFacts(
        transport=transport,
        model=info.model,
        method=method,
        draft_length=length if drafter else 0,
        backend=info.backend,
        device=device,
        weights=info.weights,
        exact=info.spec.exact,
        seed_identical=drafter is None or drafter.deterministic,
        tree_depth=length if drafter and drafter.shape == "tree" else None,
        acceptance=info.speculation.get("verification", {}).get("acceptance", "exact")
        if drafter
        else "exact",
        location=str(folder),
    )


def assemble(request_id: str, chunks: Iterable[Chunk], start: float, seed: int) -> Completion:
    """One completion out of streamed chunks. start: `time.perf_counter()` at submit, the zero of all times.

    The first token of the stream is the prefill token. A chunk may stand for several steps (the transport
    merged them): each emitted what it accepted and one token more, the last one less if the text ended in it.
    Raises ValueError when the stream ends without its totals, or they contradict the chunks.
    """
    tokens: list[int] = []
    texts: list[str] = []
    steps: list[StepRecord] = []
    ttft = last = None
    for chunk in chunks:
        at = chunk.at_s - start
        new = len(chunk.token_ids)
        if new and ttft is None:
            ttft, new = at, new - 1
        for drafted, accepted in chunk.steps:
            emitted = min(accepted + 1, new)
            steps.append(StepRecord(drafted, accepted, emitted, at))
            new -= emitted
        tokens += chunk.token_ids
        texts.append(chunk.text)
        last = chunk
    if last is None or last.usage is None or last.finish_reason is None:
        raise ValueError(f"{request_id}: the stream ended without its totals")
    if (len(tokens), len(steps)) != (last.usage.completion_tokens, last.usage.steps):
        raise ValueError(
            f"{request_id}: {len(tokens)} tokens in {len(steps)} steps arrived, the server counted "
            f"{last.usage.completion_tokens} in {last.usage.steps}"
        )
    return Completion(
        request_id=request_id,
        prompt_tokens=last.usage.prompt_tokens,
        token_ids=tuple(tokens),
        text="".join(texts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        steps=tuple(steps),
        ttft_s=last.at_s - start if ttft is None else ttft,
        total_s=last.at_s - start,
        seed=seed,
        cumulative_logprob=last.usage.cumulative_logprob,
    )
