"""A token tree of D nodes is judged by its paths: it is no chain of D tokens, and a level's acceptance no token's."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.plan import make_plan, plan_bare
from trtspec.plan.acceptance import AcceptanceCurve, acceptance_length
from trtspec.plan.explain import explain
from trtspec.plan.priors import priors
from trtspec.plan.tree import MAX_BRANCHES, RANK_ACCURACY, TreeModel, likeliest_rate, rank_hits

RATE = st.floats(0.0, 1.0)


def curve(*rates: float) -> AcceptanceCurve:
    return AcceptanceCurve(rates, "test", len(rates), "declared")


def test_medusas_accuracies_and_its_tree_of_63_nodes_give_what_was_measured():
    """Two sources: the accuracy of each head and rank, and the acceptance length of the whole, 2.32."""
    heads = [top[0] for top in RANK_ACCURACY[4:0:-1]]
    length, depth = TreeModel(63).expected(curve(*heads), 63)
    assert length == pytest.approx(2.32, rel=0.04) and depth == 4


@given(RATE)
def test_candidates_of_a_position_exclude_each_other_and_fall_with_the_rank(rate: float):
    hits = rank_hits(rate)
    assert hits[0] == rate and sum(hits) <= 1 + 1e-9
    assert all(a >= b >= 0 for a, b in pairwise(hits))


def test_at_published_rates_the_ranks_are_those_published():
    for top in RANK_ACCURACY:
        assert [sum(rank_hits(top[0])[: k + 1]) for k in range(5)] == pytest.approx(top)


def test_two_nodes_are_a_chain_or_a_fork_whichever_is_likelier():
    sure, unsure = (0.9, 0.9), (0.3, 0.05)
    assert TreeModel(4).expected(curve(*sure), 2) == (pytest.approx(1 + 0.9 + 0.81), 2)
    assert TreeModel(4).expected(curve(*unsure), 2) == (pytest.approx(1 + sum(rank_hits(0.3)[:2])), 1)
    assert TreeModel(1).expected(curve(*unsure), 2) == (pytest.approx(1 + 0.3 + 0.3 * 0.05), 2), (
        "one path is a chain"
    )


@given(st.lists(RATE, min_size=1, max_size=6), st.integers(1, 24))
def test_the_best_tree_is_never_worse_than_the_chain_and_grows_with_its_nodes(rates: list[float], nodes: int):
    tree = TreeModel(MAX_BRANCHES)
    length, depth = tree.expected(curve(*rates), nodes)
    assert length >= acceptance_length(rates, min(nodes, len(rates))) - 1e-9
    assert length >= tree.expected(curve(*rates), nodes - 1)[0]
    assert depth <= min(nodes, len(rates)), "never deeper than the acceptance data"


def test_a_static_tree_is_cut_to_its_first_nodes():
    """The first four nodes of EAGLE's own tree are siblings: one level, whatever a chain of four would give."""
    from trtspec.drafters.growth import EAGLE_CHOICES

    tree = TreeModel(len(EAGLE_CHOICES), choices=EAGLE_CHOICES)
    length, depth = tree.expected(curve(*(0.8,) * 5), 4)
    assert (length, depth) == (pytest.approx(1 + sum(rank_hits(0.8)[:4])), 1)
    assert tree.expected(curve(*(0.8,) * 5), 64)[1] == 5


def test_the_likeliest_candidates_rate_is_found_back():
    for rate in (0.3, 0.6, 0.85):
        length, _ = TreeModel(25).expected(curve(*(rate,) * 5), 25)
        assert likeliest_rate(length, 25, 5) == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "eagle2"])
def test_a_published_tree_is_no_longer_taken_for_a_chain(method: str):
    (prior,) = priors(method)
    ((depth, length),) = prior.points
    assert acceptance_length(prior.curve().rates(depth)) < length - 0.4
    assert f"a tree of {prior.nodes} nodes" in prior.curve().source


def test_the_plan_judges_trees_by_their_nodes_and_says_what_it_assumed(tiny):
    asked = {"device": "cpu", "method": "eagle2", "draft_length": 8, "batch_sizes": (1,), "context": 256}
    rates = (0.7, 0.65, 0.6, 0.55)
    tree = plan_bare(tiny, acceptance=rates, **asked)
    expected, depth = TreeModel(MAX_BRANCHES).expected(curve(*rates), 8)
    assert tree.chosen.acceptance_length == pytest.approx(expected)
    assert f"a tree of 8 nodes, {depth} deep on at most 4 paths" in " ".join(explain(tree).split())
    chain = plan_bare(tiny, acceptance=rates, draft_shape="chain", **asked)
    assert chain.batches[0].at(4).acceptance_length == pytest.approx(acceptance_length(rates))
    assert chain.chosen.extrapolated and not tree.chosen.extrapolated, (
        "a chain of 8 is past four rates, a tree is not"
    )
    assert tree.draft_ms[8] == pytest.approx(chain.draft_ms[depth]), "a level is one pass of the head"


def test_tensorrt_llm_drafts_chains(tiny):
    asked = {"device": "h100-sxm", "method": "eagle3", "batch_sizes": (1,), "context": 256, "draft_length": 4}
    plan = plan_bare(tiny, acceptance=(0.7, 0.6, 0.5, 0.4), **asked)
    assert plan.chosen.acceptance_length == pytest.approx(acceptance_length((0.7, 0.6, 0.5, 0.4)))


def test_levels_of_a_tree_that_were_measured_stay_what_they_are(make_config, tiny):
    from trtspec.plan.measured import Measured

    levels = AcceptanceCurve((0.8, 0.5), "measured: a run", 6, "measured")
    config = make_config(speculation={"method": "medusa", "draft_length": 6})
    plan = make_plan(config, tiny, measured=Measured("a run", "medusa", levels))
    assert plan.chosen.acceptance_length == pytest.approx(levels.acceptance_length(6))
