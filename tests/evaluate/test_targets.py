"""Streams are put together again without losing or inventing a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trtspec.engines.base import EngineSpec, SlotLogits
from trtspec.evaluate.record import TargetFacts
from trtspec.evaluate.targets import InProcess, Message, assemble, engine_facts, teacher_forced_logits
from trtspec.serve.client import Chunk, Usage
from trtspec.values import Completion, SamplingParams


def chunk(
    at: float,
    tokens: tuple[int, ...],
    steps: tuple[tuple[int, int], ...] = (),
    text: str = "",
    **last: object,
) -> Chunk:
    return Chunk(text, tokens, steps, bool(last), at, **last)


def end(at: float, tokens: int, steps: int) -> Chunk:
    usage = Usage(7, tokens, steps, 9, 5, None)
    return chunk(at, (), finish_reason="length", stop_reason=None, usage=usage)


def test_one_chunk_a_step() -> None:
    stream = [
        chunk(10.5, (1,), text="a"),
        chunk(10.6, (2, 3, 4), ((3, 2),), "bcd"),
        chunk(10.7, (5,), ((3, 0),), "e"),
        chunk(10.8, (6, 7, 8, 9), ((3, 3),), "fghi"),
        end(10.9, 9, 3),
    ]
    done = assemble("r", stream, 10.0, seed=4)
    assert done.token_ids == (1, 2, 3, 4, 5, 6, 7, 8, 9) and done.text == "abcdefghi"
    assert [(s.drafted, s.accepted, s.emitted) for s in done.steps] == [(3, 2, 3), (3, 0, 1), (3, 3, 4)]
    assert [s.at_s for s in done.steps] == pytest.approx([0.6, 0.7, 0.8])
    assert (done.ttft_s, done.total_s) == pytest.approx((0.5, 0.9))
    assert done.acceptance_length == pytest.approx(8 / 3) and done.prompt_tokens == 7 and done.seed == 4


def test_chunks_that_the_transport_merged_keep_their_steps() -> None:
    # Prefill token and two steps in one chunk; then a stop inside an accepted draft, so no bonus token.
    stream = [chunk(1.0, (1, 2, 3, 4, 5), ((3, 2), (3, 0))), chunk(2.0, (6, 2), ((3, 2),)), end(2.0, 7, 3)]
    done = assemble("r", stream, 0.0, seed=0)
    assert [(s.accepted, s.emitted) for s in done.steps] == [(2, 3), (0, 1), (2, 2)]


def test_a_stream_that_contradicts_its_totals_is_refused() -> None:
    with pytest.raises(ValueError, match="without its totals"):
        assemble("r", [chunk(1.0, (1,))], 0.0, seed=0)
    with pytest.raises(ValueError, match="the server counted 3 in 0"):
        assemble("r", [chunk(1.0, (1,)), end(2.0, 3, 0)], 0.0, seed=0)


def test_the_conversation_is_rendered_once_and_its_ids_are_kept() -> None:
    asked = []

    def generate(request):
        asked.append(request)
        return Completion("r", 3, (1,), "x", "length", None, (), 0.1, 0.1, 0)

    tokenizer = SimpleNamespace(
        chat=lambda messages, thinking=True: [len(m["content"]) for m in messages] + [9] * (not thinking)
    )
    runtime = SimpleNamespace(tokenizer=tokenizer, generate=generate, close=lambda: asked.append("closed"))
    target = InProcess(runtime, TargetFacts("in process", "m", "none", 0))
    sampling = SamplingParams(max_tokens=3)
    answer = target.chat("r1", [Message("system", "ab"), Message("user", "abc")], sampling)
    assert answer.prompt == asked[0].prompt == (2, 3) and asked[0].sampling is sampling
    assert target.score((1,), (2,)) is None
    calm = InProcess(runtime, target.facts, template_args={"thinking": False})
    assert calm.chat("r2", [Message("user", "abc")], sampling).prompt == asked[1].prompt == (3, 9)
    target.close()
    assert asked[-1] == "closed"


def test_engine_facts_say_what_may_be_expected_to_be_equal() -> None:
    spec = EngineSpec(vocab_size=12, tokenizer_vocab_size=10, max_batch=1, max_seq_len=64, max_rows=8)
    info = SimpleNamespace(
        backend="onnxruntime",
        model="model",
        spec=spec,
        weights="int8",
        speculation={"method": "ngram", "draft_length": 6},
    )
    facts = engine_facts(info, Path("engine"))
    assert (facts.method, facts.draft_length, facts.exact, facts.seed_identical) == ("ngram", 6, True, True)
    plain = engine_facts(info, Path("engine"), speculate=False)
    assert (plain.method, plain.draft_length, plain.tree_depth) == ("none", 0, None)
    assert engine_facts(info, Path("engine"), draft_length=3).draft_length == 3


class CountingEngine:
    """Logits whose largest entry is (last token + 1); padding ids beyond 10 are larger still."""

    spec = EngineSpec(vocab_size=12, tokenizer_vocab_size=10, max_batch=1, max_seq_len=64, max_rows=4)

    def __init__(self) -> None:
        self.length = 0

    def forward(self, steps):
        (step,) = steps
        assert step.start == self.length and len(step.tokens) <= self.spec.max_rows
        self.length += len(step.tokens)
        logits = np.full((len(step.tokens), 12), -1.0, np.float32)
        logits[np.arange(len(step.tokens)), (step.tokens + 1) % 10] = 1.0
        logits[:, 10:] = 9.0
        return [SlotLogits(logits[step.logits_from :])]


@pytest.mark.parametrize("prompt", [(3,), (1, 2, 3), (9, 9, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7, 8)])
def test_teacher_forcing_gives_the_row_that_predicts_each_token(prompt: tuple[int, ...]) -> None:
    continuation = tuple((prompt[-1] + 1 + i) % 10 for i in range(6))
    logits = teacher_forced_logits(CountingEngine(), prompt, continuation)
    assert logits.shape == (6, 10)
    assert tuple(logits.argmax(axis=1)) == continuation
