"""Draft lengths: the best expected tokens per millisecond, by brute force; learning; free rows and dear ones."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.drafters.policy import Acceptance, Candidate, DraftPolicy, StepCost, match_class

LINEAR = StepCost((1, 100), (10.0, 10.0 + 99 * 1.2))


def candidate(length, match=3):
    return Candidate(tuple(range(length)), match)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=3),
    st.lists(st.floats(0, 3), min_size=15, max_size=15),
    st.integers(0, 4),
)
def test_the_chosen_lengths_are_the_best_of_all(shapes, increments, extra):
    costs = [10.0]
    for step in increments:
        costs.append(costs[-1] + step)
    cost = StepCost(tuple(range(1, 17)), tuple(costs))
    candidates = [candidate(length, match) for length, match in shapes]
    acceptance = [Acceptance() for _ in shapes]
    rows = len(shapes) + extra

    def rate(lengths):
        tokens = len(shapes) + sum(
            sum(a.survival(c.cut(n))) for a, c, n in zip(acceptance, candidates, lengths, strict=True)
        )
        return tokens / cost(rows + sum(lengths), rows + sum(lengths))[0]

    chosen = DraftPolicy(cost).lengths(candidates, acceptance, rows)
    best = max(rate(lengths) for lengths in product(*(range(n + 1) for n, _ in shapes)))
    assert rate(chosen) == pytest.approx(best)


def test_without_a_cost_everything_proposed_is_drafted():
    assert DraftPolicy().lengths([candidate(5), candidate(0, 0)], [Acceptance()] * 2, 2) == [5, 0]


def test_a_free_row_is_used_even_on_weak_evidence():
    two_at_least = StepCost((1, 2, 3, 4), (10.0, 10.0, 20.0, 30.0))
    assert DraftPolicy(two_at_least).lengths([candidate(3, match=1)], [Acceptance()], 1) == [1]


def test_a_row_that_costs_five_steps_is_never_taken():
    # one row 6.5 ms, two rows 33.5 ms: even a certain draft gives 2 tokens in the time of five plain steps
    certain = Acceptance()
    for _ in range(1000):
        certain.learn(candidate(1), (0,))
    assert certain.estimate(3) > 0.99
    assert DraftPolicy(StepCost((1, 2), (6.5, 33.5))).lengths([candidate(1)], [certain], 1) == [0]


def test_longer_matches_draft_longer():
    lengths = [
        DraftPolicy(LINEAR).lengths([candidate(12, match)], [Acceptance()], 1)[0] for match in (1, 3, 16)
    ]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_a_request_learns_from_what_was_accepted():
    copying, inventing = Acceptance(), Acceptance()
    for _ in range(100):
        copying.learn(candidate(3), (0, 1, 2, 9))
        inventing.learn(candidate(3), (9,))
    policy = DraftPolicy(LINEAR)
    assert policy.lengths([candidate(3)], [copying], 1) == [3]
    assert policy.lengths([candidate(3)], [inventing], 1) == [0]


def test_drafts_after_a_rejected_one_teach_nothing():
    a = Acceptance()
    before = [a.estimate(n) for n in (3, 4, 5)]
    a.learn(candidate(3), (0, 7))  # the second was wrong, the third was never judged
    after = [a.estimate(n) for n in (3, 4, 5)]
    assert after[0] > before[0] and after[1] < before[1] and after[2] == before[2]
    a.learn(candidate(3), (0,))  # the text ended: nothing more was judged
    assert a.estimate(4) == after[1]


def test_in_a_batch_the_rows_go_to_the_likely_drafts():
    sure, unsure = Acceptance(), Acceptance()
    for _ in range(50):
        sure.learn(candidate(4), (0, 1, 2, 3))
        unsure.learn(candidate(4), (9,))
    lengths = DraftPolicy(LINEAR).lengths([candidate(4), candidate(4)], [unsure, sure], 2)
    assert lengths == [0, 4]


def test_a_probability_floor_cuts_the_proposal():
    floor = DraftPolicy(min_probability=0.65)
    assert floor.lengths([candidate(4, match=3)], [Acceptance()], 1) == [0]
    assert floor.lengths([candidate(4, match=4)], [Acceptance()], 1) == [4]


def test_match_classes_grow_with_the_match():
    classes = [match_class(n) for n in range(1, 400)]
    assert classes == sorted(classes)
    assert (classes[0], classes[-1]) == (0, 7)


@pytest.mark.parametrize(
    ("rows", "ms"),
    [
        ((1,), (1.0,)),
        ((1, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1, 2), (0.0, 1.0)),
        ((1, 2, 3), (1.0, 2.0)),
    ],
)
def test_cost_tables_that_make_no_sense_are_refused(rows, ms):
    with pytest.raises(ValueError, match="step cost"):
        StepCost(rows, ms)


def test_cost_is_linear_between_and_beyond_the_measured_points():
    cost = StepCost((1, 3, 5), (10.0, 14.0, 15.0))
    assert cost(1, 7).tolist() == [10, 12, 14, 14.5, 15, 15.5, 16]
