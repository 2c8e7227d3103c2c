"""A model behind an OpenAI-compatible URL: vLLM, SGLang, trtllm-serve, or trtspec's own front.

Requests are streaming chat completions. The server sends text, so tokens are counted by the model's tokenizer, never
by chunks. How drafts fared comes from the best source the server offers:

    response body        `metrics.speculative_decoding` (vLLM, trtspec), or SGLang's or TensorRT-LLM's own field
    Prometheus counters  what vLLM's counters gained over one request; only while requests go one by one
    chunks               the tokens of each chunk, where the draft length is known; all drafts are taken as that long

The record names the source, and says where it leaves open how long each draft was: acceptance by position is then
approximate. vLLM tells it when started with `--per-request-spec-decode-metrics detailed`. Set TRTSPEC_API_KEY where the
server wants a key.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.evaluate.lossless import Floats
from trtspec.evaluate.record import TargetFacts
from trtspec.evaluate.served_steps import (
    Acceptance,
    Counters,
    build_steps,
    from_answer,
    from_chunks,
    from_counters,
    read_counters,
)
from trtspec.evaluate.sse import EventClient
from trtspec.evaluate.targets import Answer, Message
from trtspec.serve.client import RequestFailed
from trtspec.values import Completion, FinishReason, SamplingParams

# Counters are written after the answer has left: how often, and after how long, they are read again.
_READINGS, _BETWEEN_S = 10, 0.05
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
BODY, COUNTERS, CHUNKS = "response body", "Prometheus counters", "tokens of each chunk"
_SHARED_OUT = " (totals of drafts that vary in length: by position approximate)"


@dataclass(slots=True)
class _Reply:
    """What a stream said. parts: (seconds since submit, text) of each event with text. thoughts: whether some of it was
    a reasoning model's, which `said` leaves out."""

    parts: list[tuple[float, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    thoughts: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: dict[str, int] | None = None
    acceptance: Acceptance | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)


class OpenAIChat:
    """One model at `url` (http://HOST:PORT/v1). facts: what is known of it; draft_length in it makes chunks a source.

    alone: requests go one by one, so counters of the server can be told apart by request. template_args: what the
    server's chat template gets besides the messages (vLLM's and SGLang's `chat_template_kwargs`).
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: TextTokenizer,
        facts: TargetFacts,
        *,
        alone: bool,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._server = EventClient(url, "/v1")
        self._model, self._tokenizer = model, tokenizer
        self._known = replace(facts, token_ids="from text")
        self._counters = alone
        self._template_args = template_args or {}
        self._sources: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def facts(self) -> TargetFacts:
        """With the sources of acceptance that requests used so far, the most used first."""
        named = "; for some requests ".join(name for name, _ in self._sources.most_common())
        return replace(self._known, acceptance_source=named or "not known yet")

    def chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        """Answer the last message. Raises RequestFailed when the server refuses the request or breaks off."""
        conversation = [asdict(message) for message in messages]
        before = self._read_counters()
        fields = self._fields(conversation, sampling)
        start = time.perf_counter()
        reply = self._stream(request_id, fields, start)
        end = time.perf_counter() - start
        if reply.finish_reason is None:
            raise RequestFailed("the stream ended early", code="INCOMPLETE", where=request_id)
        ids = self._ids(reply)
        tokens = (reply.usage or {}).get("completion_tokens") or len(ids)
        first_s = reply.parts[0][0] if reply.parts else end
        last_s = reply.parts[-1][0] if reply.parts else end
        chunks = self._chunks(reply, ids)
        source, found = self._acceptance(reply, before, tokens, [count for _, count in chunks])
        with self._lock:
            self._sources[source + _SHARED_OUT if found and found.shared_out else source] += 1
        steps = (
            build_steps(
                found, tokens=tokens, chunks=chunks, first_s=first_s, last_s=last_s, seed=sampling.seed or 0
            )
            if found
            else ()
        )
        completion = Completion(
            request_id=request_id,
            prompt_tokens=(reply.usage or {}).get("prompt_tokens")
            or len(self._tokenizer.chat(conversation, **self._template_args)),
            token_ids=tuple(ids),
            text=reply.text,
            finish_reason=_FINISH.get(reply.finish_reason, "stop"),
            stop_reason=reply.stop_reason,
            steps=steps,
            ttft_s=first_s,
            total_s=end,
            seed=sampling.seed or 0,
        )
        cached = ((reply.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        return Answer(completion, None, cached, "".join(reply.said) if reply.thoughts else None)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> Floats | None:
        """None: the API has no logits."""
        return None

    def close(self) -> None:
        """Ends what runs."""
        self._server.close()

    def _fields(self, conversation: list[dict[str, str]], sampling: SamplingParams) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self._model,
            "messages": conversation,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
        }
        if sampling.ignore_eos:
            fields["ignore_eos"] = True
        if self._template_args:
            fields["chat_template_kwargs"] = self._template_args
        if self._is_sglang:
            fields["return_spec_tokens_details"] = True
        return {name: value for name, value in fields.items() if value is not None}

    @cached_property
    def _is_sglang(self) -> bool:
        """Whether the server has to be asked for acceptance: others refuse a field they do not know."""
        try:
            models = json.loads(self._server.get(f"{self._server.path}/models"))["data"]
            return any(model["owned_by"] == "sglang" for model in models)
        except (RequestFailed, ValueError, KeyError, TypeError):
            return False  # a list of models is optional: what is wrong with the server shows in its answers

    def _stream(self, request_id: str, fields: Mapping[str, Any], start: float) -> _Reply:
        reply = _Reply()
        for at, event in self._server.events(f"{self._server.path}/chat/completions", fields, request_id):
            if "error" in event:
                raise RequestFailed(str(event["error"]), code="error", where=request_id)
            reply.usage = event.get("usage") or reply.usage
            reply.acceptance = from_answer(event) or reply.acceptance
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                # A reasoning model's thoughts are tokens too; servers name them either way.
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                said = delta.get("content") or ""
                if thought or said:
                    reply.parts.append((at - start, thought + said))
                    reply.said.append(said)
                    reply.thoughts = reply.thoughts or bool(thought)
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
                reply.stop_reason = choice.get("stop_reason") or reply.stop_reason
        return reply

    def _read_counters(self) -> Counters | None:
        """The server's counters; None, and never asked for again, where it has none or they are not needed."""
        if not self._counters:
            return None
        try:
            text = self._server.get(f"{self._server.path.removesuffix('/v1')}/metrics")
        except RequestFailed:
            text = ""  # counters are optional: what is wrong with the server shows in its answers
        found = read_counters(text)
        self._counters = found is not None
        return found

    def _acceptance(
        self, reply: _Reply, before: Counters | None, tokens: int, counts: Sequence[int]
    ) -> tuple[str, Acceptance | None]:
        if reply.acceptance:
            self._counters = False
            return BODY, reply.acceptance
        if before is not None and tokens > 1:
            # Counters lag behind the answer: they are whole once they explain its tokens, or have stopped moving.
            last = None
            for _ in range(_READINGS):
                after = self._read_counters()
                found = from_counters(before, after, tokens) if after else None
                if found and (found == last or sum(found.accepted) + len(found.accepted) >= tokens - 1):
                    return COUNTERS, found
                last = found
                time.sleep(_BETWEEN_S)
        length = self._known.draft_length
        found = from_chunks(counts, length) if length is not None else None
        if found:
            return CHUNKS, found
        hint = "; --draft-length makes chunks a source" if length is None else ""
        return f"none: the server does not say, and chunks do not show it{hint}", None

    def _ids(self, reply: _Reply) -> list[int]:
        """The tokenizer's ids of the text; with the stop id that ended it, where the server counted one."""
        ids = self._tokenizer.encode(reply.text) if reply.text else []
        if ids and ids[0] == self._tokenizer.bos_id:
            ids = ids[1:]
        counted = (reply.usage or {}).get("completion_tokens")
        if reply.finish_reason == "stop" and counted == len(ids) + 1 and self._tokenizer.stop_ids:
            ids = [*ids, self._tokenizer.stop_ids[0]]
        return ids

    def _chunks(self, reply: _Reply, ids: Sequence[int]) -> list[tuple[float, int]]:
        """(seconds, tokens) of each chunk after the prefill token; a token belongs where its text is complete."""
        stream, ends, shown = self._tokenizer.stream(), [], 0
        for token in ids:
            shown += len(stream.push(token))
            ends.append(shown)
        chunks, at_token, seen = [], 0, 0
        for at, text in reply.parts:
            seen += len(text)
            begin = at_token
            while at_token < len(ends) and ends[at_token] <= seen:
                at_token += 1
            chunks.append((at, at_token - begin))
        if chunks and at_token < len(ids):  # a last token that never became text, such as the stop id
            chunks[-1] = chunks[-1][0], chunks[-1][1] + len(ids) - at_token
        if chunks:
            chunks[0] = chunks[0][0], chunks[0][1] - 1
        return [(at, count) for at, count in chunks if count > 0]
