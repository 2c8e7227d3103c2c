"""Random traffic over a toy engine: whatever arrives, leaves or is cancelled when, every text is the one it
would be alone.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.test_loop import DRAFTERS, RULE, V, letters
from tests.verify.toy import ToyEngine, reference
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop, Refused

MODEL_STOPS = (0,)
MAX_SEQ_LEN = 40

requests = st.builds(
    lambda prompt, sampling: (tuple(prompt), sampling),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=MAX_SEQ_LEN - 1),
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 20),
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.9]),
        seed=st.integers(0, 3),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.3]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        stop=st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=2).map(tuple),
        stop_token_ids=st.sampled_from([(), (5,)]),
        ignore_eos=st.booleans(),
        logprobs=st.booleans(),
    ),
)
traffic = st.lists(
    st.one_of(
        requests.map(lambda r: ("submit", r)),
        st.tuples(st.integers(0, 12), requests).map(lambda t: ("go on", t)),
        st.integers(1, 6).map(lambda n: ("step", n)),
        st.integers(0, 12).map(lambda n: ("cancel", n)),
    ),
    min_size=1,
    max_size=25,
)


def expected(request):
    """(tokens, text, finish reason) by one-token-at-a-time decoding and searching the whole text after each
    token.
    """
    s = request.sampling
    tokens = reference(RULE, V, request, max_seq_len=MAX_SEQ_LEN, stop_ids=MODEL_STOPS)
    stops = {*(() if s.ignore_eos else MODEL_STOPS), *s.stop_token_ids}
    text = ""
    for count, token in enumerate(tokens, 1):
        if token in stops:
            return tokens[:count], text, "stop"
        text += chr(97 + token)
        found = [at for stop in s.stop if (at := text.find(stop)) >= 0]
        if found:
            return tokens[:count], text[: min(found)], "stop"
    return tokens, text, "length"


@settings(max_examples=150, deadline=None)
@given(
    traffic=traffic,
    drafter=st.sampled_from(sorted(DRAFTERS)),
    draft_length=st.integers(1, 8),
    slots=st.integers(1, 3),
    max_rows=st.integers(9, 12),
    prefill_rows=st.none() | st.integers(1, 6),
    max_queue=st.integers(0, 4),
    branches=st.sampled_from([2, 3, 64]),
)
def test_every_text_is_the_one_it_would_be_alone(
    traffic, drafter, draft_length, slots, max_rows, prefill_rows, max_queue, branches
):
    made = DRAFTERS[drafter]()
    engine = ToyEngine(
        RULE, V, padded=2, max_batch=slots, max_seq_len=MAX_SEQ_LEN, max_rows=max_rows, branches=branches
    )
    loop = DecodeLoop(
        engine,
        made,
        draft_length=draft_length if made else 0,
        stop_token_ids=MODEL_STOPS,
        open_text=letters,
        prefill_rows=prefill_rows,
        max_queue=max_queue,
    )
    taken, cancelled, completions, deltas = {}, set(), {}, {}

    def step():
        result = loop.step()
        assert not result.failures
        for delta in result.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
        for completion in result.completions:
            assert completion.request_id not in completions
            completions[completion.request_id] = completion
        assert loop.active <= slots
        assert all(c not in cancelled or c in completions for c in taken)  # gone within one step

    for kind, value in traffic:
        if kind == "go on":  # the next turn of a conversation, or another request with the same beginning
            earlier, (prompt, sampling) = value
            if str(earlier) in taken:
                said = completions[str(earlier)].token_ids if str(earlier) in completions else ()
                prompt = (*taken[str(earlier)].prompt, *said, *prompt)[: MAX_SEQ_LEN - 1]
            kind, value = "submit", (prompt, sampling)
        if kind == "submit":
            request = GenerationRequest(str(len(taken)), *value)
            try:
                loop.submit(request)
                taken[request.request_id] = request
            except Refused:
                assert loop.waiting + loop.active >= max_queue + slots
        elif kind == "cancel" and str(value) in taken and str(value) not in completions:
            loop.cancel(str(value))
            cancelled.add(str(value))
        elif kind == "step":
            for _ in range(value):
                step()
    for _ in range(5000):
        if not loop.has_work:
            break
        step()

    assert set(completions) == set(taken)
    assert loop.active == loop.waiting == 0
    for name, request in taken.items():
        c, said = completions[name], deltas[name]
        tokens, text, reason = expected(request)
        assert "".join(d.text for d in said) == c.text
        assert sum((d.token_ids for d in said), ()) == c.token_ids
        assert [d.finish_reason for d in said[:-1]] == [None] * (len(said) - 1)
        assert said[-1].finish_reason == c.finish_reason
        if c.finish_reason == "cancelled":
            assert name in cancelled
            assert list(c.token_ids) == tokens[: len(c.token_ids)]
            assert text.startswith(c.text)
        else:
            assert (list(c.token_ids), c.text, c.finish_reason) == (tokens, text, reason)
            assert len(c.logprobs) == (len(tokens) if request.sampling.logprobs else 0)
        assert all(0 <= s.accepted <= s.drafted <= draft_length for s in c.steps)
        assert all(s.emitted in (s.accepted, s.accepted + 1) for s in c.steps)
    assert np.isfinite([c.ttft_s for c in completions.values() if c.token_ids]).all()
