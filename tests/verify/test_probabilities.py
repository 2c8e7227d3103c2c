"""The target's distribution: order of the steps, ties, padding, penalties at draft positions, broken logits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.values import SamplingParams
from trtspec.verify.probabilities import NotFinite, TargetDistribution, inverse_cdf, probs

LOGITS = np.array([1.0, 3.0, 3.0, 2.0, -1.0, 3.0], np.float32)


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def test_temperature_divides_the_logits():
    p = probs(LOGITS, SamplingParams(temperature=0.5))
    assert p.dtype == np.float64
    assert p == pytest.approx(softmax(LOGITS.astype(float) / 0.5), abs=1e-12)


def test_temperature_zero_is_one_hot_and_ties_go_to_the_lowest_id():
    assert probs(LOGITS, SamplingParams()).tolist() == [0, 1, 0, 0, 0, 0]


def test_temperature_towards_zero_approaches_greedy():
    sharp = np.array([1.0, 3.0, 2.9], np.float32)
    assert probs(sharp, SamplingParams(temperature=1e-6)).tolist() == [0, 1, 0]


def test_top_k_keeps_exactly_k_lower_ids_first_among_equals():
    kept = probs(LOGITS, SamplingParams(temperature=1, top_k=2))
    assert kept.tolist() == [0, 0.5, 0.5, 0, 0, 0]
    assert (probs(LOGITS, SamplingParams(temperature=1, top_k=4)) > 0).tolist() == [0, 1, 1, 1, 0, 1]


def test_top_p_is_measured_after_top_k():
    # after top-2 each has mass 1/2, so the first alone reaches 0.5; before top-k it would have 0.28
    assert probs(LOGITS, SamplingParams(temperature=1, top_k=2, top_p=0.5)).tolist() == [0, 1, 0, 0, 0, 0]


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2])).astype(np.float32)
    kept = [
        (probs(logits, SamplingParams(temperature=1, top_p=t)) > 0).tolist() for t in (0.0, 0.39, 0.41, 0.95)
    ]
    assert kept == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    st.floats(0.1, 3),
    st.integers(0, 45),
    st.floats(0, 1),
)
def test_filters_agree_with_sorting_the_whole_vocabulary(values, temperature, top_k, top_p):
    logits = np.array(values, np.float32) / 4
    got = probs(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    ranked = sorted(range(len(values)), key=lambda i: (-logits[i], i))[: top_k or None]
    p = softmax(logits[ranked].astype(float) / temperature)
    count = 1 + sum(1 for mass in np.cumsum(p)[:-1] if mass < top_p - 1e-12)
    # a mass within rounding of top_p may fall on either side
    borders = {1 + sum(1 for mass in np.cumsum(p)[:-1] if mass < top_p + d) for d in (-1e-12, 1e-12)}
    kept = np.flatnonzero(got).tolist()
    assert kept in [sorted(ranked[:n]) for n in borders | {count}]
    assert got.sum() == pytest.approx(1)
    assert got[kept] == pytest.approx(softmax(logits[kept].astype(float) / temperature), abs=1e-9)


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    padded = np.append(LOGITS, [99.0, 99.0]).astype(np.float32)
    for sampling in (SamplingParams(), SamplingParams(temperature=1)):
        target = TargetDistribution(sampling, vocab_size=6)
        assert len(target.probabilities(padded)) == 6
        assert target.draw(padded, 1 - 2**-53) < 6


@pytest.mark.parametrize(
    "bad", [[np.nan, 1, 2], [1, np.inf, 2], [-np.inf] * 3], ids=["nan", "inf", "all -inf"]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits_are_an_error_and_not_a_token(bad, temperature):
    target = TargetDistribution(SamplingParams(temperature=temperature), vocab_size=3)
    with pytest.raises(NotFinite):
        target.draw(np.array(bad, np.float32), 0.5)


def test_masked_ids_are_allowed_and_have_no_probability():
    masked = np.array([1, -np.inf, 2], np.float32)
    assert probs(masked, SamplingParams(temperature=1))[1] == 0


def test_penalties_follow_their_definitions():
    logits = np.array([2.0, -1.0, 0.5, 4.0], np.float32)
    sampling = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, temperature=1
    )
    target = TargetDistribution(sampling, 4, prompt=(0, 1, 1))
    for token in (3, 3):
        target.append(token)
    # repetition: prompt and output; frequency and presence: output only
    expected = softmax(np.array([2.0 / 2, -1.0 * 2, 0.5, 4.0 / 2 - 2 * 0.25 - 0.5]))
    assert target.probabilities(logits) == pytest.approx(expected)


def test_logprob_is_the_models_own_and_not_that_of_the_one_hot_greedy_distribution():
    logits = np.log(np.array([0.9, 0.1])).astype(np.float32)
    target = TargetDistribution(SamplingParams(logprobs=True), 2)
    assert target.logprob(logits, 0) == pytest.approx(np.log(0.9), abs=1e-6)
    assert target.logprob(logits, 1) == pytest.approx(np.log(0.1), abs=1e-6)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-3),
    st.floats(0, 1, exclude_max=True),
)
def test_inverse_cdf_never_gives_an_id_of_probability_zero(weights, uniform):
    p = np.array(weights) / sum(weights)
    token = inverse_cdf(p, uniform)
    assert p[token] > 0
    assert p[:token].sum() <= uniform + 1e-9
    assert p[: token + 1].sum() >= uniform - 1e-9


def test_inverse_cdf_at_the_upper_end_takes_the_last_id_that_can_be_drawn():
    assert inverse_cdf(np.array([0.5, 0.5, 0.0]), 1 - 2**-53) == 1
