"""A server behind the front without a model: tokens are bytes, the answer is the prompt, its fate is in its first word.

full / bad / gone     refused at once, as Triton refuses: queue full, wrong input, no server
late                  fails after two chunks
odd                   raises what no server raises, where late fails, or at once where nothing is streamed
forever               streams until it is cancelled
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator

from trtspec.package.contract import QUEUE_FULL
from trtspec.serve.client import Chunk, RequestFailed, Usage
from trtspec.serve.openai.upstream import ServedModel

DRAFT = 3
LOGPROB = -0.5
_FATES = {
    "full": RequestFailed(f"{QUEUE_FULL}: 4 run, 6 wait", code="UNAVAILABLE"),
    "bad": RequestFailed("the prompt has 5000 tokens; at most 4096", code="INVALID_ARGUMENT"),
    "gone": RequestFailed("connection refused", code="UNAVAILABLE"),
}


class ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    def stream(self) -> ByteStream:
        return ByteStream()


MODEL = ServedModel("toy", max_seq_len=4096, draft_length=DRAFT, created=1, tokenizer=ByteTokenizer())


class FakeUpstream:
    """seen: the (prompt, sampling) of every request. open: streams neither ended nor closed."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict, object]] = []
        self.open = 0
        self.up = True

    async def ready(self, model: str) -> bool:
        return self.up

    async def metrics(self) -> str:
        return "trtspec_active_requests 0\n"

    async def close(self) -> None:
        assert self.open == 0

    async def stream(self, model, request_id, prompt, sampling, *, streaming) -> AsyncGenerator[Chunk, None]:
        self.seen.append((prompt, sampling))
        text = prompt.get("text_input") or bytes(prompt.get("input_ids", b"")).decode("utf-8", "replace")
        if "messages" in prompt:
            text = json.loads(prompt["messages"])[-1]["content"]
        self.open += 1
        try:
            fate = text.split(" ")[0]
            if fate in _FATES:
                raise _FATES[fate]
            for number, chunk in enumerate(self._chunks(text, sampling, streaming)):
                if fate == "late" and number == 2:
                    raise RequestFailed("the engine dropped this request", code="INTERNAL")
                if fate == "odd" and (number == 2 or not streaming):
                    raise KeyError("secret")
                await asyncio.sleep(0.02 if fate == "forever" else 0)
                yield chunk
        finally:
            self.open -= 1

    @staticmethod
    def _chunks(text: str, sampling, streaming: bool):
        """The prefill token, then steps of 0..DRAFT accepted drafts and one token more."""
        tokens = text.encode()
        if text.startswith("forever"):
            tokens *= 1000
        tokens = tokens[: sampling.max_tokens]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, steps, at = [tokens[:1]], [()], 1
        while at < len(tokens):
            accepted = min(len(pieces) % (DRAFT + 1), len(tokens) - at - 1)
            pieces.append(tokens[at : at + accepted + 1])
            steps.append(((DRAFT, accepted),))
            at += accepted + 1
        if not streaming:
            pieces, steps = [tokens], [sum(steps, ())]
        for index, (piece, records) in enumerate(zip(pieces, steps, strict=True)):
            last = index == len(pieces) - 1
            yield Chunk(
                text=decoder.decode(piece, final=last),
                token_ids=tuple(piece),
                steps=records,
                final=last,
                at_s=0.0,
                finish_reason="length" if last else None,
                usage=Usage(len(text.encode()), len(tokens), 0, 0, 0, None) if last else None,
                token_logprobs=(LOGPROB,) * len(piece) if sampling.logprobs else (),
            )
