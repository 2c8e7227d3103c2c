"""Each number against its closed form: tools differ by one token or one average, so every definition is pinned."""

from __future__ import annotations

import numpy as np
import pytest

from tests.evaluate.conftest import request
from trtspec.evaluate import metrics
from trtspec.evaluate.bootstrap import ratio_interval
from trtspec.evaluate.record import BlockRecord

# One request, draft length 3, accepted per step 2, 0, 3, after the prefill token.
THREE_STEPS = request([(3, 2, 3), (3, 0, 1), (3, 3, 4)])


def test_acceptance_length_counts_the_bonus_token_and_not_the_prefill_token() -> None:
    assert metrics.acceptance_length_token_weighted([THREE_STEPS]) == pytest.approx(8 / 3)
    assert metrics.acceptance_length_per_request([THREE_STEPS]) == pytest.approx(2.667, abs=1e-3)
    assert metrics.draft_acceptance_rate([THREE_STEPS]) == pytest.approx(5 / 9)
    accepted_only = sum(i * n for i, n in enumerate(metrics.acceptance_histogram([THREE_STEPS]))) / 3
    assert accepted_only == pytest.approx(1.667, abs=1e-3)
    assert len(THREE_STEPS.token_ids) / len(THREE_STEPS.steps) == 3.0  # what counting the prefill token gives


def test_the_two_averages_part_when_requests_differ_in_length() -> None:
    short, long = request([(3, 3, 4)]), request([(3, 0, 1)] * 10)
    assert metrics.acceptance_length_per_request([short, long]) == pytest.approx(2.5)
    assert metrics.acceptance_length_token_weighted([short, long]) == pytest.approx(14 / 11)


def test_conditional_acceptance_by_position() -> None:
    assert metrics.conditional_acceptance([THREE_STEPS]) == pytest.approx([2 / 3, 1.0, 0.5])
    assert metrics.joint_acceptance([THREE_STEPS]) == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert metrics.acceptance_length_modelled([THREE_STEPS]) == pytest.approx(8 / 3)


def test_a_position_that_was_not_drafted_was_not_rejected() -> None:
    # The second step drafted one token and it was accepted: it says nothing of position 2.
    steps = [(3, 1, 2), (1, 1, 2), (0, 0, 1)]
    assert metrics.conditional_acceptance([request(steps)]) == [1.0, 0.0, None]


def test_a_draft_cut_by_a_stop_was_not_rejected_either() -> None:
    # Three drafted; the second accepted one was the stop token, so no token of the target's own follows.
    cut, overruled = request([(3, 2, 2)]), request([(3, 2, 3)])
    assert metrics.conditional_acceptance([cut]) == [1.0, 1.0, None]
    assert metrics.conditional_acceptance([overruled]) == [1.0, 1.0, 0.0]
    assert metrics.acceptance_length_token_weighted([cut]) == 2.0


def test_a_tree_has_positions_up_to_its_depth_only() -> None:
    # Ten nodes, depth 3, a whole path accepted: there is no position 4 that could have been rejected.
    tree = request([(10, 3, 4), (10, 1, 2)])
    assert metrics.conditional_acceptance([tree], depth=3) == [1.0, 0.5, 1.0]
    assert metrics.conditional_acceptance([tree])[3] == 0.0


def test_conditional_acceptance_recounts_from_raw_steps() -> None:
    rng = np.random.default_rng(7)
    steps = []
    for _ in range(500):
        drafted = int(rng.integers(0, 6))
        accepted = int(rng.integers(0, drafted + 1))
        steps.append((drafted, accepted, accepted + int(accepted == 0 or rng.random() > 0.1)))
    found = metrics.conditional_acceptance([request(steps)])
    for i in range(1, 6):
        judged = [(a >= i) for d, a, e in steps if d >= i and a >= i - 1 and (a >= i or e > a)]
        assert found[i - 1] == pytest.approx(sum(judged) / len(judged))


def test_measured_rates_recover_the_rates_of_a_simulated_drafter() -> None:
    rates, rng, steps = (0.8, 0.6, 0.5), np.random.default_rng(3), []
    for _ in range(20_000):
        accepted = 0
        while accepted < 3 and rng.random() < rates[accepted]:
            accepted += 1
        steps.append((3, accepted, accepted + 1))
    one = [request(steps)]
    assert metrics.conditional_acceptance(one) == pytest.approx(rates, abs=0.02)
    assert metrics.acceptance_length_modelled(one) == pytest.approx(1 + 0.8 + 0.48 + 0.24, abs=0.02)
    assert metrics.acceptance_length_modelled(one) == pytest.approx(
        metrics.acceptance_length_token_weighted(one)
    )


def test_latency_is_counted_in_tokens_never_in_chunks() -> None:
    # Ten chunks of four tokens in one second after the first token: 40 tokens a second, 25 ms each.
    chunks = request([(3, 3, 4)] * 10, ttft_s=0.5, step_s=0.1)
    assert len(chunks.token_ids) == 41
    assert metrics.inter_token_latency_ms([chunks]).p50 == pytest.approx(25.0)
    assert metrics.user_tokens_per_s([chunks]).mean == pytest.approx(40.0)
    assert metrics.ttft_ms([chunks]).mean == pytest.approx(500.0)
    assert metrics.step_latency_ms([chunks]).max == pytest.approx(100.0)  # the prefill is no step
    assert metrics.step_latency_ms([chunks]).count == 10


def test_nothing_measured_is_none_not_zero() -> None:
    only_prefill = request([])
    for metric in (
        metrics.acceptance_length_per_request,
        metrics.acceptance_length_token_weighted,
        metrics.acceptance_length_modelled,
        metrics.draft_acceptance_rate,
        metrics.inter_token_latency_ms,
        metrics.step_latency_ms,
        metrics.user_tokens_per_s,
    ):
        assert metric([only_prefill]) is None
        assert metric([]) is None
    assert metrics.conditional_acceptance([only_prefill]) == [] == metrics.acceptance_histogram([])
    plain = request([(0, 0, 1)] * 4, arm="baseline")
    assert metrics.draft_acceptance_rate([plain]) is None
    assert metrics.acceptance_length_token_weighted([plain]) == 1.0


def test_every_metric_states_its_unit_formula_and_source() -> None:
    names = [metric.name for metric in metrics.METRICS]
    assert len(set(names)) == len(names) >= 15

    def undocumented() -> None:
        """Something.

        Unit: none
        """

    with pytest.raises(ValueError, match="unit, formula and source"):
        metrics.metric(undocumented)


def block(index: int, ours: tuple[int, float], plain: tuple[int, float], whole: bool = True) -> BlockRecord:
    return BlockRecord(index, "speculative", whole, ours[1], ours[0], plain[1], plain[0])


def test_speedup_is_the_ratio_of_rates_over_all_pairs() -> None:
    blocks = [block(i, (100, 1.0 + 0.1 * i), (100, 2.0)) for i in range(6)]
    found = metrics.speedup(blocks)
    assert found.value == pytest.approx(12 / 7.5)
    assert found.low < found.value < found.high
    assert found.pairs == 6 and found.median == pytest.approx(
        np.median([2 / (1 + 0.1 * i) for i in range(6)])
    )


def test_a_block_with_a_failed_request_is_no_pair() -> None:
    blocks = [block(0, (100, 1.0), (100, 2.0)), block(1, (10, 0.01), (100, 2.0), whole=False)]
    assert metrics.speedup(blocks).value == pytest.approx(2.0)
    assert metrics.speedup(blocks[1:]) is None
    assert metrics.speedup([]) is None


def test_few_pairs_give_a_ratio_without_an_interval() -> None:
    found = metrics.speedup([block(i, (100, 1.0), (100, 1.5)) for i in range(4)])
    assert found.value == pytest.approx(1.5) and found.low is None and found.high is None


def served(rng: np.random.Generator, requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, seconds with speculation and seconds without, of requests to a simulated server.

    Each request has an acceptance of its own (0.6 on average) at all of 4 draft positions; a verify step takes 26 ms, a
    plain one 20 ms, and every request's time is noisy.
    """
    tokens = rng.integers(50, 300, requests)
    acceptance = rng.beta(12, 8, requests)
    emitted = 1 + np.minimum(rng.geometric(1 - acceptance[:, None], (requests, 300)) - 1, 4)
    steps = 1 + (np.cumsum(emitted, axis=1) < tokens[:, None]).sum(axis=1)
    noise = rng.lognormal(0, 0.05, (2, requests))
    return tokens, 0.026 * steps * noise[0], 0.020 * tokens * noise[1]


@pytest.mark.parametrize("pairs", [8, 30])
def test_the_interval_covers_the_true_speedup_at_its_stated_rate(pairs: int) -> None:
    rng, runs, covered = np.random.default_rng(11), 300, 0
    _, many, plain = served(np.random.default_rng(12), 30_000)
    truth = plain.sum() / many.sum()
    assert truth == pytest.approx(0.020 / 0.026 * (1 + 0.6 + 0.36 + 0.216 + 0.13), rel=0.05)
    for run in range(runs):
        tokens, ours_s, plain_s = served(rng, pairs)
        found = ratio_interval(list(zip(tokens, ours_s, tokens, plain_s)), seed=run)
        covered += found.low <= truth <= found.high
    assert 0.91 <= covered / runs <= 0.985
