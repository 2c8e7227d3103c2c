"""Several drafts in one token tree: merged where they agree, independent where they draw, and never seen in a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drafters.test_draft_model import NO_HIDDEN, WORDS, DraftEngine, greedy, request
from tests.verify.test_lossless import DRAFTER, LENGTH, TARGET, V, pvalue
from tests.verify.toy import Rule, ToyEngine, hash_rule, reference, run
from trtspec.drafters.base import Ask, Draft, check_draft
from trtspec.drafters.draft_model import DraftModelDrafter
from trtspec.drafters.specinfer import SpecInferDrafter, merge
from trtspec.values import GenerationRequest
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import ROOT, TokenTree

RULES = (hash_rule(WORDS, seed=1), hash_rule(WORDS, seed=2), hash_rule(WORDS, seed=3))


def specinfer(
    rules: Sequence[Rule], vocab: int = WORDS, *, batch: int = 3, **options: object
) -> SpecInferDrafter:
    return SpecInferDrafter(
        [
            DraftModelDrafter(DraftEngine(rule, vocab, max_batch=batch), vocab, draw=draw, **options)
            for draw, rule in enumerate(rules)
        ]
    )


def opened(drafter: SpecInferDrafter, prompt: Sequence[int], **sampling: object):
    state = drafter.open(request(prompt=prompt, **sampling), seed=3)
    drafter.observe(state, prompt[1:], NO_HIDDEN)
    return state


def propose(drafter: SpecInferDrafter, state: object, nodes: int, depth: int = 9, branches: int = 8) -> Draft:
    (draft,) = drafter.propose([Ask(state, nodes, depth, branches)], 1)
    check_draft(draft, Ask(state, nodes, depth, branches), WORDS)
    return draft


def paths(tree: TokenTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in tree.path(leaf)] for leaf in tree.leaves()]


# -- the tree


def test_every_draft_writes_its_share_and_the_rest_goes_to_the_first() -> None:
    prompt = (1, 2, 3, 4)
    drafter = specinfer(RULES)
    state = opened(drafter, prompt)
    expected = [greedy(rule, prompt, count) for rule, count in zip(RULES, (3, 2, 2), strict=True)]
    assert len({own[0] for own in expected}) == 3
    assert sorted(paths(propose(drafter, state, 7).tree)) == sorted(expected)


def test_drafts_that_agree_share_their_nodes() -> None:
    prompt = (1, 2, 3, 4)
    drafter = specinfer((RULES[0], RULES[0]))
    tree = propose(drafter, opened(drafter, prompt), 7).tree
    assert tree.is_chain
    assert list(tree.tokens) == greedy(RULES[0], prompt, 4), "the first has the one left over"


def test_more_drafts_than_branches_leave_the_last_ones_out() -> None:
    prompt = (1, 2, 3, 4)
    drafter = specinfer(RULES)
    state = opened(drafter, prompt)
    tree = propose(drafter, state, 6, branches=2).tree
    assert sorted(paths(tree)) == sorted(greedy(rule, prompt, 3) for rule in RULES[:2])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.integers(1, 3), st.sampled_from([0.0, 1.0])
)
def test_a_proposal_keeps_to_what_was_asked_for(nodes, depth, branches, drafts, temperature) -> None:
    drafter = specinfer(RULES[:drafts])
    propose(drafter, opened(drafter, (1, 2, 3), temperature=temperature), nodes, depth, branches)


def test_agreeing_draws_are_one_node_with_a_q_each() -> None:
    first = Draft.chain([3, 5], np.array([[0.0] * 3 + [1.0] + [0.0] * 8, [1 / 12] * 12]))
    second = Draft.chain([3, 6], np.full((2, WORDS), 1 / WORDS))
    merged = merge([first, second])
    assert merged.tree == TokenTree((3, 5, 6), (ROOT, 0, 0))
    assert merged.draws == (0, 1, 0, 2)
    assert np.array_equal(merged.q, np.concatenate([first.q, second.q]))
    check_draft(merged, Ask(None, 3, 2, 2), WORDS)


def test_drafts_without_a_number_of_their_own_are_refused() -> None:
    engine = DraftEngine(RULES[0], WORDS)
    with pytest.raises(ValueError, match=r"2 drafts with draws \[0, 0\]"):
        SpecInferDrafter([DraftModelDrafter(engine, WORDS), DraftModelDrafter(engine, WORDS)])


def test_one_draft_at_the_end_of_its_context_leaves_the_others_writing() -> None:
    engines = [DraftEngine(RULES[0], WORDS, max_seq_len=4), DraftEngine(RULES[1], WORDS)]
    drafter = SpecInferDrafter([DraftModelDrafter(e, WORDS, draw=n) for n, e in enumerate(engines)])
    prompt = (1, 2, 3, 4, 5)
    assert paths(propose(drafter, opened(drafter, prompt), 6).tree) == [greedy(RULES[1], prompt, 3)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_drafts_cache_is_right_after_any_history(data: st.DataObject) -> None:
    """The text goes on with one draft's tokens, another's, part of them or neither's."""
    drafter = specinfer(RULES)
    known = [1, 2, 3]
    state = opened(drafter, known)
    for _ in range(6):
        draft = propose(drafter, state, 9)
        assert draft.tree == TokenTree.merge([greedy(rule, known, 3) for rule in RULES])
        node = data.draw(st.integers(-1, len(draft.tree) - 1))
        accepted = [draft.tree.tokens[n] for n in draft.tree.path(node)]
        committed = (*accepted, data.draw(st.integers(0, WORDS - 1)))
        drafter.observe(state, committed, NO_HIDDEN)
        known += committed


# -- in the loop


def decode(
    target: Rule,
    drafter: SpecInferDrafter,
    requests: Sequence[GenerationRequest],
    *,
    vocab: int = WORDS,
    draft_length: int = 6,
    branches: int = 4,
):
    engine = ToyEngine(target, vocab, max_batch=3, max_rows=12, branches=branches)
    outcome = run(DecodeLoop(engine, drafter, draft_length=draft_length, max_queue=len(requests)), requests)
    assert not outcome.failures
    assert all(len(draft._free) == 3 for draft in drafter._drafts), "a slot was not given back"
    return outcome.completions


@pytest.mark.parametrize("branches", [2, 4])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}])
def test_output_is_the_plain_one(branches: int, sampling: dict[str, float]) -> None:
    """Greedy drafts: of a sampled text, too."""
    target = hash_rule(WORDS, order=2)
    rules = [target, hash_rule(WORDS, order=2, seed=1), hash_rule(WORDS, order=2, seed=2)]
    requests = [
        request(
            str(n),
            np.random.default_rng(n).integers(0, WORDS, 2 + 5 * n),
            max_tokens=20 + n,
            seed=n,
            **sampling,
        )
        for n in range(6)
    ]
    completions = decode(target, specinfer(rules, temperature=0.0), requests, branches=branches)
    for r in requests:
        assert list(completions[r.request_id].token_ids) == reference(target, WORDS, r, max_seq_len=64)
    assert sum(step.accepted for c in completions.values() for step in c.steps) > 10


def test_the_second_draft_helps_where_the_first_is_wrong() -> None:
    """The first draft is right after even tokens, the second after odd ones: together always."""
    target, other = hash_rule(WORDS, order=1), hash_rule(WORDS, order=1, seed=1)
    halves = [
        lambda path, parity=parity: (target if path[-1] % 2 == parity else other)(path) for parity in (0, 1)
    ]
    requests = [request(str(n), (n, 3), max_tokens=40) for n in range(3)]

    def steps(drafter: SpecInferDrafter, length: int) -> int:
        return sum(len(c.steps) for c in decode(target, drafter, requests, draft_length=length).values())

    both = steps(specinfer(halves), 2)
    assert both < steps(specinfer(halves[:1]), 1)
    assert both < steps(specinfer(halves[1:]), 1)
    assert both == 3 * 20  # one draft and one token of the target's at every step


def test_sampled_text_does_not_depend_on_who_else_is_decoded() -> None:
    requests = [request(str(n), (n, 2), max_tokens=25, temperature=0.8, seed=n) for n in range(5)]
    together = decode(RULES[0], specinfer(RULES), requests)
    for r in requests:
        assert (
            decode(RULES[0], specinfer(RULES), [r])[r.request_id].token_ids
            == together[r.request_id].token_ids
        )


def sampled_loop(drafter: SpecInferDrafter) -> float:
    """p-value of 2,000 sampled continuations against the exact product of the target's probabilities."""
    requests = [request(str(s), (0,), temperature=1.0, seed=s, max_tokens=5) for s in range(2000)]
    completions = decode(TARGET, drafter, requests, vocab=V, branches=8)
    steps = [step for c in completions.values() for step in c.steps]
    assert sum(step.accepted for step in steps) > len(requests) / 4
    return pvalue([c.token_ids[:LENGTH] for c in completions.values()])


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ((DRAFTER,) * 6, {}),
        ((DRAFTER, hash_rule(V, seed=5), hash_rule(V, seed=6)), {"temperature": 0.6}),
        ((DRAFTER, hash_rule(V, seed=5)), {"min_probability": 0.4}),
    ],
    ids=["six alike", "three and cold", "two and unsure"],
)
def test_sampled_output_has_the_targets_distribution(
    rules: Sequence[Rule], options: dict[str, float]
) -> None:
    assert sampled_loop(specinfer(rules, V, **options)) > 0.01


def test_the_test_catches_drafts_that_draw_with_the_same_random_numbers() -> None:
    """Six drafts alike: those after the first always agree with it, and are judged as if they had drawn themselves."""
    copying = specinfer((DRAFTER,) * 6, V)
    for draft in copying._drafts:
        draft.draw = 0
    assert sampled_loop(copying) < 1e-6
