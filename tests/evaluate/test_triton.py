"""Triton's generate_stream becomes a record; gRPC's is held against it in tests/serve, on the real server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from trtspec.evaluate.record import TargetFacts
from trtspec.evaluate.targets import Message
from trtspec.evaluate.triton import TritonHttp
from trtspec.serve.client import RequestFailed
from trtspec.values import SamplingParams

# As Triton spells tensors in JSON: one element stands by itself, several in a list, an empty tensor is absent.
EVENTS = [
    {"model_name": "m", "model_version": "1", "text_output": "a", "token_ids": 1},
    {"text_output": "bcd", "token_ids": [2, 3, 4], "drafted_per_step": 3, "accepted_per_step": 2},
    {"text_output": "ef", "token_ids": [5, 6], "drafted_per_step": [3, 0], "accepted_per_step": [0, 0]},
    {
        "text_output": "",
        "finish_reason": "length",
        "stop_reason": "None",
        "prompt_tokens": 9,
        "completion_tokens": 6,
        "num_steps": 3,
        "total_draft_tokens": 6,
        "total_accepted_draft_tokens": 2,
        "acceptance_length": 5 / 3,
    },
]


class Stub(http.server.BaseHTTPRequestHandler):
    """Answers generate_stream with `events`, or refuses."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict]]
    events: list[dict]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, json.loads(body)))
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in self.events).encode()
        self.send_response(self.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[tuple[type[Stub], str]]:
    kind = type("Answering", (Stub,), {"asked": [], "events": EVENTS})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_address[1]}/v2"
    server.shutdown()
    thread.join()
    server.server_close()


FACTS = TargetFacts("triton http", "unknown", "unknown", None)
ASK = [Message("user", "hello")]


def test_a_stream_becomes_a_record(stub: tuple[type[Stub], str]) -> None:
    kind, url = stub
    target = TritonHttp(url, "m", FACTS)
    for _ in range(2):
        done = target.chat("r", ASK, SamplingParams(max_tokens=6, temperature=0.5, seed=3)).completion
        assert (done.text, done.token_ids, done.prompt_tokens) == ("abcdef", (1, 2, 3, 4, 5, 6), 9)
        steps = [(s.drafted, s.accepted, s.emitted) for s in done.steps]
        assert steps == [(3, 2, 3), (3, 0, 1), (0, 0, 1)]
        assert (done.finish_reason, done.stop_reason) == ("length", None)
        assert 0 < done.ttft_s <= done.steps[0].at_s <= done.total_s
    path, asked = kind.asked[0]
    assert path == "/v2/models/m/generate_stream"
    assert json.loads(asked["messages"]) == [{"role": "user", "content": "hello"}]
    assert asked["streaming"] is True and asked["sampling_param_max_tokens"] == 6
    assert (asked["sampling_param_seed"], asked["return_finish_reason"]) == (3, True)
    target.close()
    target.close()


def test_errors_fail_the_request_in_the_servers_words(stub: tuple[type[Stub], str]) -> None:
    kind, url = stub
    target = TritonHttp(url, "m", FACTS)
    kind.events = [EVENTS[0], {"error": "the server is full"}]
    with pytest.raises(RequestFailed, match="the server is full"):
        target.chat("r", ASK, SamplingParams())
    kind.events = EVENTS[:2]
    with pytest.raises(ValueError, match="without its totals"):
        target.chat("r", ASK, SamplingParams())
    kind.events, kind.status = [{"error": "max_tokens must be in 1..4096"}], 400
    with pytest.raises(RequestFailed, match="must be in") as refused:
        target.chat("r", ASK, SamplingParams())
    assert refused.value.code == "400"
    kind.events, kind.status = EVENTS, 200
    assert target.chat("r", ASK, SamplingParams()).completion.text == "abcdef"
