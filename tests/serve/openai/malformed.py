"""Requests no server can answer, each with the status that says so: wrong JSON, wrong types, wrong values, wrong HTTP.

Some are refused by the front, others (prompts past the context, ids past the vocabulary) only by the model behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.serve.conftest import Served
from tests.serve.openai.conftest import JSON, Caller, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Malformed:
    """fields: laid over a right request of the endpoint. raw: the body itself, instead."""

    name: str
    status: int = 400
    path: str = COMPLETIONS
    fields: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    method: str = "POST"

    def body(self, model: str) -> bytes:
        if self.raw is not None:
            return self.raw
        right = (
            {"prompt": "hi"}
            if self.path == COMPLETIONS
            else {"messages": [{"role": "user", "content": "hi"}]}
        )
        return json.dumps(
            {"model": model, "max_tokens": 4, "temperature": 0, **right, **self.fields}
        ).encode()


def _field(name: str, value: Any, path: str = COMPLETIONS, **others: Any) -> Malformed:
    return Malformed(f"{name}={str(value)[:20]}", path=path, fields={name: value, **others})


def _message(name: str, message: Any) -> Malformed:
    return Malformed(name, path=CHAT, fields={"messages": [message]})


CORPUS = (
    Malformed("an empty body", raw=b""),
    Malformed("half a body", raw=b'{"model": "tensorrt_llm", "prom'),
    Malformed("a list", raw=b"[1, 2]"),
    Malformed("a number", raw=b"7"),
    Malformed("no JSON constant", raw=b'{"model": "tensorrt_llm", "prompt": "x", "temperature": NaN}'),
    Malformed("no UTF-8", raw=b'{"model": "tensorrt_llm", "prompt": "\xff\xfe"}'),
    Malformed("half a surrogate pair", raw=b'{"model": "tensorrt_llm", "prompt": "\\ud83d"}'),
    Malformed("a deep nest", raw=b'{"prompt": ' + b"[" * 100_000),
    Malformed("no model", fields={"model": None}),
    Malformed("a list for a model", fields={"model": ["tensorrt_llm"]}),
    Malformed("another model", status=404, fields={"model": "gpt-4"}),
    Malformed("no endpoint", status=404, path="/v1/embeddings", raw=b"{}"),
    Malformed("the wrong method", status=405, method="PUT"),
    Malformed("a form of 4 MiB", status=415, raw=b"a=" + b"b" * (4 << 20),
              headers={"Content-Type": "application/x-www-form-urlencoded"}),
    Malformed("plain text", status=415, headers={"Content-Type": "text/plain"}),
    Malformed("no gzip", raw=b"not gzip", headers={**JSON, "Content-Encoding": "gzip"}),
    _field("prompt", 7), _field("prompt", []), _field("prompt", [1, "a"]), _field("prompt", [-1]),
    _field("prompt", [1] * 20_000), _field("prompt", [2**31 - 1]),
    _field("temperature", "hot"), _field("temperature", -1), _field("top_p", 0), _field("top_k", 1.5),
    _field("max_tokens", 0), _field("max_tokens", 10**6), _field("max_tokens", 2**40), _field("max_tokens", True),
    _field("n", 0), _field("n", 1000), _field("seed", 1.5), _field("stop", [""]), _field("stop", {"a": 1}),
    _field("logprobs", 5), _field("best_of", 4), _field("echo", True), _field("suffix", "x"), _field("stream", "yes"),
    _field("stream_options", {"include_usage": True}), _field("stream_options", [], stream=True),
    _field("presence_penalty", 3), _field("repetition_penalty", 0), _field("logit_bias", {"5": 1}),
    _field("max_tokns", 5), _field("top_logprobs", 2, CHAT), _field("logprobs", 1, CHAT),
    _field("response_format", {"type": "json_object"}, CHAT), _field("tools", [{"type": "function"}], CHAT),
    _field("max_completion_tokens", 9, CHAT), _field("messages", [], CHAT), _field("messages", "hi", CHAT),
    _message("no role", {"content": "hi"}), _message("no content", {"role": "user"}),
    _message("a tool", {"role": "tool", "content": "x"}), _message("no object", "hi"),
    _message("a picture", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
    _message("a name", {"role": "user", "content": "hi", "name": "me"}),
)  # fmt: skip


def refused_rightly(send: Callable[..., tuple[int, Any, Any]], model: str, index: int) -> bool:
    """Send four of the corpus, others for each index; whether every one has the status it should."""
    cases = [CORPUS[(index + step * 17) % len(CORPUS)] for step in range(4)]
    return all(
        send(case.method, case.path, case.body(model), case.headers)[0] == case.status for case in cases
    )


def crowd(served: Served, caller: Caller, model: str, answer: Callable[[bytes, int], bytes]) -> None:
    """64 clients at once: whole answers, streams that are left, and malformed requests. What ends is right, and nothing
    stays open. answer: what the model says to a prompt in so many tokens.
    """
    prompts = [f"{index} stream ü" for index in range(64)]

    def one(index: int) -> object:
        ask = {"model": model, "prompt": prompts[index], "stream": True, "max_tokens": 60, "temperature": 0}
        if index % 4 == 3:
            return refused_rightly(caller.send, model, index)
        if index % 4:
            parts = events(caller.send("POST", COMPLETIONS, ask)[2])
            return "".join(part["choices"][0]["text"] for part in parts)
        return caller.leave(COMPLETIONS, {**ask, "max_tokens": 4000})

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(one, range(64)))
    for index, reply in enumerate(found):
        text = answer(prompts[index].encode(), 60).decode("utf-8", "replace")
        assert reply == (None, text, text, True)[index % 4], index
    served.wait_idle()
    assert caller.front.running == 0
