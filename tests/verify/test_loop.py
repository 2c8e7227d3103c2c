"""The decode loop, one fault at a time: limits, stops inside accepted blocks, counters, cancellation,
failures.
"""

import numpy as np
import pytest

from tests.verify.toy import (
    PathDrafter,
    ToyEngine,
    hash_rule,
    random_tree_drafter,
    reference,
    right_drafter,
    run,
    scripted_rule,
    wrong_drafter,
)
from trtspec.drafters.base import Draft
from trtspec.drafters.ngram import NgramDrafter
from trtspec.drafters.suffix import SuffixDrafter
from trtspec.values import GenerationRequest, SamplingParams, StepRecord
from trtspec.verify.loop import DecodeLoop, Refused
from trtspec.verify.text import ByteLevelDecoder, StreamingText
from trtspec.verify.tree import TokenTree

V = 12
RULE = hash_rule(V, order=2, scale=3.0)  # repeats itself, so that copying from the text pays

DRAFTERS = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(min_ngram=1),
    "suffix": lambda: SuffixDrafter(),
    "always right": lambda: right_drafter(RULE, V),
    "always wrong": lambda: wrong_drafter(RULE, V),
    "random trees": lambda: random_tree_drafter(V),
}


def request(name="r", prompt=(1, 2, 3), **sampling):
    return GenerationRequest(name, tuple(prompt), SamplingParams(**sampling))


def letters(stops):
    """Token t is the letter a + t."""
    return StreamingText(ByteLevelDecoder(lambda token: bytes([97 + token])), stops)


def follow(script):
    """A drafter that knows the script the target follows after a prompt of `prompt` tokens."""

    def guess(path, ask):
        done = len(path) - 1
        return Draft.chain(script[done : done + min(ask.nodes, ask.depth)])

    return PathDrafter(guess, "chain")


def scripted(script, drafts=None, **loop_args):
    """Target and (perfect, unless `drafts` are given) drafter of one script after the prompt (0,)."""
    engine = ToyEngine(scripted_rule(V, script, prompt_length=1), V)
    draft_length = loop_args.pop("draft_length", 4)
    return DecodeLoop(engine, follow(drafts or script), draft_length=draft_length, **loop_args)


@pytest.mark.parametrize("draft_length", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_k": 4, "top_p": 0.9},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "sampled", "filtered", "penalties", "sampled with penalties"],
)
def test_every_drafter_gives_the_plain_output(drafter, draft_length, sampling):
    requests = [
        request(str(n), np.random.default_rng(n).integers(0, V, 2 + 5 * n), max_tokens=20 + n, **sampling)
        for n in range(6)
    ]
    made = DRAFTERS[drafter]()
    engine = ToyEngine(RULE, V, padded=3, max_batch=3, max_rows=9, hidden=2)
    outcome = run(DecodeLoop(engine, made, draft_length=draft_length if made else 0), requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=64)


def test_right_drafts_save_steps_and_wrong_ones_cost_none():
    steps = {}
    for name in ("none", "always right", "always wrong"):
        engine = ToyEngine(RULE, V)
        made = DRAFTERS[name]()
        run(DecodeLoop(engine, made, draft_length=4 if made else 0), [request(max_tokens=21)])
        steps[name] = len(engine.calls)
    assert steps == {"none": 21, "always wrong": 21, "always right": 1 + 20 // 5}


# -- stop ids and limits inside an accepted block


@pytest.mark.parametrize("stop_id", [2, 11])
def test_a_stop_id_accepted_in_the_middle_of_a_block_ends_the_text(stop_id):
    loop = scripted([5, 7, stop_id, 8, 9], stop_token_ids=[2, 11])
    completion = run(loop, [request(prompt=(0,))]).completions["r"]
    assert completion.token_ids == (5, 7, stop_id)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_id)


def test_tokens_after_the_stop_are_counted_nowhere():
    # the step after the prefill token accepts all of 6, 6, 2, 6, 6; three of them are text
    outcome = run(
        scripted([5, 6, 6, 2, 6, 6, 6, 6], stop_token_ids=[2]), [request(prompt=(0,), logprobs=True)]
    )
    completion, last = outcome.completions["r"], outcome.deltas["r"][-1]
    assert completion.token_ids == (5, 6, 6, 2)
    assert len(completion.logprobs) == 4
    assert (last.token_ids, last.drafted, last.accepted) == ((6, 6, 2), 4, 3)
    assert [(s.drafted, s.accepted, s.emitted) for s in completion.steps] == [(4, 3, 3)]


def test_ignore_eos_keeps_the_requests_own_stop_ids():
    script = [5, 2, 6, 9, 1]
    ignoring = run(
        scripted(script, stop_token_ids=[2]), [request(prompt=(0,), ignore_eos=True, max_tokens=5)]
    )
    assert ignoring.completions["r"].token_ids == (5, 2, 6, 9, 1)
    own = request(prompt=(0,), ignore_eos=True, stop_token_ids=(9,))
    completion = run(scripted(script, stop_token_ids=[2]), [own]).completions["r"]
    assert (completion.token_ids, completion.stop_reason) == ((5, 2, 6, 9), 9)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_honoured_exactly_and_not_drafted_past(max_tokens):
    engine = ToyEngine(RULE, V)
    drafter = right_drafter(RULE, V)
    outcome = run(DecodeLoop(engine, drafter, draft_length=4), [request(max_tokens=max_tokens)])
    completion = outcome.completions["r"]
    assert len(completion.token_ids) == max_tokens
    assert completion.finish_reason == "length"
    left = max_tokens - 1
    for step in completion.steps:
        assert step.drafted <= left - 1  # one token of every step is the target's own
        left -= step.emitted


def test_a_stop_id_as_the_last_allowed_token_is_a_stop():
    completion = run(
        scripted([5, 7, 2], stop_token_ids=[2]), [request(prompt=(0,), max_tokens=3)]
    ).completions["r"]
    assert completion.finish_reason == "stop"


# -- the context limit


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("left", [1, 2, 3, 7])
def test_a_prompt_near_the_context_limit_fills_it_and_no_more(drafter, left):
    # no reserve: the engine itself refuses any row past max_seq_len
    engine = ToyEngine(RULE, V, max_seq_len=64)
    prompt = np.random.default_rng(0).integers(0, V, 64 - left)
    made = DRAFTERS[drafter]()
    outcome = run(DecodeLoop(engine, made, draft_length=4 if made else 0), [request(prompt=prompt)])
    completion = outcome.completions["r"]
    assert len(completion.token_ids) == left
    assert completion.finish_reason == "length"
    assert list(completion.token_ids) == reference(RULE, V, request(prompt=prompt), max_seq_len=64)


@pytest.mark.parametrize("length", [64, 65, 500])
def test_a_prompt_that_leaves_no_room_is_refused_alone_with_the_public_limit(length):
    loop = DecodeLoop(ToyEngine(RULE, V, max_seq_len=64, reserve=4), right_drafter(RULE, V), draft_length=4)
    loop.submit(request("good", max_tokens=5))
    with pytest.raises(ValueError, match=rf"{length} tokens .* limit is 64: .* at most 63"):
        loop.submit(request("long", [1] * length))
    assert len(run(loop).completions["good"].token_ids) == 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, V)}, "from 0 to 11"),
        ({"prompt": (-1,)}, "from 0 to 11"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "penalt"),
        ({"stop": ("",)}, "empty"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_queued(bad, message):
    loop = DecodeLoop(ToyEngine(RULE, V), open_text=letters)
    with pytest.raises(ValueError, match=message):
        loop.submit(request(**bad))
    assert not loop.has_work


# -- stop strings


def test_a_stop_string_split_over_two_blocks_is_found_and_nothing_after_it_is_sent():
    # text "hfabcd…"; draft length 2 puts "ab" and "cd" into different steps
    script = [7, 5, 0, 1, 2, 3, 4]
    loop = scripted(script, open_text=letters, draft_length=2)
    outcome = run(loop, [request(prompt=(0,), stop=("bcd",))])
    completion = outcome.completions["r"]
    assert completion.text == "hfa"
    assert "".join(d.text for d in outcome.deltas["r"]) == "hfa"
    assert completion.token_ids == (7, 5, 0, 1, 2, 3)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "bcd")


@pytest.mark.parametrize("draft_length", [1, 2, 3, 5])
def test_text_and_tokens_do_not_depend_on_where_blocks_end(draft_length):
    script = [7, 0, 1, 0, 1, 2, 3, 4]
    loop = scripted(script, open_text=letters, draft_length=draft_length)
    completion = run(loop, [request(prompt=(0,), stop=("abcx", "bcd", "abd"))]).completions["r"]
    assert (completion.text, completion.token_ids) == ("haba", (7, 0, 1, 0, 1, 2, 3))


def test_a_stop_id_shows_no_text():
    loop = scripted([7, 4, 2, 6], open_text=letters)
    completion = run(loop, [request(prompt=(0,), stop_token_ids=(2,))]).completions["r"]
    assert completion.text == "he"


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="tokenizer"):
        DecodeLoop(ToyEngine(RULE, V)).submit(request(stop=("x",)))


# -- accounting


def test_acceptance_is_counted_over_verify_steps_without_the_prefill_token():
    # draft length 3, accepted 2, 0, 3: nine tokens in three steps after the prefill token
    script = [5, 1, 2, 3, 4, 6, 7, 8, 9]
    drafts = [5, 1, 2, 0, 0, 6, 7, 8, 0]

    loop = scripted(script, drafts, draft_length=3)
    completion = run(loop, [request(prompt=(0,), max_tokens=9)]).completions["r"]
    assert [(s.drafted, s.accepted, s.emitted) for s in completion.steps] == [(3, 2, 3), (3, 0, 1), (3, 3, 4)]
    assert completion.acceptance_length == pytest.approx(8 / 3)


def test_deltas_number_the_steps_and_time_runs_on():
    ticks = iter(range(1000))
    loop = DecodeLoop(
        ToyEngine(RULE, V), right_drafter(RULE, V), draft_length=2, clock=lambda: float(next(ticks))
    )
    outcome = run(loop, [request(max_tokens=10)])
    completion = outcome.completions["r"]
    assert [d.step for d in outcome.deltas["r"]] == [0, 1, 2, 3]
    assert sum((d.token_ids for d in outcome.deltas["r"]), ()) == completion.token_ids
    assert completion.steps == tuple(
        StepRecord(d.drafted, d.accepted, len(d.token_ids), s.at_s)
        for d, s in zip(outcome.deltas["r"][1:], completion.steps, strict=True)
    )
    times = [completion.ttft_s, *(s.at_s for s in completion.steps), completion.total_s]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logprobs_are_those_of_the_rows_the_tokens_came_from(drafter):
    made = DRAFTERS[drafter]()
    loop = DecodeLoop(ToyEngine(RULE, V), made, draft_length=6 if made else 0)
    r = request(max_tokens=40, temperature=0.6, seed=2, presence_penalty=0.3, logprobs=True)
    outcome = run(loop, [r])
    completion, path = outcome.completions["r"], r.prompt
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        logits = RULE(path).astype(float)
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-6)
        path = (*path, token)
    assert sum((d.logprobs for d in outcome.deltas["r"]), ()) == completion.logprobs


def test_a_fresh_seed_is_drawn_and_reported():
    loop = DecodeLoop(ToyEngine(RULE, V))
    first = run(loop, [request("a", temperature=1.0, max_tokens=12)]).completions["a"]
    again = run(loop, [request("b", temperature=1.0, max_tokens=12, seed=first.seed)]).completions["b"]
    assert again.token_ids == first.token_ids
    other = run(loop, [request("c", temperature=1.0, max_tokens=12)]).completions["c"]
    assert other.seed != first.seed


# -- many requests


@pytest.mark.parametrize("prefill_rows", [1, 2, 5, None])
@pytest.mark.parametrize("max_rows", [2, 7, 16])
def test_how_prompts_are_split_changes_nothing(prefill_rows, max_rows):
    requests = [request(str(n), np.random.default_rng(n).integers(0, V, 30), max_tokens=9) for n in range(5)]
    engine = ToyEngine(RULE, V, max_batch=2, max_rows=max_rows)
    loop = DecodeLoop(engine, NgramDrafter(), draft_length=1, prefill_rows=prefill_rows)
    outcome = run(loop, requests)
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=64)


def test_a_long_prompt_does_not_stall_a_running_stream():
    engine = ToyEngine(RULE, V, max_rows=16)
    loop = DecodeLoop(engine, prefill_rows=4)
    loop.submit(request("running", max_tokens=30))
    loop.step()
    loop.submit(request("long", [4] * 33, max_tokens=2))
    tokens = {"running": 0, "long": 0}
    while not tokens["long"]:
        for delta in loop.step().deltas:
            tokens[delta.request_id] += len(delta.token_ids)
    assert tokens["running"] == 9  # one in each of the prompt's nine steps
    assert all(call == [1, 4] for call in engine.calls[1:9])


def test_a_lone_prompt_uses_all_the_rows_a_step_may_have():
    engine = ToyEngine(RULE, V, max_rows=16)
    run(DecodeLoop(engine, prefill_rows=4), [request(prompt=[1] * 33, max_tokens=1)])
    assert engine.calls == [[16], [16], [1]]


def test_waiting_requests_take_slots_that_come_free_and_the_queue_refuses_past_its_limit():
    loop = DecodeLoop(ToyEngine(RULE, V, max_batch=2), max_queue=1)
    for name in "abc":
        loop.submit(request(name, max_tokens=3))
    with pytest.raises(Refused, match="max_queue_size"):
        loop.submit(request("d"))
    loop.step()
    assert (loop.active, loop.waiting) == (2, 1)
    assert set(run(loop).completions) == {"a", "b", "c"}


def test_one_id_is_in_use_once():
    loop = DecodeLoop(ToyEngine(RULE, V))
    loop.submit(request(max_tokens=2))
    with pytest.raises(ValueError, match="already in use"):
        loop.submit(request())
    run(loop)
    run(loop, [request(max_tokens=2)])


def test_the_drafter_sees_every_committed_token_once_and_the_state_before_it():
    drafter = random_tree_drafter(V)
    drafter.hidden_states = "last"
    engine = ToyEngine(RULE, V, hidden=1, max_rows=9, max_batch=2)
    requests = [request(str(n), np.random.default_rng(n).integers(0, V, 21), max_tokens=15) for n in range(4)]
    completions = run(DecodeLoop(engine, drafter, draft_length=8), requests).completions
    assert drafter.released == 4
    for r, seen, hidden in zip(requests, drafter.seen, drafter.hidden, strict=True):
        path = [*r.prompt, *completions[r.request_id].token_ids]
        assert seen == path[: len(seen)]
        assert len(path) - len(seen) <= 9  # the last step is not observed: the request is over
        assert hidden == [float(hash(tuple(path[: n + 1])) % 65_521) for n in range(len(hidden))]
        assert len(hidden) == len(seen) - 1


# -- cancellation and failures


def test_cancelling_frees_the_slot_within_one_step():
    loop = DecodeLoop(ToyEngine(RULE, V, max_batch=2), right_drafter(RULE, V), draft_length=4)
    for name in "ab":
        loop.submit(request(name))
    loop.step()
    loop.cancel("a")
    for n in range(8):
        loop.submit(request(f"new {n}", max_tokens=6))
    result = loop.step()
    assert [c.finish_reason for c in result.completions if c.request_id == "a"] == ["cancelled"]
    assert loop.active == 2  # one of the new ones sits in its slot already
    outcome = run(loop)
    assert all(len(outcome.completions[f"new {n}"].token_ids) == 6 for n in range(8))
    assert loop.drafter.released == 10


def test_a_waiting_request_can_be_cancelled():
    loop = DecodeLoop(ToyEngine(RULE, V, max_batch=1))
    loop.submit(request("a", max_tokens=4))
    loop.submit(request("b"))
    loop.cancel("b")
    loop.cancel("never heard of")
    outcome = run(loop)
    assert outcome.completions["b"].finish_reason == "cancelled"
    assert outcome.completions["b"].token_ids == ()
    assert len(outcome.completions["a"].token_ids) == 4


def poisoned(token):
    """RULE, but NaN once a path holds `token` in its prompt."""
    return lambda path: np.full(V, np.nan, np.float32) if path[0] == token and len(path) > 6 else RULE(path)


def test_logits_that_are_not_finite_end_their_request_alone():
    requests = [request(str(n), (n, 1, 2), max_tokens=8) for n in range(4)]
    outcome = run(
        DecodeLoop(ToyEngine(poisoned(2), V, max_batch=3), right_drafter(RULE, V), draft_length=2), requests
    )
    assert set(outcome.failures) == {"2"}
    assert "'2'" in str(outcome.failures["2"].error)
    for n in (0, 1, 3):
        assert list(outcome.completions[str(n)].token_ids) == reference(RULE, V, requests[n], max_seq_len=64)


BROKEN = {
    "too long": lambda ask: Draft.chain([1] * (ask.nodes + 1)),
    "too deep": lambda ask: Draft.chain([1] * (ask.depth + 1)),
    "too wide": lambda ask: Draft(TokenTree((1, 2, 3), (-1, -1, -1))),
    "outside the vocabulary": lambda ask: Draft.chain([V]),
    "misshapen q": lambda ask: Draft.chain([1], np.ones((2, V)) / V),
    "raises": lambda ask: 1 / 0,
    "bad tree": lambda ask: Draft(TokenTree((1,), (3,))),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_drafter_that_breaks_for_one_request_takes_no_other_with_it(fault):
    def guess(path, ask):
        return BROKEN[fault](ask) if path[0] == 2 else Draft.chain([3] * ask.depth)

    requests = [request(str(n), (n, 1, 2), max_tokens=8) for n in range(4)]
    engine = ToyEngine(RULE, V, max_batch=3, branches=2)
    outcome = run(DecodeLoop(engine, PathDrafter(guess), draft_length=4), requests)
    assert set(outcome.failures) == {"2"}
    for n in (0, 1, 3):
        assert list(outcome.completions[str(n)].token_ids) == reference(RULE, V, requests[n], max_seq_len=64)


def test_a_drafter_that_loses_a_draft_is_asked_again_one_by_one():
    drafter = right_drafter(RULE, V)
    propose = drafter.propose
    drafter.propose = lambda asks, rows: propose(asks, rows)[: max(1, len(asks) - 1)]
    requests = [request(str(n), (n, 1, 2), max_tokens=8) for n in range(3)]
    outcome = run(DecodeLoop(ToyEngine(RULE, V), drafter, draft_length=3), requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(RULE, V, r, max_seq_len=64)


def test_drafting_can_be_switched_off_and_on_between_steps():
    loop = DecodeLoop(ToyEngine(RULE, V), right_drafter(RULE, V), draft_length=3)
    r = request(max_tokens=30)
    loop.submit(r)
    drafted, tokens = [], []
    for length in (3, 3, 0, 0, 0, 3, 1, 3, 3, 3, 3, 3, 3, 3):
        loop.draft_length = length
        for delta in loop.step().deltas:
            drafted.append(delta.drafted)
            tokens.extend(delta.token_ids)
    assert drafted[:8] == [0, 3, 0, 0, 0, 3, 1, 3]
    assert tokens == reference(RULE, V, r, max_seq_len=64)


def test_an_engine_that_fails_is_not_hidden():
    engine = ToyEngine(RULE, V)
    loop = DecodeLoop(engine)
    loop.submit(request())
    engine.forward = lambda steps: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.step()


# -- settings


def test_settings_that_do_not_fit_the_engine_are_refused():
    chains_only = ToyEngine(RULE, V, branches=1, max_rows=8, max_batch=2)
    with pytest.raises(ValueError, match="trees"):
        DecodeLoop(chains_only, random_tree_drafter(V), draft_length=3)
    with pytest.raises(ValueError, match="1 to max_rows - 1 = 7"):
        DecodeLoop(chains_only, NgramDrafter(), draft_length=8)
    with pytest.raises(ValueError, match="draft_length is 0"):
        DecodeLoop(chains_only, NgramDrafter())
    with pytest.raises(ValueError, match="max_concurrency is 3"):
        DecodeLoop(chains_only, max_concurrency=3)
    with pytest.raises(ValueError, match="prefill_rows"):
        DecodeLoop(chains_only, prefill_rows=0)
    loop = DecodeLoop(chains_only, NgramDrafter(), draft_length=7)
    assert run(loop, [request(max_tokens=3)]).completions
