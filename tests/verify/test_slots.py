"""A request starts from the prompt rows that the engine holds already, and its text stays the one it is alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.verify.test_loop import RULE, V, request
from tests.verify.toy import PathDrafter, ToyEngine, random_tree_drafter, reference, run
from trtspec.verify.loop import DecodeLoop

LONG = tuple(int(t) for t in np.random.default_rng(5).integers(0, V, 20))


def rows_computed(engine: ToyEngine) -> int:
    return sum(map(sum, engine.calls))


def served(loop: DecodeLoop, *requests):
    completions = run(loop, requests).completions
    for r in requests:
        assert list(completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=64)
    return completions


def test_the_next_turn_of_a_conversation_computes_its_new_rows_alone():
    engine = ToyEngine(RULE, V)
    loop = DecodeLoop(engine)
    answer = served(loop, request("one", LONG, max_tokens=6))["one"].token_ids
    engine.calls.clear()
    turn = (*LONG, *answer, 3, 1)
    completion = served(loop, request("two", turn, max_tokens=1))["two"]
    assert (
        completion.cached_tokens == len(LONG) + len(answer) - 2
    )  # what a request's last step ran is not kept
    assert rows_computed(engine) == len(turn) - completion.cached_tokens


def test_the_same_prompt_again_computes_one_row():
    engine = ToyEngine(RULE, V)
    loop = DecodeLoop(engine)
    served(loop, request("one", LONG, max_tokens=1))
    engine.calls.clear()
    served(loop, request("two", LONG, max_tokens=1))
    assert engine.calls == [[1]]


def test_an_engine_that_cannot_rewind_lends_all_that_a_slot_holds_or_nothing():
    """A cache that keeps old rows in fewer bits has them exactly at its end only."""
    engine = ToyEngine(RULE, V)
    engine.spec = replace(engine.spec, rewinds=False)
    loop = DecodeLoop(engine)
    answer = served(loop, request("one", LONG, max_tokens=6))["one"].token_ids
    turn = (*LONG, *answer, 3, 1)
    assert (
        served(loop, request("two", turn, max_tokens=2))["two"].cached_tokens == len(LONG) + len(answer) - 2
    )
    assert served(loop, request("three", (*LONG[:15], 1, 2), max_tokens=2))["three"].cached_tokens == 0


def test_a_running_sequence_lends_its_prefix_and_goes_on():
    engine = ToyEngine(RULE, V)
    loop = DecodeLoop(engine)
    first, second = (
        request("first", LONG, max_tokens=12),
        request("second", (*LONG[:15], 1, 2), max_tokens=12),
    )
    loop.submit(first)
    loop.step()
    loop.step()
    completions = served(loop, second)
    assert completions["second"].cached_tokens == 15 + (LONG[15] == 1)
    assert list(completions["first"].token_ids) == reference(RULE, V, first, max_seq_len=64)


def test_a_short_common_beginning_is_copied_and_the_long_text_stays_for_its_next_turn():
    engine = ToyEngine(RULE, V)
    loop = DecodeLoop(engine)
    served(loop, request("conversation", LONG, max_tokens=1))
    served(loop, request("other", (*LONG[:4], *(t ^ 1 for t in LONG[4:9])), max_tokens=1))
    assert served(loop, request("turn", (*LONG, 2), max_tokens=1))["turn"].cached_tokens == len(LONG)


def test_the_slot_taken_longest_ago_is_the_one_that_is_given_up():
    loop = DecodeLoop(ToyEngine(RULE, V, max_batch=2))
    texts = [tuple((t + n) % V for t in LONG) for n in range(3)]
    for n in (0, 1, 2):
        served(loop, request(f"first {n}", texts[n], max_tokens=1))
    kept = [served(loop, request(f"second {n}", texts[n], max_tokens=1))[f"second {n}"] for n in (1, 2)]
    assert [c.cached_tokens for c in kept] == [len(LONG) - 1] * 2


@pytest.mark.parametrize("why", ["asked not to", "not exact", "the drafter reads hidden states"])
def test_nothing_is_reused_where_it_could_be_seen_in_the_output(why):
    engine = ToyEngine(RULE, V, hidden=1)
    drafter = random_tree_drafter(V)
    if why == "not exact":
        engine = ToyEngine(RULE, V, exact=False)
    if why == "the drafter reads hidden states":
        drafter.hidden_states = "last"
    loop = DecodeLoop(engine, drafter, draft_length=3, reuse_prefixes=why != "asked not to")
    for name in ("one", "two"):
        assert served(loop, request(name, LONG, max_tokens=3))[name].cached_tokens == 0


def test_the_drafter_sees_the_rows_that_were_not_computed():
    drafter = PathDrafter(random_tree_drafter(V).guess)
    loop = DecodeLoop(ToyEngine(RULE, V), drafter, draft_length=4)
    for name in ("one", "two"):
        served(loop, request(name, LONG, max_tokens=9))
    assert drafter.seen[1][: len(LONG)] == list(LONG)
    assert drafter.seen[0][: len(drafter.seen[1])] == drafter.seen[1][: len(drafter.seen[0])]
