"""The packaged model on the real server: the llmapi contract as a client sees it."""

from __future__ import annotations

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.fake_runtime import QUEUE, SLOTS, answer
from trtspec.package.contract import INPUTS
from trtspec.serve.client import RequestFailed
from trtspec.values import SamplingParams

pytestmark = pytest.mark.server


def collect(stream) -> list:
    return list(stream)


def test_one_response_without_streaming_holds_the_whole_text_and_the_acceptance(served):
    status, body = served.post("generate", {"text_input": "hello", "sampling_param_max_tokens": 8})
    answered = json.loads(body)
    assert status == 200
    assert answered["text_output"] == answer(b"hello", 8).decode() == "olleholl"
    # Steps accept 1, 2 and then the one token that is left: 1 prefill token + 2 + 3 + 2 = 8.
    assert answered["accepted_per_step"] == [1, 2, 1]
    assert answered["total_accepted_draft_tokens"] == 4
    assert answered["total_draft_tokens"] == 9
    assert answered["acceptance_rate"] == pytest.approx(4 / 9)
    assert answered["acceptance_length"] == pytest.approx(7 / 3)
    assert (answered["prompt_tokens"], answered["completion_tokens"], answered["num_steps"]) == (5, 8, 3)


def test_streamed_chunks_join_to_the_whole_answer_although_characters_are_split_over_steps(served):
    # Reversed bytes are not UTF-8, so the prompt is given reversed: every step then cuts characters anywhere.
    text = "héllo wörld 😀 日本"
    prompt = tuple(text.encode()[::-1])
    chunks = collect(
        served.client._start("u", {"input_ids": prompt}, SamplingParams(max_tokens=len(prompt)), None)
    )
    assert "".join(chunk.text for chunk in chunks) == text
    assert b"".join(bytes(chunk.token_ids) for chunk in chunks) == text.encode()
    assert any(not chunk.text for chunk in chunks[:-1]) or any("😀" in chunk.text for chunk in chunks)
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    usage = chunks[-1].usage
    assert usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert usage.drafted == sum(chunk.drafted for chunk in chunks)
    assert usage.accepted == sum(chunk.accepted for chunk in chunks)
    assert usage.steps == sum(len(chunk.steps) for chunk in chunks) == len(chunks) - 1
    assert chunks[0].steps == ()  # the prefill token belongs to no step


def events(text: str) -> list[dict]:
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]


def test_stock_clients_can_ask_for_the_text_so_far_in_every_chunk(served):
    body = {"text_input": "abc", "streaming": True, "sampling_param_max_tokens": 9}
    increments = [event["text_output"] for event in events(served.post("generate_stream", body)[1])]
    repeated = [
        event["text_output"]
        for event in events(served.post("generate_stream", {**body, "accumulate_text": True})[1])
    ]
    assert "".join(increments) == repeated[-1] == "cbacbacba"
    assert repeated == ["".join(increments[: i + 1]) for i in range(len(increments))]


def test_asked_for_outputs_come_with_the_last_response_only(served):
    asked = {
        "text_input": "abc",
        "streaming": True,
        "sampling_param_max_tokens": 6,
        "return_finish_reason": True,
        "return_stop_reason": True,
        "return_cumulative_logprob": True,
        "sampling_param_return_perf_metrics": True,
    }
    answered = events(served.post("generate_stream", asked)[1])
    extra = {"finish_reason", "stop_reason", "cumulative_logprob", "arrival_time_ns", "first_token_time_ns"}
    assert all(not extra & event.keys() for event in answered[:-1])
    assert extra < answered[-1].keys()
    assert answered[-1]["finish_reason"] == "length"
    assert (
        answered[-1]["arrival_time_ns"]
        < answered[-1]["first_token_time_ns"]
        <= answered[-1]["last_token_time_ns"]
    )
    del asked["return_finish_reason"]
    assert "finish_reason" not in events(served.post("generate_stream", asked)[1])[-1]


def test_the_prompt_is_repeated_only_when_asked_for(served):
    body = {"text_input": "abc", "sampling_param_max_tokens": 3}
    assert json.loads(served.post("generate", body)[1])["text_output"] == "cba"
    body["sampling_param_exclude_input_from_output"] = False
    assert json.loads(served.post("generate", body)[1])["text_output"] == "abccba"


def test_messages_go_through_the_chat_template(served):
    messages = json.dumps([{"role": "user", "content": "hi"}])
    answered = json.loads(served.post("generate", {"messages": messages, "sampling_param_max_tokens": 8})[1])
    assert answered["text_output"] == "ih>resu<"


REFUSED = {
    "no prompt at all": ({"streaming": True}, "text_input is missing"),
    "an empty body": ({}, "text_input is missing"),
    "an empty prompt": ({"text_input": ""}, "the prompt is empty"),
    "two prompts": ({"text_input": ["a", "b"]}, "one prompt per request, got 2"),
    "two kinds of prompt": ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids are both set"),
    "a misspelt parameter": ({"text_input": "a", "max_tokns": 5}, "did you mean 'sampling_param_max_tokens'"),
    "the short name": ({"text_input": "a", "temperature": 1}, "did you mean 'sampling_param_temperature'"),
    "a wrapped INT32": ({"text_input": "a", "sampling_param_max_tokens": 99999999999}, "must be in 1..4096"),
    "no tokens": ({"text_input": "a", "sampling_param_max_tokens": 0}, "must be in 1..4096"),
    "negative tokens": ({"text_input": "a", "sampling_param_max_tokens": -5}, "must be in 1..4096"),
    "NaN": (b'{"text_input": "a", "sampling_param_temperature": NaN}', "sampling_param_temperature"),
    "infinity": (
        b'{"text_input": "a", "sampling_param_temperature": Infinity}',
        "sampling_param_temperature",
    ),
    "a negative temperature": ({"text_input": "a", "sampling_param_temperature": -1}, "[0, inf)"),
    "top_p of 0": ({"text_input": "a", "sampling_param_top_p": 0}, "(0, 1]"),
    "top_p over 1": ({"text_input": "a", "sampling_param_top_p": 1.5}, "(0, 1]"),
    "a negative top_k": ({"text_input": "a", "sampling_param_top_k": -1}, "must be in 0..256"),
    "NaN penalty": (b'{"text_input": "a", "sampling_param_presence_penalty": NaN}', "presence_penalty"),
    "no repetition penalty": ({"text_input": "a", "sampling_param_repetition_penalty": 0}, "(0, inf)"),
    "several sequences": ({"text_input": "a", "sampling_param_best_of": 2}, "must be 1"),
    "an adapter": ({"text_input": "a", "lora_name": "x"}, "LoRA"),
    "an empty stop string": ({"text_input": "a", "sampling_param_stop": [""]}, "empty string"),
    "a long prompt": ({"text_input": "a" * 4096}, "at most 4096"),
    "an unknown token": ({"input_ids": [1, 256]}, "must be in 0..255, got 256"),
    "messages that are no JSON": ({"messages": "hi"}, "not JSON"),
    "messages without content": ({"messages": '[{"role": "user"}]'}, "messages[0]"),
    "a stop without an id": ({"stop": True}, "stop needs the id"),
    "a list under an unknown key": ({"text_input": "a", "foo": [1]}, "foo"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_what_cannot_be_honoured_is_refused_by_name_and_for_that_request_only(served, case, endpoint):
    body, says = REFUSED[case]
    status, text = served.post(endpoint, body)
    assert status == 400, text
    assert says in text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b'{"text_input": 5}', b'{"text_input": null}', b"\xff\xfe", b"{" * 1000],
)
def test_bodies_that_are_not_json_of_the_right_types_leave_the_server_up(served, body):
    status, text = served.post("generate", body)
    assert status in (400, 500), text
    assert "error" in text
    assert served.server.probe("tensorrt_llm") is None


def test_an_engine_error_ends_its_request_and_no_other(served):
    status, text = served.post("generate", {"text_input": "break"})
    assert status in (400, 500)  # this Triton's HTTP front end says 400 for every model error, gRPC the code
    assert "the engine dropped this request" in text
    with pytest.raises(RequestFailed, match="the engine dropped this request") as failed:
        collect(served.client.stream_text("b", "break", SamplingParams()))
    assert failed.value.code == "INTERNAL"
    assert served.post("generate", {"text_input": "ok", "sampling_param_max_tokens": 2})[0] == 200
    assert served.metrics()["trtspec_requests_total{finish_reason=error}"] >= 2


def test_past_slots_and_queue_a_request_is_refused_with_the_setting_to_change(served):
    served.wait_idle()
    long = SamplingParams(max_tokens=2000)
    with ThreadPoolExecutor(SLOTS + QUEUE) as pool:
        streams = [served.client.stream_text(f"q{i}", "hello", long) for i in range(SLOTS + QUEUE)]
        ends = [pool.submit(lambda stream=stream: collect(stream)[-1]) for stream in streams]
        while (
            sum(served.metrics()[f"trtspec_{kind}_requests"] for kind in ("active", "queued")) < SLOTS + QUEUE
        ):
            time.sleep(0.02)
        with pytest.raises(RequestFailed, match=r"serving\.max_queue_size") as refused:
            collect(served.client.stream_text("late", "hello", long))
        assert refused.value.code == "UNAVAILABLE"
        status, text = served.post("generate", {"text_input": "late"})
        assert status in (400, 503)
        assert "serving.max_queue_size" in text
        for i in range(SLOTS + QUEUE):
            served.client.stop(f"q{i}")
        assert {end.result().finish_reason for end in ends} == {"cancelled"}
    served.wait_idle()


@pytest.mark.parametrize("way", ["stream.cancel", "closed connection", "stop by id", "stop by id over HTTP"])
def test_a_cancelled_request_frees_its_slot_within_a_few_tokens(served, way):
    served.wait_idle()
    before = served.metrics().get("trtspec_generated_tokens_total", 0)
    if way == "closed connection":
        host, port = served.server.http_url.removeprefix("http://").split(":")
        body = json.dumps({"text_input": "hello", "streaming": True, "sampling_param_max_tokens": 4000})
        head = f"POST /v2/models/tensorrt_llm/generate_stream HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Host: x\r\nContent-Type: application/json\r\n\r\n{body}".encode())
            connection.recv(100)
    else:
        stream = served.client.stream_text("long", "hello", SamplingParams(max_tokens=4000))
        chunks = iter(stream)
        next(chunks)
        if way == "stream.cancel":
            stream.cancel()
        elif way == "stop by id":
            served.client.stop("long")
            assert collect(chunks)[-1].finish_reason == "cancelled"
        else:
            assert served.post("generate", {"id": "long", "stop": True})[0] == 200
            assert collect(chunks)[-1].finish_reason == "cancelled"
    served.wait_idle(2)
    # The fake engine makes 4000 tokens in about 4 s; a few steps fit between the cancel and its notice.
    assert served.metrics()["trtspec_generated_tokens_total"] - before < 400
    assert served.metrics()["trtspec_requests_total{finish_reason=cancelled}"] >= 1


def test_metrics_are_there_before_the_client_has_the_last_chunk(served):
    names = {
        "prompt_tokens_total": 5,
        "generated_tokens_total": 8,
        "drafted_tokens_total": 9,
        "accepted_tokens_total": 4,
        "verify_steps_total": 3,
        "requests_total{finish_reason=length}": 1,
        "verify_steps_by_accepted_total{accepted=1}": 2,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "request_duration_seconds_count": 1,
        "acceptance_length_count": 1,
    }
    served.wait_idle()
    before = served.metrics()
    collect(served.client.stream_text("m", "hello", SamplingParams(max_tokens=8)))
    after = served.metrics()
    grown = {name: after[f"trtspec_{name}"] - before.get(f"trtspec_{name}", 0) for name in names}
    assert grown == names
    assert after["trtspec_acceptance_length_sum"] - before.get(
        "trtspec_acceptance_length_sum", 0
    ) == pytest.approx(7 / 3)
    assert 1 < after["trtllm:spec_accept_length"] <= 4
    assert 0 < after["trtllm:spec_accept_rate"] < 1


def test_thirty_two_streams_with_a_third_cancelled_all_end_right_and_nothing_stays(served):
    served.wait_idle()
    stub = next(iter(served.server.stubs()))
    before = footprint(stub)

    def one(index: int) -> str:
        prompt = f"prompt number {index} "
        sampling = SamplingParams(max_tokens=200 + index)
        while True:
            try:
                text = ""
                with served.client.stream_text(f"s{index}", prompt, sampling) as stream:
                    for chunk in stream:
                        text += chunk.text
                        if index % 3 == 0 and len(text) > 20:
                            return "cancelled"
                assert text == answer(prompt.encode(), 200 + index).decode()
                return "complete"
            except RequestFailed as refused:
                assert refused.code == "UNAVAILABLE"
                time.sleep(0.05)

    with ThreadPoolExecutor(32) as pool:
        ends = list(pool.map(one, range(32)))
    assert ends.count("cancelled") == 11
    assert ends.count("complete") == 21
    served.wait_idle()
    after = footprint(stub)
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert served.server.probe("tensorrt_llm") is None


def footprint(pid: int) -> dict[str, int]:
    process = Path(f"/proc/{pid}")
    return {
        "threads": len(list((process / "task").iterdir())),
        "descriptors": len(list((process / "fd").iterdir())),
    }


def test_random_requests_are_answered_or_refused_and_the_server_stays_up(served):
    """Fuzz over `/generate`: known inputs with values of every JSON type, unknown keys, broken syntax."""
    draw = random.Random(7)
    names = [tensor.name for tensor in INPUTS] + ["max_tokens", "promt", "id", "parameters", "😀"]
    values = [
        0,
        1,
        -1,
        2**31,
        -(2**31) - 1,
        2**64,
        1e308,
        0.5,
        True,
        None,
        "",
        "a",
        "é😀",
        "a" * 5000,
        [],
        [1, 2],
        ["a"],
    ]
    values += [[[1]], {"a": 1}, "\x00", "[]", '[{"role": "user", "content": "x"}]', [True, False]]
    statuses = set()
    for _ in range(300):
        body = {draw.choice(names): draw.choice(values) for _ in range(draw.randrange(6))}
        if draw.random() < 0.5:
            body["text_input"] = "abc"
        body.setdefault("sampling_param_max_tokens", draw.randrange(1, 6))
        raw = json.dumps(body).encode()
        if draw.random() < 0.2:
            cut = draw.randrange(len(raw))
            raw = raw[:cut] + bytes([draw.randrange(256)]) + raw[cut + draw.randrange(3) :]
        status, text = served.post("generate", raw)
        statuses.add(status)
        assert status == 200 or "error" in text
    assert {200, 400} <= statuses <= {200, 400, 500}
    served.wait_idle()
    assert served.server.probe("tensorrt_llm") is None
