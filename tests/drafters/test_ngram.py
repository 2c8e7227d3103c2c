"""Copying from earlier text: the n-gram index and the suffix automaton against a brute-force search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.drafters.base import Ask, Drafter
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.ngram import NgramDrafter, NgramIndex
from trtspec.drafters.suffix import SuffixAutomaton, SuffixDrafter
from trtspec.values import GenerationRequest

NO_STATES = np.empty((0, 0), np.float32)


def draft(drafter, history, limit):
    state = drafter.open(GenerationRequest("r", tuple(history)), seed=0)
    drafter.observe(state, history[1:], NO_STATES)
    (proposal,) = drafter.propose([Ask(state, limit, limit)], rows=1)
    assert proposal.q is None
    return list(proposal.tree.tokens)


def longest_match(tokens, special, shortest, longest):
    """Length of the longest suffix without special tokens that ends earlier too, and where those ends are."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-n:]
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == suffix]
        if ends and not set(suffix) & special:
            return n, ends
    return 0, []


histories = st.lists(st.integers(0, 4), min_size=1, max_size=60)


@given(histories, st.sampled_from([set(), {0}, {0, 3}]), st.integers(1, 3), st.integers(0, 4))
def test_the_ngram_index_finds_the_most_recent_longest_match(tokens, special, shortest, more):
    index = NgramIndex(shortest, shortest + more, special)
    for end in range(1, len(tokens) + 1):
        index.extend(tokens[end - 1 : end])
        length, ends = longest_match(tokens[:end], special, shortest, shortest + more)
        found = index.match
        assert (found.length if found else 0) == length
        assert found is None or found.following == max(ends)


@given(histories, st.sampled_from([set(), {0}, {0, 3}]), st.integers(1, 3), st.integers(0, 60))
def test_the_suffix_automaton_finds_the_longest_match(tokens, special, shortest, more):
    index = SuffixAutomaton(shortest, shortest + more, special)
    for end in range(1, len(tokens) + 1):
        index.extend(tokens[end - 1 : end])
        length, ends = longest_match(tokens[:end], special, shortest, shortest + more)
        found = index.match
        assert (found.length if found else 0) == length
        assert found is None or found.following in ends


@given(histories, st.lists(st.integers(1, 7), max_size=20), st.booleans())
def test_arriving_in_blocks_or_one_by_one_is_the_same(tokens, blocks, automaton):
    def new():
        return SuffixAutomaton() if automaton else NgramIndex(1, 3)

    whole, pieces, start = new(), new(), 0
    whole.extend(tokens)
    for size in [*blocks, len(tokens)]:
        pieces.extend(tokens[start : start + size])
        start += size
    assert (pieces.tokens, pieces.match) == (whole.tokens, whole.match)


def both(**lengths):
    """The two drafters at the same match lengths."""
    shortest, longest = lengths.pop("min_ngram", 2), lengths.pop("max_ngram", 2)
    return [
        NgramDrafter(min_ngram=shortest, max_ngram=longest, **lengths),
        SuffixDrafter(min_match=shortest, max_match=longest, **lengths),
    ]


@pytest.mark.parametrize(
    ("history", "special", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], (), 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], (4,), 3, [3, 4]),  # ends with the special token it copies
        ([1, 2, 3, 4, 5, 6], (), 3, []),  # nothing repeats
        ([1], (), 3, []),  # shorter than any n-gram
        ([1, 2], (), 3, []),  # would match itself only
        ([1, 2, 9, 1, 2], (9,), 3, [9]),
        ([1, 9, 2, 3, 1, 9, 2], (9,), 3, []),  # the match would reach across a turn
        ([7, 1, 2, 5, 1, 2, 6, 1, 2], (), 2, [6, 1]),  # the most recent of two
    ],
)
def test_what_is_copied(history, special, limit, expected):
    for drafter in both(special_ids=special):
        assert draft(drafter, history, limit) == expected


def test_a_repeating_text_is_continued_past_its_end():
    for drafter in both():
        assert draft(drafter, [1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
        assert draft(drafter, [5, 5, 5], 6) == [5] * 6


def test_longer_matches_win_over_newer_shorter_ones():
    history = [1, 2, 3, 8, 0, 2, 3, 9, 1, 2, 3]
    assert draft(NgramDrafter(min_ngram=1, max_ngram=3), history, 1) == [8]
    assert draft(NgramDrafter(min_ngram=1, max_ngram=2), history, 1) == [9]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (3, 2), (0, 0), (-1, 2)])
def test_lengths_that_can_never_match_are_refused(shortest, longest):
    with pytest.raises(ValueError, match="lengths"):
        NgramDrafter(min_ngram=shortest, max_ngram=longest)
    with pytest.raises(ValueError, match="lengths"):
        SuffixDrafter(min_match=shortest, max_match=longest)


def test_proposals_below_the_minimum_are_dropped_and_the_step_is_plain():
    for drafter in both(min_draft_length=3):
        assert draft(drafter, [1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
        assert draft(drafter, [1, 2, 3, 4, 1, 2], 2) == []


def test_a_suffix_match_drafts_at_most_its_factor():
    history = [*range(20), 4, 5, 6]
    assert draft(SuffixDrafter(max_spec_factor=1.0), history, 9) == [7, 8, 9]
    assert draft(SuffixDrafter(max_spec_factor=2.0), history, 9) == [7, 8, 9, 10, 11, 12]
    assert draft(SuffixDrafter(max_spec_factor=0.2), history, 9) == []


def test_asking_twice_gives_the_same_answer():
    drafter = NgramDrafter()
    state = drafter.open(GenerationRequest("r", (1,)), 0)
    drafter.observe(state, [2, 3, 1, 2], NO_STATES)
    asks = [Ask(state, 4, 2)]
    first = drafter.propose(asks, 1)
    assert first == drafter.propose(asks, 1)
    assert first[0].tree.tokens == (3, 1)  # the tighter of both limits


def test_a_step_costs_the_same_at_any_context_length():
    rng = np.random.default_rng(0)
    text = (rng.zipf(1.3, 60_000) % 5000).tolist()
    for index, bound in ((NgramIndex(1, 3), 3.0), (SuffixAutomaton(), 8.0)):
        costs = []
        for start in range(0, len(text), 10_000):
            before = index.operations
            index.extend(text[start : start + 10_000])
            costs.append((index.operations - before) / 10_000)
        assert max(costs) <= bound
        assert costs[-1] <= 1.1 * costs[0]


def test_wide_match_limits_on_a_long_prompt_without_repeats_stay_bounded():
    # 50,000 tokens, match lengths up to 500, and an end that occurs nowhere else
    prompt = [*(np.random.default_rng(1).integers(0, 1000, 49_996)).tolist(), 1001, 1002, 1003, 1004]
    index = SuffixAutomaton(1, 500)
    index.extend(prompt)
    assert index.match is None
    assert index.operations < 8 * len(prompt)


def test_copies_of_one_long_passage_stay_linear():
    # the worst case of naive matchers: every suffix matches, at every length
    index = SuffixAutomaton(1, 64)
    index.extend([1] * 5000)
    before = index.operations
    index.extend([1] * 5000)
    assert index.operations - before < 6 * 5000


@pytest.mark.parametrize(
    ("speculation", "kind"),
    [
        ({"method": "ngram", "draft_length": 5, "max_ngram": 4, "min_ngram": 1}, NgramDrafter),
        (
            {"method": "suffix", "max_tree_depth": 24, "max_spec_factor": 1.0, "min_token_probability": 0.1},
            SuffixDrafter,
        ),
    ],
)
def test_a_plans_speculation_opens_its_drafter(speculation, kind):
    drafter = open_drafter(speculation, special_ids=[0])
    assert isinstance(drafter, kind)
    assert isinstance(drafter, Drafter)
    assert drafter.spec.method == speculation["method"]


def test_methods_of_other_runtimes_are_refused_by_name():
    assert open_drafter({"method": "none"}) is None
    with pytest.raises(ValueError, match="'no-such'"):
        open_drafter({"method": "no-such"})
