"""The front before the real server: a rule for a model first, then the quickstart build and the command line."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.serve.conftest import MODEL as NAME
from tests.serve.conftest import Served, free_ports
from tests.serve.fake_runtime import QUEUE, SLOTS, answer
from tests.serve.openai.conftest import JSON, Caller, events, fronted
from tests.serve.openai.fake_upstream import MODEL
from tests.serve.openai.malformed import CORPUS, crowd, refused_rightly
from trtspec.runtime import Runtime
from trtspec.serve.openai.front import FrontOptions
from trtspec.serve.supervise import options_from_build
from trtspec.serve.triton import ServerOptions, TritonServer
from trtspec.values import GenerationRequest, SamplingParams

pytestmark = pytest.mark.server


@pytest.fixture
def toy(served) -> Iterator[Caller]:
    with fronted(served, FrontOptions((replace(MODEL, name=NAME),), port=0)) as caller:
        yield caller
    served.wait_idle()


def body(prompt: str, **fields) -> dict[str, object]:
    return {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}


def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_requests_cross_the_real_server_whole_and_streamed(toy):
    prompt = "añb世"
    expected = answer(prompt.encode(), 12).decode("utf-8", "replace")
    _, _, whole = toy.send("POST", "/v1/completions", body(prompt))
    assert whole["choices"][0]["text"] == expected
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}
    parts = events(toy.send("POST", "/v1/completions", body(prompt, stream=True))[2])
    assert "".join(part["choices"][0]["text"] for part in parts) == expected
    message = {"role": "user", "content": "hi"}
    _, _, chat = toy.send("POST", "/v1/chat/completions", {**body(""), "prompt": None, "messages": [message]})
    assert chat["choices"][0]["message"]["content"] == answer(b"<user>hi", 12).decode()


def test_a_full_queue_is_429_and_what_it_turned_away_is_served_later(toy, served):
    with ThreadPoolExecutor(SLOTS + QUEUE + 8) as pool:
        prompts = [f"{index} " + "x" * 40 for index in range(SLOTS + QUEUE + 8)]
        found = list(
            pool.map(lambda p: toy.send("POST", "/v1/completions", body(p, max_tokens=1500)), prompts)
        )
    statuses = [status for status, _, _ in found]
    assert set(statuses) == {200, 429}
    for status, headers, reply in found:
        if status == 429:
            assert headers["Retry-After"] == "1" and reply["error"]["code"] == "queue_full"
    served.wait_idle(20)
    assert toy.send("POST", "/v1/completions", body("again"))[0] == 200


def test_what_only_the_model_can_judge_is_a_400_before_the_stream_begins(toy):
    for stream in (False, True):
        status, _, reply = toy.send("POST", "/v1/completions", body("x" * 5000, stream=stream))
        assert status == 400 and "4096" in reply["error"]["message"]
    assert toy.send("POST", "/v1/completions", body("x", top_k=100_000))[0] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slots(toy, served, stream):
    served.wait_idle()
    connection = toy.connect()
    long = body("slow" * 10, stream=stream, n=SLOTS, max_tokens=4000)
    connection.request("POST", "/v1/completions", json.dumps(long), JSON)
    wait_for(lambda: served.metrics()["trtspec_active_requests"] == SLOTS)

    def cancelled() -> float:
        return served.metrics().get("trtspec_requests_total{finish_reason=cancelled}", 0)

    before = cancelled()
    connection.close()
    # A slot is free a moment before its request is counted: the count is what must be waited for.
    wait_for(lambda: cancelled() == before + SLOTS)
    served.wait_idle()


def test_health_models_and_metrics_are_the_servers(toy):
    assert toy.send("GET", "/health")[0] == 200
    assert toy.send("GET", "/v1/models")[2]["data"][0]["id"] == NAME
    assert "trtllm:spec_accept_length" in toy.send("GET", "/metrics")[2]


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_each_malformed_request_has_its_status_and_openais_error(toy, case):
    status, _, reply = toy.send(case.method, case.path, case.body(NAME), case.headers)
    assert status == case.status, reply
    assert set(reply["error"]) == {"message", "type", "param", "code"} and reply["error"]["message"]


def test_mutated_requests_are_answered_or_refused_and_never_an_internal_error(toy, served):
    draw = random.Random(11)
    bodies = [case.body(NAME) for case in CORPUS] + [json.dumps(body("hi", stream=True, n=2)).encode()] * 20
    bodies = [raw for raw in bodies if 0 < len(raw) < 1000]
    statuses = []
    for _ in range(250):
        raw = bytearray(draw.choice(bodies))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(raw) + 1)
            raw[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        status, _, reply = toy.send(
            "POST", draw.choice(("/v1/completions", "/v1/chat/completions")), bytes(raw)
        )
        statuses.append(status)
        assert status == 200 or reply["error"]["message"]
    assert set(statuses) <= {200, 400, 404} and statuses.count(400) > 100
    served.wait_idle()
    assert toy.front.running == 0 and toy.send("POST", "/v1/completions", body("again"))[0] == 200


def test_64_streams_with_cancels_and_malformed_requests_leave_the_others_right(make_repository):
    with TritonServer(ServerOptions(make_repository(max_queue_size=100), **free_ports())) as server:
        server.wait_ready(60)
        served = Served(server)
        with fronted(served, FrontOptions((replace(MODEL, name=NAME),), port=0)) as caller:
            crowd(served, caller, NAME, answer)
        served.client.close()
        assert server.stop() == 0


# The quickstart build

SUBJECTS = ("rivers", "bread", "the moon", "prime numbers", "a lighthouse", "rain", "chess", "trains")
STREAMS = 64


def fields(index: int) -> dict[str, object]:
    """Every third is sampled; its seed makes it repeatable."""
    if index % 3 == 2:
        return {"temperature": 0.8, "top_p": 0.95, "seed": index, "max_tokens": 16}
    return {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def messages() -> list[list[dict[str, str]]]:
    tasks = ("Write a line about {}.", "List three facts about {}.", "Explain {} to a child.", "What is {}?")
    asked = [task.format(subject) for task in tasks for subject in SUBJECTS]
    return [[{"role": "user", "content": f"{text}{end}"}] for end in ("", " Be brief.") for text in asked]


@pytest.fixture(scope="module")
def in_process(quickstart_build, messages):
    with Runtime.open(quickstart_build / "engine") as runtime:
        return runtime.generate_many(
            GenerationRequest(
                f"p{index}",
                tuple(runtime.tokenizer.chat(conversation)),
                SamplingParams(**fields(index), logprobs=True),
            )
            for index, conversation in enumerate(messages)
        )


@pytest.mark.model
def test_64_quickstart_streams_say_what_the_runtime_says_with_cancels_and_malformed_requests_in_between(
    quickstart_build, messages, in_process
):
    with TritonServer(options_from_build(quickstart_build, **free_ports())) as server:
        server.wait_ready(300)
        quickstart = Served(server)
        with fronted(quickstart, FrontOptions.from_build(quickstart_build, port=0)) as caller:

            def one(index: int) -> object:
                ask = {"model": NAME, "messages": messages[index], "stream": True, **fields(index)}
                if index % 8 == 0:
                    return caller.leave("/v1/chat/completions", ask)
                if index % 8 == 4:
                    return refused_rightly(caller.send, NAME, index)
                parts = events(caller.send("POST", "/v1/chat/completions", ask)[2])
                return "".join(part["choices"][0]["delta"].get("content", "") for part in parts)

            with ThreadPoolExecutor(STREAMS) as pool:
                said = list(pool.map(one, range(STREAMS)))
            for index, (text, expected) in enumerate(zip(said, in_process, strict=True)):
                assert text == {0: None, 4: True}.get(index % 8, expected.text), index
            quickstart.wait_idle()

            ask = {"model": NAME, "messages": messages[1], "logprobs": True, **fields(1)}
            _, _, whole = caller.send("POST", "/v1/chat/completions", ask)
            (choice,), expected = whole["choices"], in_process[1]
            assert choice["message"]["content"] == expected.text
            assert choice["finish_reason"] == expected.finish_reason
            assert whole["usage"]["prompt_tokens"] == expected.prompt_tokens
            assert whole["usage"]["completion_tokens"] == len(expected.token_ids)
            tokens = choice["logprobs"]["content"]
            assert [token["logprob"] for token in tokens] == pytest.approx(list(expected.logprobs), abs=1e-4)
            assert "".join(token["token"] for token in tokens) == expected.text
            speculation = whole["metrics"]["speculative_decoding"]
            # How much is drafted depends on the load; that the steps make the text does not.
            steps, accepted = speculation["num_spec_steps"], speculation["num_accepted_draft_tokens"]
            assert sum(speculation["acceptance_histogram"]) == steps
            assert len(expected.token_ids) in (
                1 + steps + accepted,
                steps + accepted,
            )  # a stop may cut the last
        quickstart.client.close()
        assert server.stop() == 0


@pytest.mark.model
def test_the_command_serves_outlives_triton_drains_on_sigterm_and_leaves_with_zero(quickstart_build):
    ports = [f"--{kind}-port=0" for kind in ("http", "grpc", "metrics", "openai")]
    command = [sys.executable, "-m", "trtspec", "serve", str(quickstart_build), "--openai", "--json", *ports]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )

    def connect() -> http.client.HTTPConnection:
        return http.client.HTTPConnection(url.removeprefix("http://").removesuffix("/v1"), timeout=60)

    def health() -> int:
        connection = connect()
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
        return status

    try:
        result = json.loads(process.stdout.readline())["result"]
        url = result["openai"]
        assert url.endswith("/v1") and health() == 200
        os.kill(result["pid"], signal.SIGKILL)
        for status in (503, 200):
            wait_for(lambda status=status: health() == status, 90)
        connection = connect()
        ask = body("Once upon a time", stream=True, max_tokens=150, ignore_eos=True)
        connection.request("POST", "/v1/completions", json.dumps(ask), JSON)
        response = connection.getresponse()
        beginning = response.read(10).decode()
        threading.Timer(0.1, process.send_signal, [signal.SIGTERM]).start()
        parts = events(beginning + response.read().decode())
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
