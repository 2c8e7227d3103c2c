"""Malformed requests by the hundred: each has an answer that says whose fault it is, and none leaves a trace."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.openai.conftest import JSON, Caller
from tests.serve.openai.fake_upstream import MODEL, FakeUpstream
from trtspec.serve.openai.front import FrontOptions, OpenAIFront
from trtspec.serve.openai.requests import NEUTRAL

FIELDS = [
    *("model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p"),
    *("seed", "stop", "presence_penalty", "frequency_penalty", "logprobs", "top_k", "repetition_penalty"),
    *("ignore_eos", "max_completion_tokens", "user", "unheard_of", *NEUTRAL),
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 3)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full", "bad", "gone", "late x", "\x00", "\ufffe", "🌍"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | values, "content": values}
    ),
    max_size=3,
)
bodies = st.builds(
    lambda right, wrong: {**right, **wrong},
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.just(MODEL.name),
            "messages": messages,
            "prompt": st.text(max_size=8) | values,
            "stream": st.booleans(),
            "n": st.integers(1, 4),
            "temperature": st.floats(0, 2),
        },
    ),
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=2),
)
raw = st.binary(max_size=60) | bodies.map(json.dumps).map(lambda text: text[: len(text) // 2].encode())


@pytest.fixture(scope="module")
def fuzzed():
    upstream = FakeUpstream()
    front = OpenAIFront(FrontOptions((MODEL,), port=0), lambda: upstream)
    front.start()
    yield Caller(front, upstream)
    front.close()


corpus = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@corpus
@given(endpoint=st.sampled_from(["chat/completions", "completions"]), body=bodies)
def test_any_json_has_an_answer_with_the_right_kind_of_status(fuzzed, endpoint, body):
    status, _, answer = fuzzed.send("POST", f"/v1/{endpoint}", json.dumps(body).encode())
    assert status in (200, 400, 404, 429, 503), (status, answer)
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]
    if body.get("model") != MODEL.name:
        assert status in (400, 404)
    fuzzed.wait_idle()


@corpus
@given(
    endpoint=st.sampled_from(["chat/completions", "completions"]),
    body=raw,
    kind=st.sampled_from(["application/json", "application/json; charset=utf-8", "text/plain", "x"]),
)
def test_any_bytes_have_an_answer(fuzzed, endpoint, body, kind):
    status, _, answer = fuzzed.send("POST", f"/v1/{endpoint}", body, {"Content-Type": kind})
    assert status in (400, 415) and "error" in answer
    fuzzed.wait_idle()


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS to a plain port
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%ff%00/../../etc HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:30]),
)  # fmt: skip
def test_what_is_hardly_http_harms_nobody_else(fuzzed, sent):
    address = fuzzed.front.url.removeprefix("http://").split(":")
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]
    assert fuzzed.send("POST", "/v1/completions", {"model": MODEL.name, "prompt": "hi"}, JSON)[0] == 200
    fuzzed.wait_idle()
