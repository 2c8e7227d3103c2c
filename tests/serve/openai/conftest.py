"""The front on a free port before `FakeUpstream`, and a client that knows no more than HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator

import pytest

from tests.serve.conftest import Served
from tests.serve.openai.fake_upstream import MODEL, FakeUpstream
from trtspec.events import Note, silent
from trtspec.serve.openai.front import FrontOptions, OpenAIFront

JSON = {"Content-Type": "application/json"}


class Caller:
    """Requests to one front, each on a connection of its own."""

    def __init__(self, front: OpenAIFront, upstream: FakeUpstream | None = None) -> None:
        self.front = front
        self.upstream = upstream

    def connect(self, timeout_s: float = 30) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.front.url.removeprefix("http://"), timeout=timeout_s)

    def send(self, method: str, path: str, body: object = None, headers: dict[str, str] = JSON):
        """(status, headers, content); content is parsed where it is JSON."""
        connection = self.connect()
        payload = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, response.headers, json.loads(text) if is_json and text else text

    def leave(self, path: str, body: dict[str, object]) -> None:
        """Send a streamed request and go away after its first bytes."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), JSON)
        connection.getresponse().read(20)
        connection.close()

    def chat(self, content: str, **fields):
        body = {"model": MODEL.name, "messages": [{"role": "user", "content": content}], **fields}
        return self.send("POST", "/v1/chat/completions", body)

    def complete(self, prompt: object, **fields):
        return self.send("POST", "/v1/completions", {"model": MODEL.name, "prompt": prompt, **fields})

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.front.running or self.upstream.open:
            assert time.monotonic() < deadline, f"{self.front.running} answers, {self.upstream.open} streams"
            time.sleep(0.01)


def events(text: str) -> list[dict]:
    """The JSON events of a stream that ended well."""
    *datas, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(data.removeprefix("data: ")) for data in datas]


@pytest.fixture
def noted() -> list[Note]:
    """What the front has told the operator."""
    return []


@pytest.fixture
def caller(noted) -> Iterator[Caller]:
    upstream = FakeUpstream()
    front = OpenAIFront(FrontOptions((MODEL,), port=0), lambda: upstream, noted.append)
    front.start()
    yield Caller(front, upstream)
    front.close()


@contextlib.contextmanager
def fronted(server: Served, options: FrontOptions) -> Iterator[Caller]:
    """The front before a real server."""
    front = OpenAIFront.before(server.server.grpc_url, server.server.metrics_url, options, silent)
    front.start()
    try:
        yield Caller(front)
    finally:
        front.close()
