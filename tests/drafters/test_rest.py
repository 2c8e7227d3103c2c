"""REST: trees of the most frequent continuations, proposed within their limits, and never a change of the output."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.toy import ToyEngine, hash_rule, reference, run
from trtspec.drafters.base import Ask, check_draft
from trtspec.drafters.datastore import FILE, Datastore, end_of
from trtspec.drafters.datastore_build import suffix_array, write_datastore
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.policy import DraftPolicy, StepCost
from trtspec.drafters.rest import RestDrafter, most_frequent
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop

V = 12
RULE = hash_rule(V, order=2, scale=3.0)  # two tokens decide the next: text of the rule foretells its text
NO_STATES = np.empty((0, 0), np.float32)


def datastore_of(documents) -> Datastore:
    end = end_of(np.uint16)
    tokens = np.array([token for document in documents for token in (*document, end)], np.uint16)
    return Datastore(tokens, suffix_array(tokens), bytes(32))


def rule_text(documents: int = 8) -> Datastore:
    """Text that the rule itself writes, sampled, so that a context has several continuations."""
    written = []
    for seed in range(documents):
        sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=60)
        request = GenerationRequest("r", (seed, seed + 1), sampling)
        written.append([*request.prompt, *reference(RULE, V, request, max_seq_len=200)])
    return datastore_of(written)


STORE = rule_text()


def request(name, seed=0, **sampling):
    prompt = tuple(int(token) for token in np.random.default_rng(seed).integers(0, V, 2 + seed % 5))
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 25, "seed": seed, **sampling}))


def propose(drafter, context, nodes=8, depth=8, branches=8):
    state = drafter.open(GenerationRequest("r", tuple(context)), seed=0)
    drafter.observe(state, context[1:], NO_STATES)
    return drafter.propose([Ask(state, nodes, depth, branches)], rows=1)[0], state


def paths_of(tree):
    return {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}


# -- the tree


def test_a_chain_is_the_most_frequent_continuation():
    datastore = datastore_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 6, 4, 4]])
    drafter = RestDrafter(datastore, tree=False)
    draft, _ = propose(drafter, [9, 1, 2])
    assert drafter.spec.shape == "chain" and draft.tree.is_chain
    assert draft.tree.tokens == (3, 4)
    both, _ = propose(RestDrafter(datastore), [9, 1, 2])
    assert len(both.tree.leaves()) > 1


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6),
    st.integers(0, 10),
    st.integers(0, 5),
)
def test_without_a_limit_on_branches_the_tree_is_the_tries_most_frequent_part(documents, nodes, depth):
    datastore = datastore_of(documents)
    starts = np.arange(len(datastore))
    trie = Counter()
    for start in starts:
        following = datastore.tokens[start:].tolist()
        following = following[: min(following.index(datastore.end), depth)]
        trie.update(tuple(following[: n + 1]) for n in range(len(following)))
    tree, counts = most_frequent(datastore, starts, nodes, depth, branches=100)
    paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)
    assert [trie[path] for path in paths] == list(counts)
    assert list(counts) == sorted(trie.values(), reverse=True)[:nodes]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_proposals_keep_every_limit_and_are_the_same_when_asked_again(
    documents, context, nodes, depth, branches
):
    drafter = RestDrafter(datastore_of(documents), max_ngram=4)
    draft, state = propose(drafter, context, nodes, depth, branches)
    ask = Ask(state, nodes, depth, branches)
    check_draft(draft, ask, 4)
    assert draft.q is None
    assert drafter.propose([ask], rows=1) == [draft]


def test_what_followed_the_longest_match_is_proposed():
    datastore = datastore_of([[9, 1, 2, 3, 4], [8, 1, 2, 5, 6], [7, 1, 2, 5, 7]])
    drafter = RestDrafter(datastore)
    assert paths_of(propose(drafter, [0, 9, 1, 2])[0].tree) == {(3,), (3, 4)}
    expected = {(5,), (5, 6), (5, 7), (3,), (3, 4)}
    assert paths_of(propose(drafter, [0, 1, 2])[0].tree) == expected
    # the most frequent ones first, and one path only where only one is wanted
    assert paths_of(propose(drafter, [0, 1, 2], nodes=1)[0].tree) == {(5,)}
    assert paths_of(propose(drafter, [0, 1, 2], branches=1)[0].tree) in ({(5,), (5, 6)}, {(5,), (5, 7)})
    # a single token is no match, nor is anything across documents
    assert not propose(drafter, [0, 3, 2])[0].tree
    assert not propose(drafter, [4, 8])[0].tree


def test_a_context_is_matched_over_at_most_max_ngram_tokens():
    datastore = datastore_of([[1, 2, 3, 4, 5], [6, 3, 4, 7], [6, 3, 4, 7]])
    assert paths_of(propose(RestDrafter(datastore, max_ngram=4), [1, 2, 3, 4])[0].tree) == {(5,)}
    assert paths_of(propose(RestDrafter(datastore, max_ngram=2), [1, 2, 3, 4])[0].tree) == {(7,), (5,)}


def test_a_request_whose_retrieved_tokens_are_wrong_is_drafted_less():
    datastore = datastore_of([[1, 2] * 30])
    cost = StepCost((1, 2, 10), (10.0, 11.0, 19.0))
    drafter = RestDrafter(datastore, policy=DraftPolicy(cost))
    draft, state = propose(drafter, [1, 2])
    first = len(draft.tree)
    assert first > 1
    for _ in range(40):
        drafter.observe(state, [5], NO_STATES)  # not what was retrieved
        drafter.observe(state, [1, 2], NO_STATES)
        (draft,) = drafter.propose([Ask(state, 8, 8, 8)], rows=1)
    assert len(draft.tree) < first
    for _ in range(40):
        (draft,) = drafter.propose([Ask(state, 8, 8, 8)], rows=1)
        drafter.observe(state, [1, 2, 1, 2], NO_STATES)
    assert (
        len(draft.tree) >= first
    )  # learnt though little was drafted: what was retrieved is judged, drafted or not


# -- the output


@pytest.mark.parametrize("branches", [2, 4])
@pytest.mark.parametrize("draft_length", [1, 3, 8])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.9},
        {"temperature": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "sampled", "filtered", "sampled with penalties"],
)
def test_the_output_is_the_plain_one(branches, draft_length, sampling):
    requests = [request(str(n), n, **sampling) for n in range(8)]
    engine = ToyEngine(RULE, V, padded=3, max_batch=3, max_rows=9, branches=branches)
    outcome = run(DecodeLoop(engine, RestDrafter(STORE), draft_length=draft_length), requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=64)
    steps = [step for completion in outcome.completions.values() for step in completion.steps]
    assert sum(step.accepted for step in steps) > len(requests)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(2, 5),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, StepCost((1, 2, 8), (10.0, 11.0, 14.0))]),
)
def test_any_datastore_leaves_the_output_alone(seed, branches, draft_length, temperature, cost):
    rng = np.random.default_rng(seed)
    noise = datastore_of([rng.integers(0, 3, rng.integers(0, 60)).tolist() for _ in range(5)])
    rule = hash_rule(3, seed=seed, order=3)
    engine = ToyEngine(rule, 3, max_batch=2, max_rows=9, branches=branches)
    drafter = RestDrafter(noise, max_ngram=3, policy=DraftPolicy(cost))
    requests = [
        GenerationRequest(str(n), (n % 3, 1), SamplingParams(max_tokens=15, temperature=temperature, seed=n))
        for n in range(4)
    ]
    outcome = run(DecodeLoop(engine, drafter, draft_length=draft_length), requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(rule, 3, r, max_seq_len=64)


# -- opening


def test_the_factory_opens_the_datastore_of_an_engine_folder(tmp_path: Path):
    write_datastore(STORE, tmp_path / FILE)
    options = {"method": "rest", "datastore": FILE, "max_ngram": 4, "tree_size": 2}
    drafter = open_drafter(options, engine=tmp_path)
    context = [int(token) for token in STORE.tokens[:4]]
    assert len(propose(drafter, context)[0].tree) == 2
    with pytest.raises(ValueError, match="engine folder"):
        open_drafter(options)
