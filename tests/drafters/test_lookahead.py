"""Lookahead decoding: the window's n-grams are what the target said, and the text is never anything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.toy import ToyEngine, hash_rule, reference, run
from trtspec.drafters.base import Ask, Draft, Probing, check_draft
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.lookahead import LookaheadDrafter
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import TokenTree

V = 12
RULE = hash_rule(V, order=2, scale=3.0)
NO_STATES = np.empty((0, 0), np.float32)


def said(path: tuple[int, ...]) -> int:
    """What the target says after a path."""
    return int(np.argmax(RULE(path)))


def follow(drafter: LookaheadDrafter, prompt: tuple[int, ...], steps: int):
    """The drafter's state after some steps of greedy decoding that accept nothing, with every n-gram it should have
    seen: the columns of the window, by the definition of the paper.
    """
    state = drafter.open(GenerationRequest("r", prompt), seed=0)
    drafter.observe(state, prompt[1:], NO_STATES)
    path, seen = prompt, []
    for _ in range(steps):
        (draft,) = drafter.propose([Ask(state, 8, 8, 100, 100)], rows=1)
        tree = draft.probe
        paths = [(*path, *(tree.tokens[n] for n in tree.path(node))) for node in range(len(tree))]
        full = len(state.levels) == drafter._levels
        first = [path, *paths[: len(state.levels[0])]]
        for column, beginning in enumerate(first):
            tokens = [beginning[-1], *(level[column] for level in state.levels[1:])]
            whole = (*beginning, *tokens[1:])
            assert whole in (path, *paths), "every column is run below its own token of level 0"
            if full:
                seen.append((*tokens, said(whole)))
        drafter.learn(state, [said(path), *map(said, paths)])
        path = (*path, said(path))
        drafter.observe(state, path[-1:], NO_STATES)
    return state, seen


@pytest.mark.parametrize("window", [2, 3, 5])
@pytest.mark.parametrize("ngram", [2, 3, 4])
def test_the_pool_holds_the_windows_trajectories(window, ngram):
    drafter = LookaheadDrafter(window_size=window, ngram_size=ngram, verification_set_size=3)
    state, seen = follow(drafter, (3, 1, 4), steps=12)
    assert [len(level) for level in state.levels] == [window - 1] + [window] * (ngram - 2)
    assert len(seen) == window * (12 - (ngram - 2))
    for first in {ngram[0] for ngram in seen}:
        latest = list(dict.fromkeys(n[1:] for n in reversed(seen) if n[0] == first))[:3]
        assert state.pool[first] == latest[::-1]
    assert set(state.pool) == {n[0] for n in seen}


def test_the_window_moves_on_by_one_position_a_step():
    drafter = LookaheadDrafter(window_size=3, ngram_size=3, verification_set_size=1)
    state = drafter.open(GenerationRequest("r", (7, 8, 9)), seed=0)
    assert state.levels == [[7, 8]]
    drafter.observe(state, (8, 9), NO_STATES)
    drafter.learn(state, [1, 2, 3])
    assert state.levels == [[7, 8], [1, 2, 3]]
    (draft,) = drafter.propose([Ask(state, 2, 2, 8, 20)], rows=1)
    # o1 o2, then the column of the last known token, of o1 and of o2
    assert (draft.probe.tokens, draft.probe.parents) == ((7, 8, 1, 2, 3), (-1, 0, -1, 0, 1))
    drafter.learn(state, [0, 0, 0, 4, 5, 6])
    assert state.levels == [[2, 3], [4, 5, 6]]
    assert state.pool == {9: [(1, 4)], 7: [(2, 5)], 8: [(3, 6)]}


@given(
    st.integers(2, 4), st.integers(2, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 4),
    st.integers(1, 10), st.integers(1, 24),
)  # fmt: skip
def test_proposals_and_probes_keep_every_limit(window, ngram, most, nodes, depth, branches, rows):
    drafter = LookaheadDrafter(window_size=window, ngram_size=ngram, verification_set_size=most)
    state, _ = follow(drafter, (3, 1, 4), steps=10)
    ask = Ask(state, min(nodes, rows), depth, branches, rows)
    (draft,) = drafter.propose([ask], rows=1)
    check_draft(draft, ask, V)
    assert drafter.propose([ask], rows=1) == [draft]
    if branches >= window + most and rows >= 24:
        assert draft.probe


@pytest.mark.parametrize("sizes", [(2, 2, 1), (3, 3, 2), (4, 3, 4), (3, 5, 3)])
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
def test_the_output_is_the_plain_one(sizes, sampling):
    window, ngram, most = sizes
    requests = [
        GenerationRequest(str(n), (n, 2 * n % V, 3), SamplingParams(max_tokens=40, seed=n, **sampling))
        for n in range(8)
    ]
    engine = ToyEngine(RULE, V, padded=3, max_batch=3, max_rows=40, branches=window + most)
    drafter = LookaheadDrafter(window_size=window, ngram_size=ngram, verification_set_size=most)
    assert isinstance(drafter, Probing)
    outcome = run(DecodeLoop(engine, drafter, draft_length=most * (ngram - 1)), requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=64)
    steps = [step for completion in outcome.completions.values() for step in completion.steps]
    assert sum(step.accepted for step in steps) > len(requests)
    assert max(step.drafted for step in steps) <= most * (ngram - 1), "the window is not counted as drafted"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(2, 12),
    st.integers(2, 14),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.8]),
)
def test_an_engine_with_less_room_leaves_the_output_alone(
    seed, branches, max_rows, draft_length, temperature
):
    rule = hash_rule(3, seed=seed, order=2)
    engine = ToyEngine(rule, 3, max_batch=2, max_seq_len=24, max_rows=max_rows, branches=branches)
    drafter = LookaheadDrafter(window_size=3, ngram_size=3, verification_set_size=2)
    requests = [
        GenerationRequest(str(n), (n % 3, 1), SamplingParams(temperature=temperature, seed=n))
        for n in range(4)
    ]
    loop = DecodeLoop(engine, drafter, draft_length=min(draft_length, max_rows - 1))
    outcome = run(loop, requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(rule, 3, r, max_seq_len=24)


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (TokenTree.chain([1, 2, 3]), "5 tokens on 2 paths"),
        (TokenTree.merge([[1], [2]]), "4 tokens on 3 paths"),
        (TokenTree.chain([V]), "outside the vocabulary"),
    ],
)
def test_a_probe_past_its_room_is_refused(probe, words):
    ask = Ask(None, nodes=2, depth=2, branches=2, rows=4)
    check_draft(Draft(TokenTree.chain([5, 6]), probe=TokenTree.chain([1, 2])), ask, V)
    with pytest.raises(ValueError, match=words):
        check_draft(Draft(TokenTree.chain([5, 6]), probe=probe), ask, V)


def test_sizes_that_never_draft_are_refused_and_the_factory_passes_them_on():
    for sizes in ((1, 3, 4), (4, 1, 4), (4, 3, 0)):
        with pytest.raises(ValueError, match="must be at least"):
            LookaheadDrafter(window_size=sizes[0], ngram_size=sizes[1], verification_set_size=sizes[2])
    drafter = open_drafter({"method": "lookahead", "window_size": 2})
    state = drafter.open(GenerationRequest("r", (5, 6)), seed=0)
    assert state.levels == [[5]]
