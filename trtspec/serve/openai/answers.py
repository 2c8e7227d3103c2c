"""From the chunks of a request's choices to OpenAI's response objects, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtspec.serve.client import Chunk, RequestFailed, Usage
from trtspec.serve.openai.requests import Ask
from trtspec.serve.openai.upstream import ServedModel

# JSON has no -Infinity; OpenAI sends this for a token of probability 0.
_LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class Choice:
    """One answer as it arrives. tokens: (text, log probability), only when asked for."""

    index: int
    prompt: int
    stream: Any  # of the tokenizer; None without log probabilities
    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    def add(self, chunk: Chunk) -> list[tuple[str, float]]:
        """Take one chunk in. Returns its tokens, each with the text it completes: their texts add up to the answer's.

        A token that ends inside a character shows nothing; the one that completes the character shows it whole.
        """
        new = []
        if self.stream is not None:
            texts = [self.stream.push(token) for token in chunk.token_ids]
            if chunk.finish_reason is not None and texts:
                texts[-1] += self.stream.finish()
            new = [
                (text, max(logprob, _LEAST_LOGPROB))
                for text, logprob in zip(texts, chunk.token_logprobs, strict=True)
            ]
        self.text += chunk.text
        self.tokens += new
        self.steps += chunk.steps
        if chunk.usage is not None:
            self.usage, self.finish_reason = chunk.usage, chunk.finish_reason
        return new


class Answer:
    """The answer to one API request: its choices, and every JSON object sent about them. kind: the endpoint's."""

    def __init__(self, ask: Ask, model: ServedModel, *, chat: bool) -> None:
        self.ask = ask
        self._model = model
        self._chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        each = len(ask.samplings)
        self.choices = [
            Choice(index, index // each, model.tokenizer.stream() if ask.logprobs else None)
            for index in range(len(ask.prompts) * each)
        ]

    def whole(self) -> dict[str, Any]:
        """The response of a request that does not stream. Raises RequestFailed when the server sent no totals."""
        choices = []
        for choice in self.choices:
            content = (
                {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
                if self._chat
                else {"text": choice.text}
            )
            choices.append(self._choice(choice, content, choice.tokens, 0, choice.finish_reason))
        return {**self._head(streamed=False), "choices": choices, **self._totals()}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a streamed chat sends before a choice's text; a completion sends nothing."""
        if not self._chat:
            return None
        return self._part(choice, {"delta": {"role": "assistant", "content": ""}}, [], 0, None)

    def part(self, choice: Choice, chunk: Chunk) -> dict[str, Any] | None:
        """Take a streamed chunk in. Returns the object to send for it, None when it shows nothing yet."""
        offset = len(choice.text)
        tokens = choice.add(chunk)
        if not (chunk.text or tokens or chunk.finish_reason):
            return None
        content = {"text": chunk.text}
        if self._chat:
            content = {"delta": {"content": chunk.text} if chunk.text else {}}
        return self._part(choice, content, tokens, offset, chunk.finish_reason)

    def closing(self) -> dict[str, Any] | None:
        """The last object of a stream that includes usage."""
        if not self.ask.include_usage:
            return None
        return {**self._head(streamed=True), "choices": [], **self._totals()}

    def _part(
        self,
        choice: Choice,
        content: dict[str, Any],
        tokens: Sequence[tuple[str, float]],
        offset: int,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        part = self._choice(choice, content, tokens, offset, finish_reason)
        usage = {"usage": None} if self.ask.include_usage else {}
        return {**self._head(streamed=True), "choices": [part], **usage}

    def _choice(
        self,
        choice: Choice,
        content: dict[str, Any],
        tokens: Sequence[tuple[str, float]],
        offset: int,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.ask.logprobs and tokens:
            logprobs = _chat_logprobs(tokens) if self._chat else _completion_logprobs(tokens, offset)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name}

    def _totals(self) -> dict[str, Any]:
        """Exact counts: a prompt counts once, however many choices it has; a stop id counts as generated."""
        prompts: dict[int, int] = {}
        generated = 0
        for choice in self.choices:
            if choice.usage is None:
                raise RequestFailed("the stream ended without its totals", code="INCOMPLETE", where=self.id)
            prompts[choice.prompt] = choice.usage.prompt_tokens
            generated += choice.usage.completion_tokens
        prompt = sum(prompts.values())
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }
        speculation = (
            speculative_metrics(self.choices[0].steps, self._model.draft_length)
            if len(self.choices) == 1
            else None
        )
        return {"usage": usage} | ({"metrics": {"speculative_decoding": speculation}} if speculation else {})


def speculative_metrics(steps: Sequence[tuple[int, int]], draft_length: int) -> dict[str, Any] | None:
    """vLLM's per-request `metrics.speculative_decoding`, as its level `detailed` has it; None without speculation.

    steps: (drafted, accepted) of each verify step, those with nothing drafted among them; without a step the
    counts are zeros. The histogram counts steps by accepted drafts, 0 to draft_length, the bonus token excluded:
    its sum is num_spec_steps.
    """
    if not draft_length:
        return None
    drafted, accepted = [drafted for drafted, _ in steps], [accepted for _, accepted in steps]
    histogram = [0] * (max(draft_length, *accepted, 0) + 1)
    for taken in accepted:
        histogram[taken] += 1
    return {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(steps), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": histogram,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_steps": len(steps),
        "num_spec_tokens": draft_length,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def _chat_logprobs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8")), "top_logprobs": []}
        for text, logprob in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
    offsets = []
    for text, _ in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
