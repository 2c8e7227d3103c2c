"""The draft model's own KV, its proposals and their q, on closed-form engines: nothing it does may show in the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.test_lossless import DRAFTER as DRAFT_RULE
from tests.verify.test_lossless import LENGTH, TARGET, V, pvalue
from tests.verify.toy import Rule, ToyEngine, hash_rule, reference, run
from trtspec.drafters.base import Ask
from trtspec.drafters.draft_model import DraftModelDrafter
from trtspec.engines.base import SlotLogits, SlotStep
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop

WORDS = 12
NO_HIDDEN = np.empty((0, 0), np.float32)


class DraftEngine(ToyEngine):
    """A toy engine any distinct slots of which may take part in a step. fed: (slot, start, tokens) of every step."""

    def __init__(self, rule: Rule, vocab: int, **settings: int) -> None:
        super().__init__(rule, vocab, **settings)
        self.fed: list[tuple[int, int, tuple[int, ...]]] = []
        self.closed = 0

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        for old in self._given:
            old.logits[:] = np.nan
        if len({step.slot for step in steps}) < len(steps):
            raise ValueError("a slot takes part in a step once")
        self.fed += [(step.slot, step.start, tuple(step.tokens.tolist())) for step in steps]
        self.calls.append([len(step.tokens) for step in steps])
        self._given = [self._run(step) for step in steps]
        return self._given

    def close(self) -> None:
        self.closed += 1


def request(name: str = "r", prompt: Sequence[int] = (1, 2, 3), **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**sampling))


def greedy(rule: Rule, path: Sequence[int], count: int) -> list[int]:
    """The draft from scratch, with no cache."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(np.argmax(rule((*path, *tokens)))))
    return tokens


def opened(drafter: DraftModelDrafter, prompt: Sequence[int], first: int = 0, **sampling: object):
    """A sequence whose prompt is in, and whose prefill token is known."""
    state = drafter.open(request(prompt=prompt, **sampling), seed=3)
    drafter.observe(state, (*prompt[1:], first), NO_HIDDEN)
    return state


def propose(drafter: DraftModelDrafter, state: object, depth: int):
    (draft,) = drafter.propose([Ask(state, depth, depth)], 1)
    return draft


# -- the draft's KV


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_cache_is_right_after_any_history(data: st.DataObject) -> None:
    """Sequences come, are drafted for in any company, accept any part of a draft, and go: every proposal is what a
    draft without a cache would make of the same text."""
    rule = hash_rule(WORDS, seed=4)  # of the whole path: one stale row anywhere changes it
    drafter = DraftModelDrafter(DraftEngine(rule, WORDS, max_batch=3, max_rows=4), WORDS)
    token = st.integers(0, WORDS - 1)
    live: dict[object, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if len(live) < 3 and data.draw(st.booleans()):
            prompt = data.draw(st.lists(token, min_size=1, max_size=9))
            state = drafter.open(request(prompt=prompt), seed=0)
            known = [*prompt, data.draw(token)]
            cut = data.draw(st.integers(1, len(known)))  # as the loop feeds a prompt: in pieces
            drafter.observe(state, known[1:cut], NO_HIDDEN)
            drafter.observe(state, known[cut:], NO_HIDDEN)
            live[state] = known
        asked = [state for state in live if data.draw(st.booleans())]
        depths = [data.draw(st.integers(1, 5)) for _ in asked]
        drafts = drafter.propose([Ask(s, d, d) for s, d in zip(asked, depths, strict=True)], 3)
        for state, depth, draft in zip(asked, depths, drafts, strict=True):
            assert list(draft.tree.tokens) == greedy(rule, live[state], depth)
        for state in list(live):
            if data.draw(st.integers(0, 5)) == 0:
                drafter.release(state)
                del live[state]
                continue
            drafted = drafts[asked.index(state)].tree.tokens if state in asked else ()
            accepted = data.draw(st.integers(0, len(drafted)))
            committed = (*drafted[:accepted], data.draw(token))
            if len(live[state]) + len(committed) < 50:
                drafter.observe(state, committed, NO_HIDDEN)
                live[state].extend(committed)


def test_accepted_drafts_are_not_run_again() -> None:
    engine = DraftEngine(hash_rule(WORDS), WORDS)
    drafter = DraftModelDrafter(engine, WORDS)
    state = opened(drafter, (1, 2, 3), first=7)
    first = propose(drafter, state, 4).tree.tokens
    assert engine.fed == [(0, 0, (1, 2, 3, 7)), *((0, 4 + i, (first[i],)) for i in range(3))]
    engine.fed.clear()
    drafter.observe(state, (*first[:2], 9), NO_HIDDEN)  # two of four, then another token
    propose(drafter, state, 1)
    assert engine.fed == [(0, 6, (9,))]
    engine.fed.clear()
    (last,) = propose(drafter, state, 1).tree.tokens
    drafter.observe(state, (last, 5), NO_HIDDEN)  # all of it: its last token was never run
    propose(drafter, state, 1)
    assert engine.fed[-1] == (0, 7, (last, 5))


def test_asking_again_gives_the_same_answer() -> None:
    drafter = DraftModelDrafter(DraftEngine(hash_rule(WORDS), WORDS), WORDS)
    state = opened(drafter, (1, 2, 3), temperature=0.9)
    first, second = propose(drafter, state, 5), propose(drafter, state, 5)
    assert first.tree == second.tree
    assert np.array_equal(first.q, second.q)


def test_a_long_prompt_is_fed_as_it_comes_and_in_pieces_the_engine_takes() -> None:
    engine = DraftEngine(hash_rule(WORDS), WORDS, max_rows=4)
    drafter = DraftModelDrafter(engine, WORDS)
    prompt = [i % WORDS for i in range(15)]
    state = drafter.open(request(prompt=prompt), seed=0)
    drafter.observe(state, prompt[1:11], NO_HIDDEN)
    assert sum(len(tokens) for _, _, tokens in engine.fed) == 11
    drafter.observe(state, [*prompt[11:], 5], NO_HIDDEN)
    assert list(propose(drafter, state, 2).tree.tokens) == greedy(engine.rule, [*prompt, 5], 2)
    assert max(rows for call in engine.calls for rows in call) == 4


def test_drafting_stops_where_the_drafts_context_ends() -> None:
    engine = DraftEngine(hash_rule(WORDS), WORDS, max_seq_len=8)
    drafter = DraftModelDrafter(engine, WORDS)
    state = opened(drafter, (1, 2, 3, 4, 5), first=6)
    assert len(propose(drafter, state, 4).tree) == 2  # positions 6 and 7
    drafter.observe(state, (7, 8), NO_HIDDEN)
    assert not len(propose(drafter, state, 4).tree)
    long = drafter.open(request(prompt=range(11)), seed=0)
    before = len(engine.fed)
    drafter.observe(long, range(1, 10), NO_HIDDEN)
    drafter.observe(long, (10, 3), NO_HIDDEN)
    assert not len(propose(drafter, long, 4).tree)
    assert len(engine.fed) == before


def test_slots_are_taken_once_and_given_back() -> None:
    engine = DraftEngine(hash_rule(WORDS), WORDS, max_batch=2)
    drafter = DraftModelDrafter(engine, WORDS)
    first, _second = opened(drafter, (1,)), opened(drafter, (2,))
    with pytest.raises(ValueError, match="2 slots"):
        drafter.open(request(), seed=0)
    drafter.release(first)
    assert drafter.open(request(), seed=0).slot == 0
    drafter.close()
    assert engine.closed


# -- what is proposed


def test_ids_past_the_tokenizer_are_never_proposed() -> None:
    drafter = DraftModelDrafter(DraftEngine(hash_rule(WORDS), WORDS, padded=5), WORDS)  # padding scores 1e9
    plain = propose(drafter, opened(drafter, (1, 2)), 6)
    assert max(plain.tree.tokens) < WORDS
    sampled = propose(drafter, opened(drafter, (1, 2), temperature=1.0), 6)
    assert max(sampled.tree.tokens) < WORDS
    assert sampled.q.shape == (6, WORDS)
    assert np.allclose(sampled.q.sum(axis=1), 1)


def test_a_draft_that_lacks_ids_of_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="knows 12 token ids, the target's tokenizer 13"):
        DraftModelDrafter(DraftEngine(hash_rule(WORDS), WORDS, padded=4), 13)


@pytest.mark.parametrize(
    ("request_temperature", "draft_temperature", "sampled"),
    [(0.0, None, False), (0.0, 0.7, False), (0.7, None, True), (0.7, 0.3, True), (0.7, 0.0, False)],
)
def test_a_draft_has_q_only_when_both_temperatures_are_above_zero(
    request_temperature: float, draft_temperature: float | None, sampled: bool
) -> None:
    drafter = DraftModelDrafter(DraftEngine(hash_rule(WORDS), WORDS), WORDS, temperature=draft_temperature)
    draft = propose(drafter, opened(drafter, (1, 2), temperature=request_temperature), 3)
    assert (draft.q is not None) == sampled


def test_a_proposal_stops_where_the_draft_is_unsure() -> None:
    """Sure of two tokens, then of nothing."""

    def rule(path: tuple[int, ...]) -> np.ndarray:
        scores = np.zeros(WORDS, np.float32)
        scores[3] = 9.0 if len(path) < 5 else 0.1
        return scores

    for sampling in ({}, {"temperature": 1.0}):
        drafter = DraftModelDrafter(DraftEngine(rule, WORDS), WORDS, min_probability=0.5)
        assert propose(drafter, opened(drafter, (1, 2), **sampling), 6).tree.tokens == (3, 3)
        state = opened(drafter, (1, 2, 3, 4, 5), **sampling)
        assert not len(propose(drafter, state, 6).tree)


def test_a_draft_ends_with_the_end_of_the_text() -> None:
    engine = DraftEngine(hash_rule(WORDS), WORDS)
    whole = greedy(engine.rule, (1, 2, 0), 5)
    drafter = DraftModelDrafter(engine, WORDS, special_ids=[whole[2]])
    assert (
        list(propose(drafter, opened(drafter, (1, 2)), 5).tree.tokens) == whole[: whole.index(whole[2]) + 1]
    )


# -- in the loop


def decode(
    target: Rule,
    draft: Rule,
    requests: Sequence[GenerationRequest],
    *,
    vocab: int = WORDS,
    padded: tuple[int, int] = (0, 0),
    batch: int = 3,
    draft_length: int = 4,
    kind: type[DraftModelDrafter] = DraftModelDrafter,
    **options: object,
):
    drafter = kind(DraftEngine(draft, vocab, padded=padded[1], max_batch=batch), vocab, **options)
    engine = ToyEngine(target, vocab, padded=padded[0], max_batch=batch, max_rows=9)
    outcome = run(DecodeLoop(engine, drafter, draft_length=draft_length, max_queue=len(requests)), requests)
    assert not outcome.failures
    assert len(drafter._free) == batch, "a slot was not given back"
    return outcome.completions, engine


@pytest.mark.parametrize("padded", [(0, 5), (5, 0)])
@pytest.mark.parametrize("draft_seed", [0, 1])
def test_greedy_output_is_the_plain_one(padded: tuple[int, int], draft_seed: int) -> None:
    target, draft = hash_rule(WORDS, order=2), hash_rule(WORDS, order=2, seed=draft_seed)
    requests = [
        request(str(n), np.random.default_rng(n).integers(0, WORDS, 2 + 5 * n), max_tokens=20 + n)
        for n in range(6)
    ]
    completions, _ = decode(target, draft, requests, padded=padded)
    for r in requests:
        assert list(completions[r.request_id].token_ids) == reference(target, WORDS, r, max_seq_len=64)


def test_a_perfect_draft_is_accepted_whole() -> None:
    rule = hash_rule(WORDS)
    completions, engine = decode(rule, rule, [request(max_tokens=21)])
    assert len(engine.calls) == 1 + 20 // 5
    assert all(step.accepted == step.drafted == 4 for step in completions["r"].steps)
    sampled, _ = decode(rule, rule, [request(max_tokens=21, temperature=1.0, seed=4)])
    assert all(step.accepted == step.drafted for step in sampled["r"].steps), (
        "q is p: nothing can be rejected"
    )


def test_a_greedy_draft_leaves_sampled_text_as_the_seed_has_it() -> None:
    rule = hash_rule(WORDS, order=2)
    requests = [request(str(n), (n, 2), max_tokens=20, temperature=0.8, seed=n) for n in range(5)]
    completions, _ = decode(rule, hash_rule(WORDS, order=2, seed=1), requests, temperature=0.0)
    for r in requests:
        assert list(completions[r.request_id].token_ids) == reference(rule, WORDS, r, max_seq_len=64)


def test_sampled_text_does_not_depend_on_who_else_is_decoded() -> None:
    target, draft = hash_rule(WORDS), hash_rule(WORDS, seed=1)
    requests = [request(str(n), (n, 2), max_tokens=25, temperature=0.8, seed=n) for n in range(6)]
    together, _ = decode(target, draft, requests)
    for r in requests:
        alone, _ = decode(target, draft, [r], batch=1)
        assert alone[r.request_id].token_ids == together[r.request_id].token_ids


def sampled_loop(kind: type[DraftModelDrafter] = DraftModelDrafter, **settings: object) -> float:
    """p-value of 2,000 sampled continuations against the exact product of the target's probabilities."""
    requests = [request(str(s), (0,), temperature=1.0, seed=s, max_tokens=5) for s in range(2000)]
    completions, _ = decode(TARGET, DRAFT_RULE, requests, vocab=V, draft_length=3, kind=kind, **settings)
    steps = [step for c in completions.values() for step in c.steps]
    assert sum(step.accepted for step in steps) > len(requests) / 8  # drafts took part
    assert sum(step.drafted - step.accepted for step in steps) > len(requests) / 8  # and were rejected
    return pvalue([c.token_ids[:LENGTH] for c in completions.values()])


@pytest.mark.parametrize(
    "settings",
    [
        {"padded": (3, 0)},
        {"padded": (0, 6), "temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 0.0},
        {"min_probability": 0.4},
    ],
    ids=["padded target", "padded cold draft", "hot draft", "greedy draft", "unsure draft"],
)
def test_sampled_output_has_the_targets_distribution(settings: dict[str, object]) -> None:
    assert sampled_loop(**settings) > 0.01


class DropsUnlikelyDraws(DraftModelDrafter):
    """Stops by the token it drew: what it proposes is no longer distributed as the q it states."""

    def _extend(self, proposal, scores):
        goes_on = super()._extend(proposal, scores)
        if proposal.q and proposal.q[-1][proposal.tokens[-1]] < 0.3:
            proposal.tokens.pop()
            proposal.q.pop()
            return False
        return goes_on


def test_the_test_catches_a_drafter_that_hides_its_unlikely_draws() -> None:
    assert sampled_loop(DropsUnlikelyDraws) < 1e-6
