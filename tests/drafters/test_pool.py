"""The pool of ended requests' n-grams: found like a brute-force search, bounded, oldest out first, never in a text."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.toy import ToyEngine, hash_rule, reference, run
from trtspec.drafters.base import Ask, Drafter
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.ngram import CopyDrafter, NgramDrafter
from trtspec.drafters.pool import NgramPool
from trtspec.drafters.suffix import SuffixDrafter
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop

V = 12
END = 0
RULE = hash_rule(V, order=2, scale=3.0)
NO_STATES = np.empty((0, 0), np.float32)

texts = st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=6)


def held(everything: Sequence[Sequence[int]], size: int) -> list[int | None]:
    """What a ring of `size` holds, oldest first; None after each text."""
    written: list[int | None] = []
    for text in everything:
        written += [*text[-(size - 1) :], None]
    return written[-size:]


def search(tokens: list[int | None], context: list[int], shortest: int, longest: int, special: set[int]):
    """Every (length, what follows) of the longest match, newest first, by looking everywhere."""
    for n in range(min(longest, len(context)), shortest - 1, -1):
        suffix = context[-n:]
        ends = [end for end in range(n, len(tokens) + 1) if tokens[end - n : end] == suffix]
        if ends and not set(suffix) & special:
            return n, [tokens[end] if end < len(tokens) else None for end in reversed(ends)]
    return 0, []


@given(
    texts,
    st.lists(st.integers(0, 3), max_size=12),
    st.sampled_from([(), (END,)]),
    st.sampled_from([8, 20, 200]),
)
def test_the_longest_newest_match_is_found(everything, context, special, size) -> None:
    pool = NgramPool(size, min_ngram=3, max_ngram=5, special_ids=special)
    for text in everything:
        pool.add(text)
    tokens = held(everything, size)
    length, found = pool.find(context, 1)
    expected, ends = search(tokens, context, 3, 5, set(special))
    if len(tokens) < 16:  # every occurrence is looked at
        assert length == expected
    assert length <= expected
    if length:
        assert (found[0] if found else None) in search(tokens, context, length, length, set(special))[1]
        if length == expected and len(tokens) < 16:  # the newest that goes on
            assert (found[0] if found else None) == next((end for end in ends if end is not None), None)


@given(texts, st.sampled_from([8, 20, 200]))
def test_it_holds_no_more_than_its_size_and_forgets_the_oldest_first(everything, size) -> None:
    pool = NgramPool(size, max_ngram=4)
    for text in everything:
        pool.add(text)
    tokens = held(everything, size)
    assert len(pool) == len(tokens) <= size
    grams = {tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)}
    assert pool.ngrams == len({gram for gram in grams if None not in gram}), (
        "neither more nor fewer than it holds"
    )


def test_memory_is_bounded_whatever_passes_through() -> None:
    rng = np.random.default_rng(0)
    stream = [rng.integers(0, 50_000, 500).tolist() for _ in range(60)]  # n-grams that hardly ever recur
    pool = NgramPool(4096)
    tracemalloc.start()
    for text in stream[:20]:
        pool.add(text)
    full = tracemalloc.get_traced_memory()[0]
    for text in stream[20:]:
        pool.add(text)
    grown = tracemalloc.get_traced_memory()[0] - full
    tracemalloc.stop()
    assert pool.ngrams < len(pool) == 4096
    assert grown < 0.1 * full
    assert full < 4096 * 300


@pytest.mark.parametrize(
    ("size", "lengths"), [(3, {}), (100, {"min_ngram": 4, "max_ngram": 3}), (8, {"min_ngram": 0})]
)
def test_sizes_that_hold_no_match_are_refused(size: int, lengths: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="holds no match"):
        NgramPool(size, **lengths)


# -- in the drafters


def pooled(kind: str, **options: object) -> CopyDrafter:
    drafter = open_drafter(
        {"method": kind, "pool_tokens": 100, "max_spec_factor": 4.0, **options}, special_ids=[END]
    )
    assert isinstance(drafter, NgramDrafter if kind == "ngram" else SuffixDrafter)
    return drafter


def end_one(drafter: Drafter, prompt: Sequence[int], generated: Sequence[int]) -> None:
    state = drafter.open(GenerationRequest("r", tuple(prompt)), seed=0)
    drafter.observe(state, (*prompt[1:], *generated), NO_STATES)
    drafter.release(state)


def draft(drafter: Drafter, history: Sequence[int], limit: int = 4) -> list[int]:
    state = drafter.open(GenerationRequest("r", tuple(history)), seed=0)
    drafter.observe(state, history[1:], NO_STATES)
    asks = [Ask(state, limit, limit)]
    (first,), (again,) = drafter.propose(asks, 1), drafter.propose(asks, 1)
    assert first == again
    return list(first.tree.tokens)


both = pytest.mark.parametrize("kind", ["ngram", "suffix"])


@both
def test_an_ended_request_drafts_for_the_next(kind: str) -> None:
    drafter = pooled(kind)
    assert draft(drafter, [4, 5, 6]) == []
    end_one(drafter, [9], [4, 5, 6, 7, 8, 10])
    assert draft(drafter, [4, 5, 6]) == [7, 8, 10]


@both
def test_nothing_is_shared_by_default(kind: str) -> None:
    drafter = open_drafter({"method": kind})
    end_one(drafter, [9], [4, 5, 6, 7, 8, 10])
    assert draft(drafter, [4, 5, 6]) == []


@both
def test_prompts_are_shared_only_where_that_is_asked_for(kind: str) -> None:
    for prompts, expected in ((False, []), (True, [7, 8])):
        drafter = pooled(kind, pool_prompts=prompts)
        end_one(drafter, [4, 5, 6, 7, 8], [11])
        assert draft(drafter, [4, 5, 6], 2) == expected


@both
def test_a_running_request_is_not_drafted_from(kind: str) -> None:
    drafter = pooled(kind)
    state = drafter.open(GenerationRequest("r", (9,)), seed=0)
    drafter.observe(state, (4, 5, 6, 7, 8), NO_STATES)
    assert draft(drafter, [4, 5, 6]) == []


@both
def test_the_own_text_wins_unless_the_pool_matches_longer(kind: str) -> None:
    options = {"max_ngram": 8} if kind == "ngram" else {}
    drafter = pooled(kind, **options)
    end_one(drafter, [9], [1, 4, 5, 6, 7])
    assert draft(drafter, [4, 5, 6, 10, 4, 5, 6], 1) == [10]
    assert draft(drafter, [4, 5, 6, 10, 1, 4, 5, 6], 1) == [7]


@both
def test_a_match_at_a_texts_end_gives_way_to_one_that_goes_on(kind: str) -> None:
    drafter = pooled(kind)
    end_one(drafter, [9], [4, 5, 6, 4, 5, 6, 4, 5, 6])
    assert draft(drafter, [4, 5, 6]) == [4, 5, 6, 4]
    ends = pooled(kind)
    end_one(ends, [9], [4, 5, 6])
    assert draft(ends, [5, 6, 10, 4, 5, 6], 1) == [10], "nothing follows in the pool: the own, shorter match"


@both
def test_no_match_reaches_across_a_turn_and_a_draft_ends_with_it(kind: str) -> None:
    drafter = pooled(kind)
    end_one(drafter, [9], [4, 5, END, 6, 7, 8, END, 3])
    assert draft(drafter, [4, 5, END]) == []
    assert draft(drafter, [5, END, 6]) == []
    assert draft(drafter, [6, 7, 8]) == [END]
    assert draft(drafter, [END, 6, 7, 8]) == [END]


@both
def test_no_draft_runs_from_one_text_into_the_next(kind: str) -> None:
    drafter = pooled(kind)
    end_one(drafter, [9], [4, 5, 6, 7])
    end_one(drafter, [9], [8, 8, 8])
    assert draft(drafter, [4, 5, 6]) == [7]
    assert draft(drafter, [6, 7, 8]) == []


@both
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_text_changes_and_a_repeated_request_takes_fewer_steps(kind: str, temperature: float) -> None:
    """Each request twice, in other company the second time: the same text, which the pool foretells."""
    drafter = pooled(kind, pool_tokens=2000)
    engine = ToyEngine(RULE, V, max_batch=3, max_seq_len=80, max_rows=9)
    loop = DecodeLoop(engine, drafter, draft_length=6)
    steps = []
    for order in (range(6), (3, 0, 5, 1, 4, 2)):
        requests = [
            GenerationRequest(
                str(n), (n, n + 1, 2), SamplingParams(max_tokens=40, temperature=temperature, seed=n)
            )
            for n in order
        ]
        outcome = run(loop, requests)
        assert not outcome.failures
        for r in requests:
            assert list(outcome.completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=80)
        steps.append(sum(len(c.steps) for c in outcome.completions.values()))
    assert steps[1] < (0.7 if temperature else 1.0) * steps[0]  # greedy text foretells itself well enough
