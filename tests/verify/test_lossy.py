"""Typical and relaxed acceptance do what their papers say, and what they emit is not the target's distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.test_acceptance import V, judge, plain, samplings
from tests.verify.test_lossless import continuations, pvalue
from tests.verify.toy import PathDrafter, ToyEngine, hash_rule, random_tree, run
from trtspec.drafters.base import NOTHING, Draft
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.acceptance import verify
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.lossy import Relaxed, Typical, open_verifier
from trtspec.verify.probabilities import TargetDistribution, probs
from trtspec.verify.tree import ROOT

SAMPLED = SamplingParams(temperature=1.0)
# every token has a part of the mass, so that a path can pass that greedy decoding would never take
EAGER = Typical(epsilon=0.2, delta=0.9)


def fixed(*rows):
    """The rule whose distribution after n tokens is rows[n - 1]; the last one for ever after."""
    return lambda path: np.log(np.array(rows[min(len(path), len(rows)) - 1], np.float32))


def accepted(rule_for, tokens, *rows, sampling=SAMPLED):
    rule = fixed(*rows)
    return judge(Draft.chain(tokens), sampling, rule=rule, rule_for=rule_for).path


# -- typical acceptance


@pytest.mark.parametrize(
    ("p", "draft", "passes"),
    [
        # H = 0.80 nats, exp(-H) = 0.449: δ · exp(-H) = 0.135 and ε is the smaller
        ((0.7, 0.2, 0.06, 0.02, 0.02), 1, True),
        ((0.7, 0.2, 0.06, 0.02, 0.02), 2, False),
        # near uniform, H = 1.6: δ · exp(-H) = 0.060 is the smaller, and what is 0.08 probable passes
        ((0.24, 0.23, 0.23, 0.22, 0.08), 4, True),
        # sure: hardly anything but the likeliest token
        ((0.96, 0.01, 0.01, 0.01, 0.01), 0, True),
        ((0.96, 0.01, 0.01, 0.01, 0.01), 1, False),
    ],
)
def test_the_threshold_falls_with_the_targets_entropy(p, draft, passes):
    entropy = -sum(x * math.log(x) for x in p)
    assert (p[draft] > min(0.09, 0.3 * math.exp(-entropy))) == passes, "the table contradicts the paper"
    assert accepted(Typical(), [draft], p) == ((0,) if passes else ())


def test_a_chain_is_accepted_up_to_its_first_implausible_token():
    sure, open_ = (0.96, 0.01, 0.01, 0.01, 0.01), (0.3, 0.3, 0.2, 0.1, 0.1)
    assert accepted(Typical(), [1, 0, 2, 1], open_, sure, open_, sure) == (0, 1, 2)


@given(samplings, st.integers(0, 10_000))
def test_greedy_typical_acceptance_is_exact(sampling, seed):
    """p is one-hot, its entropy 0, and nothing but the argmax passes."""
    greedy = SamplingParams(
        presence_penalty=sampling.presence_penalty, repetition_penalty=sampling.repetition_penalty
    )
    draft = Draft(random_tree(np.random.default_rng(seed), V, nodes=12, depth=5))
    verdict = judge(draft, greedy, rule_for=Typical(), seed=seed)
    assert verdict.tokens == plain(greedy, len(verdict.tokens))


@given(st.integers(0, 10_000), samplings)
def test_the_longest_accepted_path_of_a_tree_wins_and_then_the_likeliest(seed, sampling):
    """Against every node judged by itself, each along its own path with the penalties of that path."""
    rule, tree = hash_rule(V, scale=1.0), random_tree(np.random.default_rng(seed), V, nodes=10, depth=4)

    def p_after(path):
        """p by plain decoding along a path of tokens."""
        target = TargetDistribution(sampling, V, (0,))
        for token in path:
            target.append(token)
        return target.probabilities(rule((0, *path)))

    def plausibility(node):
        """Log-probability of the node's path, None when one of its tokens does not pass."""
        total, path = 0.0, [tree.tokens[n] for n in tree.path(node)]
        for length, token in enumerate(path):
            p = p_after(path[:length])
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            if p[token] <= min(EAGER.epsilon, EAGER.delta * math.exp(-entropy)):
                return None
            total += math.log(p[token])
        return total

    scores = {ROOT: 0.0, **{n: s for n in range(len(tree)) if (s := plausibility(n)) is not None}}
    verdict = judge(Draft(tree), sampling, rule=rule, rule_for=EAGER, seed=seed)
    taken = verdict.path[-1] if verdict.path else ROOT
    depth = {ROOT: 0, **dict(enumerate(tree.depths))}
    assert taken in scores
    assert depth[taken] == max(depth[n] for n in scores)
    assert scores[taken] == pytest.approx(max(s for n, s in scores.items() if depth[n] == depth[taken]))
    assert verdict.path == tree.path(taken)
    assert verdict.tokens[:-1] == tuple(tree.tokens[n] for n in verdict.path)


def test_without_drafts_both_rules_are_plain_decoding():
    for rule_for in (Typical(), Relaxed()):
        for sampling in (SamplingParams(), SAMPLED):
            assert judge(NOTHING, sampling, rule_for=rule_for).tokens == plain(sampling, 1)


# -- relaxed acceptance


@pytest.mark.parametrize(
    ("rule_for", "draft", "passes"),
    [
        (Relaxed(top_k=2, delta=0.6), 1, True),
        (Relaxed(top_k=2, delta=0.6), 2, False),  # third
        (Relaxed(top_k=3, delta=0.6), 2, True),
        (Relaxed(top_k=3, delta=0.25), 2, False),  # 0.4 - 0.1 = 0.3 below
        (Relaxed(top_k=3, delta=0.6), 3, False),  # as likely as 2, and of equals the lower id is ranked first
        (Relaxed(top_k=4, delta=0.6), 3, True),
        (Relaxed(top_k=1, delta=1.0), 0, True),
        (Relaxed(top_k=1, delta=1.0), 1, False),
    ],
)
def test_a_draft_must_be_among_the_likeliest_and_near_the_first(rule_for, draft, passes):
    p = (0.4, 0.3, 0.1, 0.1, 0.1)
    assert accepted(rule_for, [draft], p, sampling=SamplingParams()) == ((0,) if passes else ())


def test_a_token_that_cannot_follow_never_passes():
    def rule(path):
        return np.array([1.0, 0.0, -np.inf, -np.inf, -np.inf], np.float32)

    for rule_for, sampling in ((Relaxed(top_k=V, delta=1.0), SamplingParams()), (Typical(), SAMPLED)):
        assert judge(Draft.chain([2]), sampling, rule=rule, rule_for=rule_for).path == ()


def test_relaxed_acceptance_judges_what_follows_on_the_accepted_path():
    # greedy decoding would give 0; the draft's 1 passes, and the next token is the best one after 1
    verdict = judge(
        Draft.chain([1]),
        SamplingParams(),
        rule=lambda path: np.eye(V, dtype=np.float32)[0 if path == (0,) else path[-1] + 2] / 4,
        rule_for=Relaxed(),
    )
    assert verdict.tokens == (1, 3)


@given(samplings.filter(lambda s: s.temperature > 0), st.integers(0, 10_000))
def test_sampled_requests_are_judged_exactly_under_the_relaxed_rule(sampling, seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, V, nodes=10, depth=4)
    for q in (None, rng.dirichlet(np.ones(V), len(tree)).reshape(len(tree), V)):
        assert judge(Draft(tree, q), sampling, rule_for=Relaxed(), seed=seed) == judge(
            Draft(tree, q), sampling, rule_for=verify, seed=seed
        )


# -- lossy


@pytest.mark.parametrize("kind", ["chain", "tree without replacement", "deterministic tree"])
def test_the_chi_square_test_of_exactness_fails_under_typical_acceptance(kind):
    assert pvalue(continuations(kind, verify)) > 0.01
    assert pvalue(continuations(kind, Typical())) < 1e-6


def greedy_texts(verifier):
    """What a loop over a toy engine writes, with drafts of the second likeliest token."""
    rule = hash_rule(V, scale=1.0)

    def second(path, ask):
        tokens = []
        for _ in range(min(ask.nodes, ask.depth)):
            tokens.append(int(np.argsort(-rule((*path, *tokens)))[1]))
        return Draft.chain(tokens)

    loop = DecodeLoop(
        ToyEngine(rule, V), PathDrafter(second, "chain"), draft_length=3, max_queue=64, verifier=verifier
    )
    requests = [GenerationRequest(str(i), (i % V, i), SamplingParams(max_tokens=8)) for i in range(V)]
    return {name: c.token_ids for name, c in run(loop, requests).completions.items()}


def test_relaxed_acceptance_changes_greedy_text_and_the_exact_rule_does_not():
    assert greedy_texts(verify) != greedy_texts(Relaxed())
    assert greedy_texts(verify) == greedy_texts(Relaxed(top_k=1)) == greedy_texts(Typical())


# -- the rule of an engine folder


def test_an_engine_names_its_rule_and_the_parameters_it_was_given():
    assert open_verifier(None) is verify
    assert open_verifier({"acceptance": "typical"}) == Typical(0.09, 0.3)
    assert open_verifier({"acceptance": "typical", "epsilon": 0.2}) == Typical(0.2, 0.3)
    assert open_verifier({"acceptance": "relaxed", "top_k": 4, "delta": 0.1}) == Relaxed(4, 0.1)


def test_softmax_of_a_greedy_request_is_what_temperature_one_has():
    logits = hash_rule(V)((3,))
    assert np.array_equal(TargetDistribution(SamplingParams(), V).softmax(logits), probs(logits, SAMPLED))
