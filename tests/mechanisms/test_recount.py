"""Acceptance of every mechanism, recounted by hand: what it proposed, held against the text that came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.evaluate.conftest import request
from tests.mechanisms.conftest import BuildOf, tiny_requests
from tests.mechanisms.table import CASES, Form, Reshaped, complete, with_branches
from trtspec.drafters.base import Ask, Draft, Drafter
from trtspec.drafters.factory import open_drafter
from trtspec.engines.opening import open_engine
from trtspec.evaluate import metrics
from trtspec.values import GenerationRequest
from trtspec.verify.tree import ROOT, TokenTree

pytestmark = pytest.mark.model


@dataclass(slots=True)
class Writing:
    """One sequence: whose, how many tokens of its answer are known, and what the drafter keeps for it."""

    name: str
    written: int
    state: Any


class Overheard:
    """A drafter that keeps its last proposal for each (request, tokens written so far)."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.spec = drafter.spec
        self.proposals: dict[tuple[str, int], TokenTree] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._drafter, name)
        if name in ("release", "learn"):
            return lambda writing, *rest: found(writing.state, *rest)
        return found

    def open(self, asked: GenerationRequest, seed: int) -> Writing:
        return Writing(asked.request_id, 1 - len(asked.prompt), self._drafter.open(asked, seed))

    def observe(self, writing: Writing, tokens: Sequence[int], hidden: Any) -> None:
        writing.written += len(tokens)
        self._drafter.observe(writing.state, tokens, hidden)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        drafts = self._drafter.propose([replace(ask, state=ask.state.state) for ask in asks], rows)
        for ask, draft in zip(asks, drafts, strict=True):
            self.proposals[ask.state.name, ask.state.written] = draft.tree
        return drafts


def longest_agreement(tree: TokenTree, text: Sequence[int]) -> int:
    """How many tokens of `text` some path of the tree spells, from its first one on."""
    reached = {ROOT: 0}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        depth = reached.get(parent)
        if depth is not None and depth < len(text) and text[depth] == token:
            reached[node] = depth + 1
    return max(reached.values())


@pytest.mark.parametrize(("method", "form"), CASES)
def test_acceptance_is_what_a_recount_of_proposals_and_text_gives(
    tiny_build: BuildOf, tmp_path: Path, method: str, form: Form
) -> None:
    engine = tiny_build(method) / "engine"
    runner = open_engine(with_branches(engine, tmp_path) if form == "tree" else engine)
    speculation = runner.info.speculation
    opened = open_drafter(speculation, engine=engine, slots=runner.spec.max_batch, target=runner)
    drafter = Overheard(Reshaped(opened, form, runner.spec.tokenizer_vocab_size))
    try:
        done = complete(runner, drafter, speculation["draft_length"], tiny_requests(6))
    finally:
        drafter.close()
        runner.close()
    counted, records = [], []
    for completion in done:
        text, at = completion.token_ids, 1
        while at < len(text):
            tree = drafter.proposals.get((completion.request_id, at), TokenTree((), ()))
            accepted = longest_agreement(tree, text[at:])
            emitted = min(accepted + 1, len(text) - at)
            counted.append((len(tree), accepted, emitted))
            at += emitted
        steps = [(step.drafted, step.accepted, step.emitted) for step in completion.steps]
        records.append(request(steps, question_id=completion.request_id))
    accepted = Counter(a for _, a, _ in counted)
    assert sum(a for _, a, _ in counted) > 50, "hardly anything was accepted, and little is checked"
    assert metrics.acceptance_histogram(records) == [accepted[n] for n in range(max(accepted) + 1)]
    assert metrics.draft_acceptance_rate(records) == pytest.approx(
        sum(a for _, a, _ in counted) / sum(d for d, _, _ in counted)
    )
    emitted = sum(e for _, _, e in counted)
    assert metrics.acceptance_length_token_weighted(records) == pytest.approx(emitted / len(counted))
    assert emitted == sum(len(completion.token_ids) - 1 for completion in done)
    found = [(s.drafted, s.accepted, s.emitted) for completion in done for s in completion.steps]
    assert found == counted, "step by step"
    if form == "chain":
        rates = metrics.conditional_acceptance(records)
        for i, rate in enumerate(rates, start=1):
            judged = [a >= i for d, a, e in counted if d >= i and a >= i - 1 and (a >= i or e > a)]
            assert rate == (pytest.approx(sum(judged) / len(judged)) if judged else None)
