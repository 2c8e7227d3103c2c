"""QuantSpec's drafter on closed-form engines: it lives on the target's rows, and nothing it does shows in the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.drafters.test_draft_model import DraftEngine, request
from tests.verify.test_lossless import DRAFTER as DRAFT_RULE
from tests.verify.test_lossless import LENGTH, TARGET, V, pvalue
from tests.verify.toy import Rule, ToyEngine, hash_rule, reference, run
from trtspec.drafters.quantspec import QuantSpecDrafter
from trtspec.engines.base import SlotLogits, SlotStep
from trtspec.values import GenerationRequest
from trtspec.verify.loop import DecodeLoop

WORDS = 12


class SharedDraft(DraftEngine):
    """A draft over the rows of `target`: what either writes the other finds."""

    def __init__(self, target: ToyEngine, rule: Rule, vocab: int) -> None:
        super().__init__(rule, vocab, max_batch=target.spec.max_batch, max_rows=target.spec.max_rows)
        self._kv = target._kv


def decode(
    target: Rule, draft: Rule, requests: Sequence[GenerationRequest], *, vocab: int = WORDS, **options: object
):
    engine = ToyEngine(target, vocab, max_batch=3, max_rows=9)
    drafted = SharedDraft(engine, draft, vocab)
    drafter = QuantSpecDrafter(drafted, **options)
    outcome = run(DecodeLoop(engine, drafter, draft_length=4, max_queue=len(requests)), requests)
    assert not outcome.failures
    return outcome.completions, drafted


def texts(count: int) -> list[GenerationRequest]:
    """More than there are slots, of many lengths, some of which share a beginning."""
    words = np.random.default_rng(0).integers(0, WORDS, 40)
    return [request(str(n), words[: 3 + 4 * n], max_tokens=12 + n) for n in range(count)]


@pytest.mark.parametrize("draft_seed", [0, 1])
def test_greedy_output_is_the_plain_one_in_any_company(draft_seed: int) -> None:
    """Whatever it reads is judged rightly; that it reads the right rows shows in what it proposes (next test)."""
    target, draft = hash_rule(WORDS, order=2), hash_rule(WORDS, order=2, seed=draft_seed)
    completions, _ = decode(target, draft, texts(7))
    for r in texts(7):
        assert list(completions[r.request_id].token_ids) == reference(target, WORDS, r, max_seq_len=64)


def test_a_draft_of_the_target_s_own_rule_is_always_right() -> None:
    """The rule is of the whole path: a single row of another slot, position or history would change the proposal."""
    rule = hash_rule(WORDS, seed=4)
    completions, _ = decode(rule, rule, texts(7))
    steps = [step for completion in completions.values() for step in completion.steps]
    assert sum(step.drafted for step in steps) > 40
    assert all(step.accepted == step.drafted for step in steps)


def test_the_draft_reads_no_prompt_and_runs_one_row_at_a_time() -> None:
    (asked,) = [request(prompt=range(9), max_tokens=20)]
    _, draft = decode(hash_rule(WORDS, seed=1), hash_rule(WORDS, seed=2), [asked])
    assert draft.fed
    assert all(start >= 9 and len(tokens) == 1 for _, start, tokens in draft.fed)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0}, {"temperature": 0.0}, {"min_probability": 0.4}]
)
def test_sampled_output_has_the_targets_distribution(options: dict[str, float]) -> None:
    requests = [request(str(s), (0,), temperature=1.0, seed=s, max_tokens=5) for s in range(2000)]
    completions, _ = decode(TARGET, DRAFT_RULE, requests, vocab=V, **options)
    steps = [step for c in completions.values() for step in c.steps]
    assert sum(step.accepted for step in steps) > len(requests) / 8
    assert sum(step.drafted - step.accepted for step in steps) > len(requests) / 8
    assert pvalue([c.token_ids[:LENGTH] for c in completions.values()]) > 0.01


class Misreading(SharedDraft):
    """Reads one position too few: what the tests above must be able to tell."""

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        return super().forward([SlotStep(step.slot, step.start - 1, step.tokens) for step in steps])


def test_the_tests_tell_a_draft_that_reads_the_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SharedDraft", Misreading)
    with pytest.raises(AssertionError):
        test_a_draft_of_the_target_s_own_rule_is_always_right()
