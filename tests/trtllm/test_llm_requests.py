"""What a TensorRT-LLM version ignores of a request is refused before it gets there."""

from __future__ import annotations

import pytest

from trtspec.trtllm.contract import contract_for
from trtspec.trtllm.requests import refusal, sampling_keywords
from trtspec.values import SamplingParams

SAMPLED, SEEDED = {"temperature": 0.8}, {"temperature": 0.8, "seed": 3}


@pytest.mark.parametrize(
    ("version", "speculative", "request_", "says"),
    [
        ("1.2.1", None, {"seed": 3}, None),  # greedy: nothing is drawn
        ("1.2.1", None, SAMPLED, None),
        ("1.2.1", None, SEEDED, "seed"),
        ("1.2.1", None, {"presence_penalty": 0.5}, "penalties"),
        ("1.2.1", None, {"logprobs": True}, None),
        ("1.2.1", {"decoding_type": "NGram"}, SAMPLED, None),
        ("1.2.1", {"decoding_type": "NGram"}, {"logprobs": True}, None),
        ("1.2.1", {"decoding_type": "DraftTarget"}, SAMPLED, None),
        ("1.2.1", {"decoding_type": "Eagle"}, {}, None),
        ("1.2.1", {"decoding_type": "Eagle"}, SAMPLED, "temperature must be 0"),
        ("1.2.1", {"decoding_type": "MTP"}, {"logprobs": True}, "log probabilities"),
        ("1.3.0rc24", None, {"frequency_penalty": 0.5}, None),
        ("1.3.0rc24", {"decoding_type": "Eagle3"}, SAMPLED, None),
        ("1.3.0rc24", {"decoding_type": "Eagle3"}, SEEDED, "seed"),
        ("1.3.0rc29", {"decoding_type": "Eagle3"}, SEEDED, None),
        ("1.3.0rc29", {"decoding_type": "Eagle3"}, {"repetition_penalty": 1.2}, "enable_penalty"),
        ("1.3.0rc29", {"decoding_type": "Eagle3", "enable_penalty": True}, {"repetition_penalty": 1.2}, None),
        ("1.3.0rc29", {"decoding_type": "Draft_Target"}, {"logprobs": True}, "log probabilities"),
        ("1.4.0rc4", {"decoding_type": "NGram"}, {"logprobs": True, **SEEDED, "presence_penalty": 1.0}, None),
    ],
)
def test_what_a_version_ignores_is_refused_and_nothing_else(version, speculative, request_, says):
    problem = refusal(SamplingParams(**request_), contract_for(version), speculative)
    assert problem is None if says is None else says in problem and version in problem


def test_greedy_says_nothing_of_sampling_and_sampling_always_says_top_p():
    """An older runtime takes a missing top_p for 0, which is greedy whatever the temperature."""
    ends = {"limit": 5, "stop_ids": frozenset({7, 2}), "seed": 9}
    greedy = sampling_keywords(SamplingParams(), **ends)
    assert greedy == {
        "max_tokens": 5,
        "ignore_eos": False,
        "detokenize": False,
        "include_stop_str_in_output": True,
        "stop_token_ids": [2, 7],
    }
    sampled = sampling_keywords(SamplingParams(temperature=0.5), **ends)
    assert sampled == {**greedy, "temperature": 0.5, "top_p": 1.0, "seed": 9}
    everything = SamplingParams(
        temperature=1, top_k=4, top_p=0.9, presence_penalty=1, repetition_penalty=2, logprobs=True
    )
    found = sampling_keywords(everything, **ends)
    assert found["top_k"] == 4 and found["presence_penalty"] == 1 and found["repetition_penalty"] == 2
    assert "frequency_penalty" not in found and found["logprobs"] == 1


def test_stop_strings_are_matched_on_text_and_not_handed_on():
    assert "stop" not in sampling_keywords(SamplingParams(stop=("x",)), limit=1, stop_ids=(), seed=0)
