"""Checks of one request that need no server: values at the edges of their ranges, and names one letter off."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.package.requests import (
    BadRequest,
    Limits,
    check_parameters,
    check_prompt_length,
    parse_request,
)
from trtspec.values import SamplingParams

LIMITS = Limits(max_seq_len=64, vocab_size=16)
PARAM = "sampling_param_"


def request(**inputs):
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.array([value])
        for name, value in {"input_ids": np.array([1, 2], np.int32), **inputs}.items()
    }
    return parse_request(arrays, LIMITS)


def test_defaults_are_those_of_the_runtime():
    parsed = request()
    assert parsed.sampling == SamplingParams()
    assert (parsed.streaming, parsed.echo_prompt, parsed.accumulate) == (False, False, None)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 64], [0, -1, 65]),
        ("top_k", [0, 16], [-1, 17]),
        ("top_p", [1e-6, 1.0], [0.0, 1.0001, float("nan"), float("inf")]),
        ("temperature", [0.0, 5.0], [-1e-9, float("nan"), float("inf")]),
        ("presence_penalty", [-2.0, 2.0], [float("nan"), float("inf"), float("-inf")]),
        ("repetition_penalty", [0.5, 2.0], [0.0, -1.0, float("nan"), float("inf")]),
        ("best_of", [1], [0, 2]),
    ],
)
def test_values_at_the_edge_of_their_range(name, good, bad):
    for value in good:
        request(**{PARAM + name: value})
    for value in bad:
        with pytest.raises(BadRequest, match=PARAM + name):
            request(**{PARAM + name: value})


def test_a_prompt_near_the_limit():
    check_prompt_length(63, LIMITS)  # room for one token
    for length in (64, 65):
        with pytest.raises(BadRequest, match=f"{length} tokens.*at most 64"):
            check_prompt_length(length, LIMITS)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("max_tokns", "sampling_param_max_tokens"),
        ("temprature", "sampling_param_temperature"),
        ("stream", "streaming"),
        ("sampling_params_seed", "sampling_param_seed"),
        ("text_inputs", "text_input"),
        ("prompt", None),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(wrong, meant):
    with pytest.raises(BadRequest) as refused:
        check_parameters(json.dumps({wrong: 1}))
    assert repr(wrong) in str(refused.value)
    if meant:
        assert meant in str(refused.value)


@pytest.mark.parametrize(
    "name", ["guided_decoding_guide", "guided_decoding_guide_type", "response_format", "grammar"]
)
def test_a_request_for_a_grammar_is_refused_and_never_answered_without_one(name):
    with pytest.raises(BadRequest, match=name):
        check_parameters(json.dumps({name: "json"}))


def test_the_servers_own_parameters_pass_and_an_id_is_read():
    assert check_parameters("") == check_parameters('{"triton_enable_empty_final_response": true}') == ""
    assert check_parameters('{"id": "r1"}') == "r1"
    with pytest.raises(BadRequest, match="id must be a string"):
        check_parameters('{"id": 5}')


def test_text_must_be_utf8():
    with pytest.raises(BadRequest, match="text_input is not valid UTF-8"):
        parse_request({"text_input": np.array([b"\xff"], dtype=np.object_)}, LIMITS)


@given(
    st.dictionaries(
        st.sampled_from(
            [PARAM + n for n in ("max_tokens", "top_k", "top_p", "temperature", "best_of", "stop")]
        ),
        st.one_of(st.integers(-(2**31), 2**31 - 1), st.floats(width=32), st.binary(max_size=8)).map(
            lambda value: np.array([value])
        ),
    )
)
def test_any_values_are_taken_or_refused_as_a_value_error(inputs):
    try:
        request(**inputs)
    except (BadRequest, TypeError) as error:
        # Triton types its tensors, so only numbers reach numeric inputs.
        if isinstance(error, TypeError):
            assert any(array.dtype.kind == "S" for array in inputs.values())
