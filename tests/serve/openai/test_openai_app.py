"""OpenAI's endpoints over HTTP, before a server whose answers and failures a test chooses."""

from __future__ import annotations

import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.openai.conftest import JSON, events
from tests.serve.openai.fake_upstream import DRAFT, LOGPROB, MODEL
from trtspec.cli import main
from trtspec.errors import SetupError
from trtspec.serve.openai.answers import speculative_metrics
from trtspec.serve.openai.app import MAX_BODY_BYTES
from trtspec.serve.openai.front import FrontOptions, OpenAIFront

TEXT = "Grüße, 世界 🌍!"


def test_a_chat_has_openais_shape_and_exact_counts(caller):
    status, _, answer = caller.chat(TEXT, max_tokens=200)
    assert status == 200
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["model"] == MODEL.name and answer["created"] == pytest.approx(time.time(), abs=60)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    size = len(TEXT.encode())
    assert answer["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": size,
        "total_tokens": 2 * size,
    }


def test_a_completion_has_its_own_shape(caller):
    status, _, answer = caller.complete([104, 105])
    assert status == 200
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}]
    assert caller.upstream.seen[-1][0] == {"input_ids": (104, 105)}


def test_a_stream_says_what_the_whole_answer_says(caller):
    _, _, whole = caller.chat(TEXT)
    status, headers, text = caller.chat(TEXT, stream=True, stream_options={"include_usage": True})
    assert status == 200 and headers.get_content_type() == "text/event-stream"
    first, *parts, last = events(text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {part["object"] for part in (first, *parts, last)} == {"chat.completion.chunk"}
    assert len({part["id"] for part in (first, *parts, last)}) == 1
    said = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert said == whole["choices"][0]["message"]["content"] == TEXT
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert all(part["usage"] is None for part in (first, *parts))
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert last["metrics"] == whole["metrics"]


def test_a_stream_without_the_option_has_no_usage(caller):
    parts = events(caller.complete("abc", stream=True)[2])
    assert "".join(part["choices"][0]["text"] for part in parts) == "abc"
    assert not any("usage" in part or "metrics" in part for part in parts)


def test_several_choices_and_prompts_keep_their_places_and_a_prompt_counts_once(caller):
    _, _, answer = caller.complete(["one", "three"], n=2, seed=5)
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "three", "three"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24}
    assert sorted(sampling.seed for _, sampling in caller.upstream.seen) == [5, 5, 6, 6]
    assert "metrics" not in answer  # one request's acceptance, and these are four
    said = dict.fromkeys(range(4), "")
    for part in events(caller.complete(["one", "three"], n=2, stream=True)[2]):
        said[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert list(said.values()) == ["one", "one", "three", "three"]


def test_log_probabilities_are_of_tokens_whose_texts_make_the_answer(caller):
    _, _, answer = caller.chat(TEXT, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert "".join(token["token"] for token in content) == TEXT
    assert bytes(byte for token in content for byte in token["bytes"]) == TEXT.encode()
    assert {token["logprob"] for token in content} == {LOGPROB}
    parts = events(caller.chat(TEXT, logprobs=True, stream=True)[2])
    streamed = [
        token for part in parts for token in (part["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_text_offsets_of_a_completion_point_into_its_text(caller):
    (choice,) = caller.complete(TEXT, logprobs=0)[2]["choices"]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    parts = events(caller.complete(TEXT, logprobs=0, stream=True)[2])
    streamed = [offset for part in parts for offset in part["choices"][0]["logprobs"]["text_offset"]]
    assert streamed == logprobs["text_offset"]


def test_acceptance_of_a_request_has_vllms_shape_and_adds_up(caller):
    _, _, answer = caller.complete("x" * 16)
    found = answer["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert len(histogram) == found["num_spec_tokens"] + 1 == DRAFT + 1
    assert sum(histogram) == found["num_spec_steps"]
    accepted = sum(index * steps for index, steps in enumerate(histogram))
    assert accepted == found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + accepted / found["num_spec_steps"]
    assert [found["per_step_accepted"].count(taken) for taken in range(DRAFT + 1)] == histogram
    assert found["per_step_drafted"] == [DRAFT] * found["num_spec_steps"]
    assert 1 + accepted + found["num_spec_steps"] == 16  # the prefill token, then all others


def test_without_speculation_there_is_no_measurement_and_without_a_step_there_are_zeros():
    assert speculative_metrics([(0, 0), (0, 0)], 0) is None
    alone = speculative_metrics([], 3)
    assert (alone["num_spec_steps"], alone["acceptance_histogram"]) == (0, [0, 0, 0, 0])
    assert (alone["per_step_accepted"], alone["mean_acceptance_length"]) == ([], 1.0)
    idle = speculative_metrics([(0, 0), (0, 0)], 3)
    assert (idle["draft_acceptance_rate"], idle["mean_acceptance_length"]) == (0.0, 1.0)
    assert speculative_metrics([(5, 5)], 3)["acceptance_histogram"] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "kind"),
    [
        ("full", 429, "rate_limit_error"),
        ("bad", 400, "invalid_request_error"),
        ("gone", 503, "server_error"),
    ],
)
def test_a_request_the_server_refuses_has_its_status_streamed_or_not(caller, prompt, status, kind, stream):
    found, headers, answer = caller.chat(prompt, stream=stream)
    assert (found, answer["error"]["type"]) == (status, kind)
    assert ("Retry-After" in headers) == (status != 400)
    caller.wait_idle()


def test_one_refused_choice_ends_the_others(caller):
    assert caller.complete(["forever", "full"], max_tokens=4000)[0] == 429
    caller.wait_idle()


def test_a_stream_that_breaks_ends_with_an_error_and_is_not_called_done(caller):
    status, _, text = caller.complete("late and long", stream=True)
    *_, last, rest = text.split("\n\n")
    assert status == 200 and rest == "" and "[DONE]" not in text
    assert "dropped" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert caller.complete("late and long")[0] == 200  # unstreamed it has one chunk


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_is_told_without_its_inner_life_and_noted(caller, noted, stream):
    status, _, reply = caller.chat("odd and long", stream=stream)
    if stream:
        *_, last, _ = reply.split("\n\n")
        assert status == 200 and "[DONE]" not in reply
        reply = json.loads(last.removeprefix("data: "))
    else:
        assert status == 500
    assert reply["error"]["code"] == "internal_error" and "secret" not in reply["error"]["message"]
    (note,) = noted
    assert "secret" in note.text and note.level == "warning"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_requests(caller, stream):
    connection = caller.connect()
    body = {"model": MODEL.name, "prompt": "forever", "stream": stream, "n": 3, "max_tokens": 4000}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    deadline = time.monotonic() + 5
    while caller.upstream.open < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    if stream:
        assert connection.getresponse().read(20)
    connection.sock.close() if connection.sock else connection.close()
    connection.close()
    caller.wait_idle()


def test_wrong_addresses_types_and_sizes(caller):
    zipped = {**JSON, "Content-Encoding": "gzip"}
    for method, path, body, headers, status in (
        ("GET", "/", None, {}, 404),
        ("POST", "/v1/embeddings", {}, JSON, 404),
        ("GET", "/v1/chat/completions", None, {}, 405),
        ("POST", "/v1/chat/completions", b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/v1/chat/completions", b"{", JSON, 400),
        ("POST", "/v1/chat/completions", b" " * (MAX_BODY_BYTES + 1), JSON, 413),
        ("POST", "/v1/completions", gzip.compress(b" " * (MAX_BODY_BYTES + 1)), zipped, 413),
        ("POST", "/v1/completions", b"no gzip", zipped, 400),
        ("POST", "/v1/completions", {"model": "other", "prompt": "x"}, JSON, 404),
        ("GET", "/v1/models/other", None, {}, 404),
    ):  # fmt: skip
        found, sent, answer = caller.send(method, path, body, headers)
        assert found == status, (method, path, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert ("Allow" in sent) == (status == 405)
    assert caller.upstream.seen == []


def test_models_are_listed_with_what_clients_ask_for(caller):
    _, _, models = caller.send("GET", "/v1/models")
    (card,) = models["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 4096)
    assert caller.send("GET", "/v1/models/toy")[2] == card


def test_health_is_the_models_readiness(caller):
    assert caller.send("GET", "/health")[0] == 200
    caller.upstream.up = False
    status, headers, _ = caller.send("GET", "/health")
    assert status == 503 and "Retry-After" in headers


def test_metrics_are_relayed_and_a_probe_gets_no_body(caller):
    status, headers, text = caller.send("GET", "/metrics")
    assert (status, text) == (200, "trtspec_active_requests 0\n")
    assert headers.get_content_type() == "text/plain"
    connection = caller.connect()
    for method in ("HEAD", "GET"):  # on one connection: a body after HEAD would be read as the next answer
        connection.request(method, "/metrics")
        response = connection.getresponse()
        assert response.status == 200
        assert bool(response.read()) == (method == "GET")
    connection.close()


def test_a_drain_lets_running_answers_finish_and_refuses_new_ones(caller):
    answers = []
    body = {"prompt": "forever", "max_tokens": 100, "stream": True}
    running = threading.Thread(target=lambda: answers.append(caller.complete(**body)))
    running.start()
    deadline = time.monotonic() + 5
    while not caller.upstream.open and time.monotonic() < deadline:
        time.sleep(0.01)
    caller.front.drain(20)
    assert caller.chat("hi")[0] == 503
    assert caller.send("GET", "/health")[0] == 503
    running.join(20)
    ((status, _, text),) = answers
    assert status == 200
    assert sum(len(part["choices"][0]["text"]) for part in events(text)) == 100
    caller.front.close()
    with pytest.raises(ConnectionRefusedError):
        caller.chat("hi")


def test_a_drain_ends_at_its_limit(caller):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(caller.complete, "forever", max_tokens=4000, stream=True)
        deadline = time.monotonic() + 5
        while not caller.upstream.open and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        caller.front.drain(0.2)
        caller.front.close()
        assert time.monotonic() - began < 10
        assert running.exception(10) is not None or "[DONE]" not in running.result()[2]
    assert caller.upstream.open == 0


def test_a_busy_port_names_its_setting(caller):
    port = int(caller.front.url.rpartition(":")[2])
    second = OpenAIFront(FrontOptions((MODEL,), port=port), lambda: caller.upstream)
    with pytest.raises(SetupError) as refused:
        second.start()
    assert refused.value.where == "serving.openai_port"
    second.close()


def test_options_of_the_front_without_the_front_are_refused(tmp_path, capsys):
    assert main(["serve", str(tmp_path), "--openai-port", "9000"]) == 2
    assert "--openai" in capsys.readouterr().err


def test_64_streams_at_once_with_cancels_leave_the_others_right_and_nothing_open(caller):
    def one(index: int) -> str | None:
        text = f"{index}: {TEXT * 3}"
        if index % 3:
            parts = events(caller.chat(text, stream=True)[2])
            return "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        connection = caller.connect()
        body = {"model": MODEL.name, "prompt": f"forever {text}", "stream": True, "max_tokens": 4000}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        response.read(30)
        response.close()
        connection.close()
        return None

    with ThreadPoolExecutor(64) as pool:
        said = list(pool.map(one, range(64)))
    assert said == [f"{index}: {TEXT * 3}" if index % 3 else None for index in range(64)]
    caller.wait_idle()
    assert caller.chat("still here")[0] == 200
