"""Acceptance laws: each known value, and each against the others in the limits where they describe one case."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.plan.acceptance import (
    AcceptanceCurve,
    acceptance_length,
    alpha_from_acceptance_length,
    co_design_speedup,
    conditional_rates,
    curve_from_points,
    expected_tokens,
    leviathan_speedup,
    marginals,
    projected_speedup,
    replayed_steps,
    tree_acceptance_length,
)
from trtspec.plan.priors import choose_prior, priors

rates = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_known_values() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert acceptance_length([0.816, 0.777, 0.750]) == pytest.approx(2.926, abs=5e-4)


@pytest.mark.parametrize(
    ("al", "plain", "speculative", "expected", "measured"),
    [
        (2.12, 19.6, 25.9, 1.604, 1.63),
        (2.93, 19.6, 25.9, 2.217, 2.23),
        (1.17, 25.2, 34.1, 0.865, 0.85),
        (2.60, 25.2, 59.9, 1.094, 1.09),
    ],
)
def test_published_projections(
    al: float, plain: float, speculative: float, expected: float, measured: float
) -> None:
    assert projected_speedup(al, plain, speculative) == pytest.approx(expected, abs=5e-4)
    assert projected_speedup(al, plain, speculative) == pytest.approx(measured, abs=0.03)


@given(st.floats(0, 1), st.integers(0, 40))
def test_a_constant_rate_is_the_general_law(alpha: float, length: int) -> None:
    assert expected_tokens(alpha, length) == pytest.approx(acceptance_length([alpha] * length), rel=1e-9)


@given(rates)
def test_a_chain_is_a_tree_of_one_branch(conditional: list[float]) -> None:
    parents = [index - 1 for index in range(len(conditional))]
    assert tree_acceptance_length(parents, conditional) == pytest.approx(acceptance_length(conditional))


@given(st.floats(0, 0.5), st.floats(0, 0.5), st.integers(1, 6))
def test_a_full_binary_tree_is_a_chain_of_summed_rates(first: float, second: float, depth: int) -> None:
    """Siblings exclude each other, so two children accept with first + second; all branches alike."""
    parents, node_rates, level = [], [], [-1]
    for _ in range(depth):
        following = []
        for parent in level:
            for rate in (first, second):
                parents.append(parent)
                node_rates.append(rate)
                following.append(len(parents) - 1)
        level = following
    assert tree_acceptance_length(parents, node_rates) == pytest.approx(
        expected_tokens(first + second, depth)
    )


@given(st.floats(0, 0.99), st.integers(1, 20))
def test_a_free_draft_gives_the_acceptance_length_itself(alpha: float, length: int) -> None:
    assert leviathan_speedup(alpha, length, 0.0) == expected_tokens(alpha, length)
    assert co_design_speedup(expected_tokens(alpha, length), 0.0, length) == expected_tokens(alpha, length)


@given(st.floats(0.01, 0.99), st.integers(1, 20), st.floats(0, 1))
def test_leviathan_and_co_design_agree_where_cost_is_the_depth_ratio(
    alpha: float, length: int, ratio: float
) -> None:
    al = expected_tokens(alpha, length)
    assert leviathan_speedup(alpha, length, ratio) == pytest.approx(co_design_speedup(al, ratio, length))
    # and both are the measured law with t_sd = t_ar·(1 + ρD): verification takes one plain step
    assert projected_speedup(al, 1.0, 1.0 + ratio * length) == pytest.approx(
        co_design_speedup(al, ratio, length)
    )


@given(st.floats(0.001, 0.999), st.integers(1, 16))
def test_the_rate_behind_an_acceptance_length_is_found(alpha: float, length: int) -> None:
    assert expected_tokens(
        alpha_from_acceptance_length(expected_tokens(alpha, length), length), length
    ) == pytest.approx(expected_tokens(alpha, length), abs=1e-9)


@given(rates)
def test_marginals_and_conditional_rates_invert_each_other(conditional: list[float]) -> None:
    there = marginals(conditional)
    assert marginals(conditional_rates(there)) == pytest.approx(there)


def test_two_published_lengths_fix_the_shape_of_a_lookup() -> None:
    """A first draft that often misses and later ones that usually hit: one constant rate cannot say that."""
    curve = curve_from_points([(3, 1.69), (5, 1.83), (8, 1.95)], "reference")
    assert curve.conditional[0] < curve.conditional[1]
    for length, al in ((3, 1.69), (5, 1.83), (8, 1.95)):
        assert curve.acceptance_length(length) == pytest.approx(al, abs=0.03)
    assert curve.extrapolated(9)
    assert not curve.extrapolated(8)


@pytest.mark.parametrize("al", [0.9, 4.1])
def test_an_acceptance_length_outside_its_bounds_is_an_error(al: float) -> None:
    with pytest.raises(ValueError, match="outside 1"):
        curve_from_points([(3, al)], "nonsense")


def test_rates_past_the_data_are_marked_extrapolated() -> None:
    curve = AcceptanceCurve((0.8, 0.5), "measured", 2, "measured")
    assert curve.rates(4) == (0.8, 0.5, 0.5, 0.5)
    assert curve.acceptance_length(4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)
    assert [curve.extrapolated(d) for d in (1, 2, 3)] == [False, False, True]


def test_a_lookups_runs_replay_at_shorter_lengths_exactly() -> None:
    """Simulate a lookup that copies runs of random length, at D = 16 and at every shorter D: replaying the long
    record gives the short ones' token and step counts exactly."""
    rng = random.Random(7)
    runs = [rng.choice([0, 0, 0, 1, 2, 3, 5, 8, 13, 30]) for _ in range(400)]

    def steps(length: int) -> list[tuple[int, int]]:
        """(drafted, accepted) when a run of n matching tokens (and one mismatch) is decoded with drafts of `length`."""
        out = []
        for run in runs:
            if run == 0:
                out.append((0, 0))
                continue
            left = run + 1  # the token after the run is emitted too
            while left > 0:
                accepted = min(length, left - 1)
                out.append((length, accepted))
                left -= accepted + 1
        return out

    longest = steps(40)
    counts: dict[tuple[int, int], int] = {}
    for pair in longest:
        counts[pair] = counts.get(pair, 0) + 1
    curve = AcceptanceCurve((0.5,), "m", 40, "measured", tuple((d, a, n) for (d, a), n in counts.items()))
    for length in range(1, 17):
        real = steps(length)
        assert sum(replayed_steps(curve.runs, length).values()) == len(real)
        assert curve.acceptance_length(length) == pytest.approx(sum(a + 1 for _, a in real) / len(real))
        shares = dict(curve.draft_lengths(length))
        assert shares[0] == pytest.approx(sum(d == 0 for d, _ in real) / len(real))


def test_priors_prefer_family_temperature_and_chains() -> None:
    llama = choose_prior("eagle3", target="meta-llama/Llama-3.1-8B", temperature=0, batch=1)
    assert llama is not None
    assert (llama.drafts, llama.points) == ("chain", ((3, 2.44),))
    warm = choose_prior("eagle3", target="openai/gpt-oss-20b", temperature=0.7, batch=8)
    assert warm is not None
    assert warm.points == ((3, 2.07),)
    assert choose_prior("ngram", target="SmolLM2", temperature=0, batch=1, device="cpu").device == "cpu"
    assert choose_prior("suffix", target="x", temperature=0, batch=1) is None


@pytest.mark.parametrize(
    "method",
    [
        "ngram",
        "draft_model",
        "eagle3",
        "mtp",
        "eagle",
        "eagle2",
        "medusa",
        "hydra",
        "dflash",
        "dspark",
        "lookahead",
        "rest",
        "quantspec",
    ],
)
def test_every_prior_is_possible_and_has_a_source(method: str) -> None:
    assert priors(method)
    for prior in priors(method):
        assert prior.source in prior.label
        longest = max([d for d, _ in prior.points] or [len(prior.rates)])
        assert 1 <= prior.curve().acceptance_length(longest) <= longest + 1
