"""What one verify step emits, by hand and against the plainest loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.toy import hash_rule, random_tree
from trtspec.drafters.base import NOTHING, Draft
from trtspec.values import SamplingParams
from trtspec.verify.acceptance import draw_and_compare, rejection_sample, verify
from trtspec.verify.probabilities import TargetDistribution
from trtspec.verify.randomness import PositionRandom, Stream
from trtspec.verify.tree import TokenTree

V = 5


def rows(rule, tree, path=(0,)):
    """Logits after the root and after every node."""
    seen = [path] + [(*path, *(tree.tokens[n] for n in tree.path(node))) for node in range(len(tree))]
    return np.stack([rule(p) for p in seen])


def judge(draft, sampling, *, rule=None, seed=1, rule_for=verify, position=0):
    rule = rule or hash_rule(V)
    target = TargetDistribution(sampling, V, (0,))
    return rule_for(draft, rows(rule, draft.tree), target, PositionRandom(seed), position)


def plain(sampling, count, *, rule=None, seed=1):
    """`count` tokens, one at a time."""
    rule, path = rule or hash_rule(V), (0,)
    target, random = TargetDistribution(sampling, V, (0,)), PositionRandom(seed)
    for position in range(count):
        token = target.draw(rule(path), random.uniform(Stream.TARGET, position))
        target.append(token)
        path = (*path, token)
    return path[1:]


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)


@given(samplings, st.integers(0, 10_000))
def test_any_tree_of_guesses_gives_the_plain_tokens(sampling, seed):
    rng = np.random.default_rng(seed)
    draft = Draft(random_tree(rng, V, nodes=12, depth=5))
    verdict = judge(draft, sampling, seed=seed)
    assert len(verdict.tokens) == len(verdict.path) + 1
    assert verdict.tokens == plain(sampling, len(verdict.tokens), seed=seed)
    assert [draft.tree.tokens[n] for n in verdict.path] == list(verdict.tokens[:-1])
    assert verdict.path == (draft.tree.path(verdict.path[-1]) if verdict.path else ())


@given(samplings, st.integers(0, 10_000))
def test_a_tree_that_holds_the_plain_tokens_is_accepted_down_to_them(sampling, seed):
    truth = plain(sampling, 4, seed=seed)
    tree = TokenTree.merge([[(t + 1) % V for t in truth], truth[:2], [*truth[:1], (truth[1] + 1) % V], truth])
    verdict = judge(Draft(tree), sampling, seed=seed)
    assert verdict.tokens[:4] == truth


@given(st.integers(0, 10_000))
def test_greedy_is_the_limit_of_rejection_sampling(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, V, nodes=10, depth=4)
    q = rng.dirichlet(np.ones(V), len(tree)).reshape(len(tree), V)
    draft = Draft(tree, q)
    assert judge(draft, SamplingParams(), rule_for=rejection_sample) == judge(
        draft, SamplingParams(), rule_for=draw_and_compare
    )


def test_without_drafts_a_step_is_plain_decoding():
    for sampling in (SamplingParams(), SamplingParams(temperature=1)):
        verdict = judge(NOTHING, sampling)
        assert verdict.path == ()
        assert verdict.tokens == plain(sampling, 1)


def test_penalties_count_the_drafts_before_a_position():
    # Sequential greedy gives 0, then 1: the first 0 costs the second one its lead. A verifier that forgets
    # the draft accepts both zeros; one that counts it twice would still give 1, so the third position tells.
    def rule(_path):
        return np.array([2.0, 1.9, 1.0, 0.0], np.float32)

    sampling = SamplingParams(frequency_penalty=0.5)
    target = TargetDistribution(sampling, 4)
    draft = Draft.chain([0, 0])
    verdict = verify(draft, rows(rule, draft.tree), target, PositionRandom(0), 0)
    assert verdict.tokens == (0, 1)
    assert verdict.path == (0,)
    # the rejected second 0 was not counted: 0 stands at 1.5 now, 1 at 1.4
    assert verify(NOTHING, rows(rule, NOTHING.tree), target, PositionRandom(0), 2).tokens == (0,)


def test_presence_penalty_at_draft_positions():
    def rule(_path):
        return np.array([2.0, 1.9, 0.0, 0.0], np.float32)

    draft = Draft.chain([0, 0])
    target = TargetDistribution(SamplingParams(presence_penalty=0.5), 4)
    verdict = verify(draft, rows(rule, draft.tree), target, PositionRandom(0), 0)
    assert verdict.tokens == (0, 1)


def test_only_the_first_differing_child_is_walked_past():
    # two siblings with one token: the first of them is taken, and the walk stays below it
    tree = TokenTree((1, 1, 3), (-1, -1, 1))

    def rule(path):
        logits = np.zeros(V, np.float32)
        logits[1 if len(path) == 1 else 3] = 1
        return logits

    assert judge(Draft(tree), SamplingParams(), rule=rule).path == (0,)


def test_a_draft_its_own_distribution_excludes_is_a_broken_drafter():
    draft = Draft.chain([2], q=np.eye(V)[[3]])
    with pytest.raises(ValueError, match="probability 0"):
        judge(draft, SamplingParams(temperature=1))


def test_drafts_from_the_target_itself_are_always_accepted():
    rule = hash_rule(V)
    for seed in range(200):
        random, path, q = PositionRandom(seed), (0,), []
        target = TargetDistribution(SamplingParams(temperature=1), V)
        for position in range(3):
            q.append(target.probabilities(rule(path)))
            uniform = random.uniform(Stream.DRAFT, position)
            path = (*path, int(np.searchsorted(q[-1].cumsum(), uniform)))
        draft = Draft.chain(path[1:], np.array(q))
        assert judge(draft, SamplingParams(temperature=1), rule=rule, seed=seed).path == (0, 1, 2)
