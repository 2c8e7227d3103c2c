"""Draft lengths that change while serving: by load, by acceptance, off and on again, and never a change of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from operator import mul

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drafters.test_draft_model import DraftEngine
from tests.drafters.test_rest import datastore_of
from tests.verify.toy import PathDrafter, ToyEngine, hash_rule, reference, right_drafter, run
from trtspec.drafters.base import Ask, Draft, Drafter
from trtspec.drafters.draft_model import DraftModelDrafter
from trtspec.drafters.lookahead import LookaheadDrafter
from trtspec.drafters.ngram import NgramDrafter
from trtspec.drafters.policy import StepCost
from trtspec.drafters.rest import RestDrafter
from trtspec.drafters.suffix import SuffixDrafter
from trtspec.plan.schedule import Schedule
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.draft_length import AdaptiveLength, DraftLengthPolicy, ScheduledLength
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import ROOT, TokenTree

V, LONGEST, SLOTS = 12, 5, 3
RULE = hash_rule(V, order=2, scale=3.0)  # two tokens decide the next: text repeats itself
DRAFT_RULE = hash_rule(V, order=1, scale=3.0)
STORE = datastore_of([[seed, *np.random.default_rng(seed).integers(0, V, 60).tolist()] for seed in range(4)])
FLAT = StepCost((1, 100), (10.0, 10.0))  # rows are free
LINEAR = StepCost((1, 101), (10.0, 110.0))  # a row more is a tenth of a step

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(min_ngram=1),
    "suffix": lambda: SuffixDrafter(),
    "lookahead": lambda: LookaheadDrafter(),
    "rest": lambda: RestDrafter(STORE),
    "draft_model": lambda: DraftModelDrafter(DraftEngine(DRAFT_RULE, V, max_batch=SLOTS), V),
    "greedy draft_model": lambda: DraftModelDrafter(
        DraftEngine(DRAFT_RULE, V, max_batch=SLOTS), V, temperature=0.0
    ),
}


class Pattern:
    """A policy that follows a list of lengths, whatever happens."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self.pattern = pattern
        self.step = 0

    def open(self) -> str:
        return "paced"

    def lengths(self, paces: Sequence[str], decoding: int, rows: int) -> list[int]:
        assert len(paces) <= decoding <= rows
        self.step += 1
        return [self.pattern[(self.step + n) % len(self.pattern)] for n in range(len(paces))]

    def learn(self, pace: str, tree: TokenTree, path: Sequence[int]) -> None:
        assert len(tree)


def decode(drafter: Drafter, requests: Sequence[GenerationRequest], policy: DraftLengthPolicy | None = None):
    engine = ToyEngine(RULE, V, max_batch=SLOTS, max_seq_len=80, max_rows=24)
    loop = DecodeLoop(engine, drafter, draft_length=LONGEST, length_policy=policy)
    outcome = run(loop, requests)
    assert not outcome.failures
    return outcome.completions


def requests_of(count: int, temperature: float) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            str(n),
            tuple(np.random.default_rng(n).integers(0, V, 2 + 5 * n).tolist()),
            SamplingParams(temperature=temperature, seed=n, max_tokens=20 + 3 * n),
        )
        for n in range(count)
    ]


policies = st.one_of(
    st.lists(st.integers(0, LONGEST + 2), min_size=1, max_size=12).map(Pattern),
    st.lists(st.integers(0, LONGEST), min_size=SLOTS, max_size=SLOTS).map(
        lambda lengths: ScheduledLength(Schedule(tuple(enumerate(lengths, 1))).at)
    ),
    st.builds(
        AdaptiveLength,
        st.just(LONGEST),
        st.sampled_from([FLAT, LINEAR]),
        st.sampled_from([(0.0,) * (LONGEST + 1), tuple(4.0 * d for d in range(LONGEST + 1))]),
        st.lists(st.floats(0, 1), max_size=3),
    ),
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=25, deadline=None)
@given(policy=policies)
def test_no_pattern_of_lengths_changes_a_text(
    name: str, temperature: float, policy: DraftLengthPolicy
) -> None:
    requests = requests_of(5, temperature)
    completions = decode(DRAFTERS[name](), requests, policy)
    if name == "draft_model" and temperature:  # a text of the draws from q: the same as at one fixed length
        expected = {r: c.token_ids for r, c in decode(DRAFTERS[name](), requests).items()}
    else:
        expected = {r.request_id: tuple(reference(RULE, V, r, max_seq_len=80)) for r in requests}
    assert {r: c.token_ids for r, c in completions.items()} == expected


# -- by load


class Counting(PathDrafter):
    """A right drafter that notes how long it may draft, and for how many."""

    def __init__(self) -> None:
        super().__init__(right_drafter(RULE, V).guess, "chain")
        self.asked: list[tuple[int, int]] = []

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        self.asked += [(len(asks), ask.nodes) for ask in asks]
        return super().propose(asks, rows)


def test_a_schedule_follows_the_number_of_decoding_sequences_and_zero_asks_nobody() -> None:
    """Requests of different lengths: three decode, then two, then one."""
    drafter = Counting()
    requests = [
        GenerationRequest(str(n), (n, 1), SamplingParams(max_tokens=tokens))
        for n, tokens in enumerate((9, 25, 60))
    ]
    steps = {
        c.request_id: c.steps
        for c in decode(drafter, requests, ScheduledLength(Schedule(((1, 4), (2, 2), (3, 0))).at)).values()
    }
    assert [step.drafted for step in steps["0"]] == [0] * 8
    assert {step.drafted for step in steps["1"][:8]} == {0}
    assert {step.drafted for step in steps["1"][8:-1]} == {2}
    assert steps["2"][-2].drafted == 4
    assert set(drafter.asked) >= {(2, 2), (1, 4)} and all(count < 3 for count, _ in drafter.asked)


def test_a_draft_model_that_is_switched_off_runs_nothing_and_catches_up_when_it_is_switched_on() -> None:
    drafter = DRAFTERS["draft_model"]()
    on = [0]
    engine = ToyEngine(RULE, V, max_batch=SLOTS, max_seq_len=80, max_rows=24)
    loop = DecodeLoop(
        engine, drafter, draft_length=3, prefill_rows=4, length_policy=ScheduledLength(lambda _n: on[0])
    )
    loop.submit(GenerationRequest("a", (1, 2, 3), SamplingParams(max_tokens=60)))
    for _ in range(6):
        loop.step()
    loop.submit(GenerationRequest("b", tuple(range(12)), SamplingParams(max_tokens=30)))
    for _ in range(6):  # a long prompt arrives in pieces while nothing is drafted
        loop.step()
    assert drafter.engine.fed == []
    on[0] = 3
    loop.step()
    fed = {slot: sum(len(tokens) for s, start, tokens in drafter.engine.fed if s == slot) for slot in (0, 1)}
    assert fed[0] >= 3 + 11 and fed[1] >= 12, "each whole text, once"
    outcome = run(loop)
    assert {r: list(c.token_ids) for r, c in outcome.completions.items()} == {
        r.request_id: reference(RULE, V, r, max_seq_len=80)
        for r in (
            GenerationRequest("a", (1, 2, 3), SamplingParams(max_tokens=60)),
            GenerationRequest("b", tuple(range(12)), SamplingParams(max_tokens=30)),
        )
    }


# -- by acceptance

CHAIN = TokenTree.chain(range(LONGEST))


def feed(policy: AdaptiveLength, rates: Sequence[float], steps: int, *, seed: int = 0) -> list[int]:
    """Lengths chosen for one request whose drafts are accepted by `rates`, conditional by position."""
    rng, pace, chosen = np.random.default_rng(seed), policy.open(), []
    for _ in range(steps):
        (length,) = policy.lengths([pace], 1, 1)
        chosen.append(length)
        if length:
            accepted = next((n for n in range(length) if rng.random() >= rates[n]), length)
            policy.learn(pace, TokenTree.chain(range(length)), range(accepted))
    return chosen


def best_length(rates: Sequence[float], cost: StepCost, draft_ms: Sequence[float]) -> int:
    """By the definition: expected tokens over milliseconds."""
    tokens = [1 + sum(accumulate(rates[:d], mul)) for d in range(LONGEST + 1)]
    speed = [tokens[d] / (cost(1 + d, 1 + d)[0] + draft_ms[d]) for d in range(LONGEST + 1)]
    return int(np.argmax(speed))


@pytest.mark.parametrize(
    ("rates", "draft_ms"),
    [
        ((0.9, 0.9, 0.9, 0.9, 0.9), (0, 1, 2, 3, 4, 5)),
        ((0.9, 0.8, 0.1, 0.5, 0.5), (0, 1, 2, 3, 4, 5)),
        ((0.8, 0.05, 0.5, 0.5, 0.5), (0, 1, 2, 3, 4, 5)),
        ((0.05, 0.5, 0.5, 0.5, 0.5), (0, 1, 2, 3, 4, 5)),
        ((0.7, 0.7, 0.7, 0.2, 0.2), (0, 2, 2, 2, 2, 2)),
    ],
)
def test_the_length_with_the_most_tokens_per_time_is_found(
    rates: tuple[float, ...], draft_ms: tuple[float, ...]
) -> None:
    policy = AdaptiveLength(LONGEST, LINEAR, draft_ms)
    chosen = feed(policy, rates, 600)[200:]
    best = best_length(rates, LINEAR, draft_ms)
    assert max(set(chosen), key=chosen.count) == best
    assert chosen.count(best) > 0.6 * len(chosen)


def test_drafts_that_never_pay_are_switched_off_and_looked_at_ever_more_rarely() -> None:
    policy = AdaptiveLength(LONGEST, LINEAR, tuple(range(LONGEST + 1)), rates=[0.9])
    chosen = feed(policy, (0.0,) * LONGEST, 1000)
    assert all(chosen[:2]), "believed at first"
    looks = [step for step, length in enumerate(chosen) if length and step > 40]
    assert 3 <= len(looks) <= 7
    gaps = np.diff(looks)
    assert (gaps[1:] >= gaps[:-1]).all() and gaps[-1] == 256


def test_drafts_that_pay_again_are_switched_on_again() -> None:
    policy = AdaptiveLength(LONGEST, LINEAR, tuple(range(LONGEST + 1)))
    pace = policy.open()
    for _ in range(40):
        policy.learn(pace, CHAIN, ())
    lengths = []
    for _ in range(400):
        (length,) = policy.lengths([pace], 1, 1)
        lengths.append(length)
        if length:
            policy.learn(pace, TokenTree.chain(range(length)), range(length))
    assert lengths[0] == 0
    assert lengths[-20:] == [LONGEST] * 20


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0, 5), min_size=3, max_size=3),
    st.integers(0, 5),
)
def test_the_batch_takes_the_drafts_that_bring_most_together(
    rates: list[list[float]], increments: list[float], extra: int
) -> None:
    """Against all combinations of lengths: expected tokens of the step over its milliseconds."""
    draft_ms = (0.0, *accumulate(increments))
    policy = AdaptiveLength(3, LINEAR, draft_ms)
    paces = []
    for own in rates:
        pace = policy.open()
        pace.agreed = [rate * tried for rate, tried in zip(own, pace.tried, strict=True)]
        paces.append(pace)
    rows = len(paces) + extra

    def speed(lengths: Sequence[int]) -> float:
        tokens = len(paces) + sum(
            sum(accumulate(own[:d], mul)) for own, d in zip(rates, lengths, strict=True)
        )
        return tokens / (LINEAR(rows + sum(lengths), rows + sum(lengths))[0] + draft_ms[max(lengths)])

    chosen = policy.lengths(paces, len(paces), rows)
    best = max(speed(lengths) for lengths in product(range(4), repeat=len(paces)))
    assert speed(chosen) == pytest.approx(best)


def test_a_trees_nodes_count_where_their_parent_was_accepted() -> None:
    """Two children of the root; the second is right in three of four, and its own child never."""
    policy = AdaptiveLength(3, FLAT, (0.0,) * 4)
    pace = policy.open()
    tree = TokenTree((1, 2, 3), (ROOT, ROOT, 1))
    for step in range(200):
        policy.learn(pace, tree, (1,) if step % 4 else (0,))
    first, second, below = (agreed / tried for agreed, tried in zip(pace.agreed, pace.tried, strict=True))
    assert first == pytest.approx(0.25, abs=0.08)
    assert second == pytest.approx(0.75, abs=0.08)
    assert below < 0.01
    assert pace.survivals() == pytest.approx([first, first, second * below])


def test_drafting_times_must_cover_every_length() -> None:
    with pytest.raises(ValueError, match="3 drafting times for draft lengths 0 to 4"):
        AdaptiveLength(4, FLAT, (0.0, 1.0, 2.0))
