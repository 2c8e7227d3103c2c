"""From OpenAI's fields to the served model's: everything is honoured or refused."""

from __future__ import annotations

import json

import pytest

from trtspec.serve.client import RequestFailed, sampling_inputs
from trtspec.serve.openai.errors import ApiError, from_server
from trtspec.serve.openai.requests import NEUTRAL, parse_chat, parse_completion
from trtspec.values import SamplingParams


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode())


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def test_defaults_are_openais_and_not_the_engines():
    assert chat().samplings == (SamplingParams(temperature=1.0),)
    assert completion().samplings == (SamplingParams(temperature=1.0, max_tokens=16),)
    assert not chat().stream and not chat().include_usage and not chat().logprobs


def test_every_sampling_field_arrives():
    ask = chat(
        max_completion_tokens=7, temperature=0, top_p=0.5, seed=3, stop=["a", "b"], presence_penalty=0.1,
        frequency_penalty=-0.2, logprobs=True, top_k=5, repetition_penalty=1.1, ignore_eos=True, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert ask.samplings == (
        SamplingParams(
            max_tokens=7, temperature=0, top_k=5, top_p=0.5, seed=3, presence_penalty=0.1,
            frequency_penalty=-0.2, repetition_penalty=1.1, stop=("a", "b"), ignore_eos=True, logprobs=True,
        ),
    )  # fmt: skip
    assert ask.stream and ask.include_usage and ask.logprobs


def test_messages_are_handed_on_for_the_server_to_apply_the_template_once():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": [], "annotations": []}
    ask = chat(
        messages=[{"role": "developer", "content": "brief"}, answer, {"role": "user", "content": parts}]
    )
    (prompt,) = ask.prompts
    assert json.loads(prompt["messages"]) == [
        {"role": "system", "content": "brief"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "one\ntwo"},
    ]


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", [{"text_input": "a"}]),
        (["a", "b"], [{"text_input": "a"}, {"text_input": "b"}]),
        ([1, 2], [{"input_ids": (1, 2)}]),
        ([[1], [2, 3]], [{"input_ids": (1,)}, {"input_ids": (2, 3)}]),
    ],
)
def test_prompts_of_every_form(prompt, inputs):
    assert list(completion(prompt=prompt).prompts) == inputs


def test_choices_of_a_seeded_request_differ_and_repeat():
    assert [s.seed for s in chat(n=3, seed=7).samplings] == [7, 8, 9]
    assert [s.seed for s in chat(n=2, seed=2**64 - 1).samplings] == [2**64 - 1, 0]
    assert [s.seed for s in chat(n=1, seed=-1).samplings] == [2**64 - 1]
    assert [s.seed for s in chat(n=2).samplings] == [None, None]
    for sampling in chat(n=2, seed=-5).samplings:
        assert 0 <= sampling_inputs(sampling)["sampling_param_seed"] < 2**64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"min_p": 0.1}, "min_p"),
        ({"stop_token_ids": [2]}, "stop_token_ids"),
        ({"prompt": "x"}, "prompt"),
        ({"temprature": 0.5}, "temprature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.0}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert refused.value.body()["error"]["type"] == "invalid_request_error"
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_completions_refuse_what_they_cannot_do(fields, param):
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_clients_may_send_their_defaults():
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            assert chat(**{name: value}) == chat(), (name, value)
    assert chat(user="u", safety_identifier="s", stop=None, n=None, seed=None, top_k=-1) == chat()
    assert completion(logprobs=0).logprobs and not completion(logprobs=None).logprobs


def test_a_misspelt_field_is_answered_with_the_right_one():
    with pytest.raises(ApiError) as refused:
        chat(max_token=5)
    assert "did you mean 'max_tokens'" in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        '{"model": "m"}'.encode("utf-16"),
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=repr,
)
def test_what_is_no_json_object_is_refused(body):
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as refused:
            parse(body)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    ("code", "message", "status"),
    [
        ("INVALID_ARGUMENT", "the prompt is empty", 400),
        ("UNAVAILABLE", "the server is full: 4 requests are being decoded", 429),
        ("UNAVAILABLE", "failed to connect to all addresses", 503),
        ("NOT_FOUND", "Request for unknown model", 503),
        ("INTERNAL", "the engine dropped this request", 500),
        ("INCOMPLETE", "the stream ended early", 500),
    ],
)
def test_what_the_server_says_has_its_status(code, message, status):
    error = from_server(RequestFailed(message, code=code))
    assert error.status == status
    assert ("Retry-After" in error.headers) == (status in (429, 503))
