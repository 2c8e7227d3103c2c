"""Sampled output has the target's distribution: chi-square over whole continuations of closed-form toy
models.

Each test draws thousands of three-token continuations and compares their counts with the exact product of the
target's conditional probabilities. Deliberately biased verifiers must fail the same test by a wide margin.
"""

from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from scipy import stats

from tests.verify.toy import PathDrafter, ToyEngine, hash_rule, run
from trtspec.drafters.base import NOTHING, Draft
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.acceptance import draw_and_compare, rejection_sample, verify
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.probabilities import TargetDistribution, inverse_cdf, probs
from trtspec.verify.randomness import PositionRandom, Stream
from trtspec.verify.tree import TokenTree

V, LENGTH, DRAWS = 4, 3, 3000
SAMPLING = SamplingParams(temperature=1.0)
TARGET = hash_rule(V, seed=11, scale=1.2)
DRAFTER = hash_rule(V, seed=99, scale=1.2)
OTHER = hash_rule(V, seed=7, scale=1.2)


@cache
def draft_q(path):
    return probs(DRAFTER(path), SAMPLING)


def draw(q, rng):
    return int(q.cumsum().searchsorted(rng.random(), side="right"))


def chain(path, rng):
    tokens, q = [], []
    for _ in range(2):
        q.append(draft_q((*path, *tokens)))
        tokens.append(draw(q[-1], rng))
    return Draft.chain(tokens, np.array(q))


def tree(path, rng, *, replacement):
    """Three children of the root and two of each of them, drawn one after another."""
    tokens, parents, q = [], [], []

    def grow(parent, below, count):
        base, nodes = draft_q(below), []
        for _ in range(count):
            here = base.copy()
            if not replacement:
                here[[tokens[n] for n in nodes]] = 0
                here /= here.sum()
            nodes.append(len(tokens))
            tokens.append(draw(here, rng))
            parents.append(parent)
            q.append(here)
        return nodes

    for node in grow(-1, path, 3):
        grow(node, (*path, tokens[node]), 2)
    return Draft(TokenTree(tuple(tokens), tuple(parents)), np.array(q))


def merged(path, rng, *, drafters=(DRAFTER, DRAFTER, OTHER)):
    """A chain of each of three drafts, two of them alike, merged: equal beginnings are one path, drawn twice."""
    chains, q = [], []
    for rule in drafters:
        tokens = []
        for _ in range(2):
            q.append(probs(rule((*path, *tokens)), SAMPLING))
            tokens.append(draw(q[-1], rng))
        chains.append(tokens)
    tree = TokenTree.merge(chains)
    return Draft(tree, np.array(q), tuple(node for tokens in chains for node in nodes_of(tree, tokens)))


def nodes_of(tree, tokens):
    node = -1
    for token in tokens:
        node = next(child for child in tree.children[node] if tree.tokens[child] == token)
        yield node


def guesses(path, rng):
    """Deterministic proposals: a tree with no q."""
    return Draft(TokenTree.merge([rng.integers(0, V, 2).tolist() for _ in range(3)]))


PROPOSALS = {
    "chain": chain,
    "tree with replacement": lambda path, rng: tree(path, rng, replacement=True),
    "tree without replacement": lambda path, rng: tree(path, rng, replacement=False),
    "merged chains": merged,
    "merged chains of drafts alike": partial(merged, drafters=(DRAFTER,) * 6),
    "deterministic tree": guesses,
    "nothing": lambda path, rng: NOTHING,
}


def continuations(kind, verifier, sampling=SAMPLING):
    rng = np.random.default_rng(5)
    return [continuation(PROPOSALS[kind], verifier, seed, rng, sampling) for seed in range(DRAWS)]


def continuation(propose, verifier, seed, rng, sampling):
    """LENGTH tokens after (0,), by as many steps as it takes."""
    target, random, out = TargetDistribution(sampling, V), PositionRandom(seed), ()
    while len(out) < LENGTH:
        draft = propose((0, *out), rng)
        paths = [()] + [
            tuple(draft.tree.tokens[n] for n in draft.tree.path(i)) for i in range(len(draft.tree))
        ]
        logits = np.stack([TARGET((0, *out, *path)) for path in paths])
        out += verifier(draft, logits, target, random, len(out)).tokens
    return out[:LENGTH]


def pvalue(samples, sampling=SAMPLING):
    expected = {}
    for path in product(range(V), repeat=LENGTH):
        p = 1.0
        for t in range(LENGTH):
            p *= probs(TARGET((0, *path[:t])), sampling)[path[t]]
        expected[path] = p * len(samples)
    counts = dict.fromkeys(expected, 0)
    for sample in samples:
        counts[sample] += 1
    assert all(expected[path] > 0 or counts[path] == 0 for path in counts)  # filtered ids never appear
    common = [path for path in expected if expected[path] >= 5]
    rest = [path for path in expected if 0 < expected[path] < 5]
    observed = [counts[p] for p in common] + ([sum(counts[p] for p in rest)] if rest else [])
    wanted = [expected[p] for p in common] + ([sum(expected[p] for p in rest)] if rest else [])
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize("kind", PROPOSALS)
def test_output_has_the_targets_distribution(kind):
    assert pvalue(continuations(kind, verify)) > 0.01


@pytest.mark.parametrize("kind", ["chain", "tree without replacement"])
def test_output_has_the_filtered_distribution(kind):
    sampling = SamplingParams(temperature=0.8, top_k=3, top_p=0.95)
    assert pvalue(continuations(kind, verify, sampling), sampling) > 0.01


def from_p_after_rejection(draft, logits, target, random, position):
    """Bias 1: a rejected draft is replaced from p and not from the residual."""
    verdict = rejection_sample(draft, logits, target, random, position)
    row = (verdict.path[-1] + 1) if verdict.path else 0
    if draft.tree.children.get(row - 1):
        token = inverse_cdf(target.probabilities(logits[row]), random.uniform(Stream.RESIDUAL, position))
        return type(verdict)((*verdict.tokens[:-1], token), verdict.path)
    return verdict


def ignoring_q(draft, logits, target, random, position):
    """Bias 2: drafts are accepted with probability p, as if q were one-hot, but the residual uses q."""
    return rejection_sample(Draft(draft.tree, np.maximum(draft.q, 0.999)), logits, target, random, position)


def accepting_everything(draft, logits, target, random, position):
    """Bias 3: the first path is believed."""
    path = draft.tree.path(draft.tree.leaves()[0])
    tokens = tuple(draft.tree.tokens[n] for n in path)
    last = draw_and_compare(NOTHING, logits[path[-1] + 1 :], target, random, position + len(path))
    return type(last)((*tokens, *last.tokens), path)


def unreduced(draft, logits, target, random, position):
    """Bias 4: siblings are all tested against the whole p."""
    tree, q, tokens, path, node = draft.tree, draft.q, [], [], -1
    while True:
        p = target.probabilities(logits[node + 1])
        here = position + len(path)
        for index, child in enumerate(tree.children.get(node, ())):
            token = tree.tokens[child]
            if random.uniform(Stream.ACCEPT, here, index) * q[child][token] < p[token]:
                node = child
                tokens.append(token)
                path.append(child)
                break
        else:
            tokens.append(inverse_cdf(p, random.uniform(Stream.TARGET, here)))
            return type(verify(NOTHING, logits, target, random, 0))(tuple(tokens), tuple(path))


def one_draw_a_node(draft, logits, target, random, position):
    """Bias 5: of drafts that drew the same token only the first is judged."""
    first = tuple(dict.fromkeys(draft.draws))
    q = draft.q[[draft.draws.index(node) for node in first]]
    return rejection_sample(Draft(draft.tree, q, first), logits, target, random, position)


@pytest.mark.parametrize(
    ("verifier", "kind"),
    [
        (from_p_after_rejection, "chain"),
        (ignoring_q, "chain"),
        (accepting_everything, "chain"),
        (unreduced, "tree with replacement"),
        (unreduced, "tree without replacement"),
        (one_draw_a_node, "merged chains of drafts alike"),
    ],
)
def test_the_test_catches_biased_verifiers(verifier, kind):
    assert pvalue(continuations(kind, verifier)) < 1e-6


@pytest.mark.parametrize(
    "kind", ["chain", "tree with replacement", "tree without replacement", "merged chains"]
)
def test_the_whole_loop_keeps_the_distribution(kind):
    def guess(path, ask):
        draft = PROPOSALS[kind](path, rng)
        return draft if len(draft.tree) <= ask.nodes and draft.tree.depth <= ask.depth else NOTHING

    rng = np.random.default_rng(3)
    engine = ToyEngine(TARGET, V, max_rows=12)
    loop = DecodeLoop(engine, PathDrafter(guess), draft_length=9, max_queue=DRAWS)
    requests = [
        # five tokens so that there is room for drafts at the second and third
        GenerationRequest(str(seed), (0,), SamplingParams(temperature=1.0, seed=seed, max_tokens=5))
        for seed in range(2000)
    ]
    outcome = run(loop, requests)
    assert not outcome.failures
    accepted = sum(step.accepted for c in outcome.completions.values() for step in c.steps)
    assert accepted > len(requests) / 4  # drafts took part
    assert pvalue([c.token_ids[:LENGTH] for c in outcome.completions.values()]) > 0.01


def test_a_seed_repeats_and_seeds_follow_the_distribution():
    # the target says .9/.1, the draft .5/.5
    def rule(_path):
        return np.log(np.array([0.9, 0.1])).astype(np.float32)

    def tokens(seed):
        def guess(path, ask):
            return Draft.chain(
                [int(PositionRandom(seed).uniform(Stream.DRAFT, len(path)) < 0.5)], np.array([[0.5, 0.5]])
            )

        loop = DecodeLoop(ToyEngine(rule, 2), PathDrafter(guess, "chain"), draft_length=1)
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, logprobs=True)
        (completion,) = run(loop, [GenerationRequest("r", (0,), sampling)]).completions.values()
        assert completion.seed == seed
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            assert logprob == pytest.approx(np.log((0.9, 0.1)[token]), abs=1e-6)
        assert completion.cumulative_logprob == pytest.approx(sum(completion.logprobs))
        return completion.token_ids

    assert tokens(1) == tokens(1)
    many = [tokens(seed) for seed in range(400)]
    assert len(set(many)) > 30
    ones = sum(map(sum, many))
    assert stats.binomtest(ones, 400 * 8, 0.1).pvalue > 0.01
