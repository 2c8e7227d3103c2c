"""Medusa's and Hydra's drafters on closed-form heads whose right candidates are known: every draft is accepted.

The toy engine's hidden state names the path that a row has seen. A head that reads it off knows what comes, so any
slip between states, tokens and positions shows as a draft that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.verify.toy import ToyEngine, hash_rule, run
from trtspec.drafters.base import Ask
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.hydra import HydraHeads
from trtspec.drafters.medusa import MedusaHeads
from trtspec.drafters.rank_tree import fixed_shape, searched_shape
from trtspec.drafters.token_heads import TokenHeadDrafter, TokenHeads
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop

WORDS, HEADS, RANKS = 40, 3, 5
RULE = hash_rule(WORDS, seed=8)
CHOICES = [[0, 0, 0], [1, 2], [0, 1], [3]]  # the right one is rank 1, then 2, or another


def requests(**sampling: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"r{i}",
            tuple((5 * i + k) % WORDS for k in range(1 + 4 * i)),
            SamplingParams(max_tokens=21, **sampling),
        )
        for i in range(6)
    ]


def engine() -> ToyEngine:
    return ToyEngine(RULE, WORDS, padded=3, max_batch=3, hidden=2, max_rows=9, branches=4)


def plain(**sampling: object) -> dict[str, tuple[int, ...]]:
    return {id: c.token_ids for id, c in run(DecodeLoop(engine()), requests(**sampling)).completions.items()}


class Oracle:
    """What truly follows each path of the plain texts. rights[d]: rank that the right candidate of depth d has."""

    def __init__(self, texts: Sequence[tuple[int, ...]], rights: Sequence[int]) -> None:
        self._rights = rights
        self._texts = texts
        self._paths = {}
        for text in texts:
            for end in range(1, len(text) + 1):
                path = text[:end]
                known = self._paths.setdefault(float(hash(path) % 65_521), path)
                assert known == path, "two paths share a state: take another seed"

    def path(self, hidden: np.ndarray) -> tuple[int, ...]:
        return self._paths[float(hidden[0])]

    def candidates(self, path: tuple[int, ...], depth: int) -> list[int]:
        """RANKS ids, with the token after `path` in its place if `path` is the truth."""
        following = {t[len(path)] for t in self._texts if t[: len(path)] == path and len(t) > len(path)}
        wrong = [token for token in range(WORDS) if token not in following]
        found = [wrong[(len(path) + r) % len(wrong)] for r in range(RANKS)]
        if following:
            found[self._rights[depth]] = min(following)
        return found


def medusa(oracle: Oracle) -> TokenHeads:
    def candidates(hidden: np.ndarray) -> np.ndarray:
        rows = []
        for state in hidden:
            path = oracle.path(state)
            text = next(t for t in oracle._texts if t[: len(path)] == path)
            # head i is for the token after the next i + 1
            rows.append([oracle.candidates(text[: len(path) + 1 + i], i) for i in range(HEADS)])
        return np.array(rows)

    return MedusaHeads(candidates)


def hydra(oracle: Oracle) -> TokenHeads:
    def head(index: int):
        def candidates(hidden: np.ndarray, path: np.ndarray) -> np.ndarray:
            assert path.shape == (len(hidden), index + 1)
            rows = [(*oracle.path(h), *p) for h, p in zip(hidden, path.tolist(), strict=True)]
            return np.array([oracle.candidates(row, index) for row in rows])

        return candidates

    return HydraHeads([head(i) for i in range(HEADS)])


@pytest.mark.parametrize("make", [medusa, hydra], ids=["medusa", "hydra"])
@pytest.mark.parametrize(
    ("rights", "depth"), [((0, 0, 0), 3), ((1, 2, 0), 2), ((0, 1, 4), 2), ((3, 0, 0), 1), ((2, 0, 0), 0)]
)
def test_the_right_candidate_is_accepted_wherever_the_tree_has_it(make, rights, depth: int) -> None:
    texts = plain()
    oracle = Oracle([(*r.prompt, *texts[r.request_id]) for r in requests()], rights)
    drafter = TokenHeadDrafter(spec_of("medusa"), make(oracle), fixed_shape(CHOICES, HEADS))
    outcome = run(DecodeLoop(engine(), drafter, draft_length=7), requests())
    assert not outcome.failures
    assert {id: c.token_ids for id, c in outcome.completions.items()} == texts
    steps = [step for c in outcome.completions.values() for step in c.steps[:-2]]  # the last have less room
    assert {step.accepted for step in steps} == {depth}


@pytest.mark.parametrize("make", [medusa, hydra], ids=["medusa", "hydra"])
def test_a_chain_takes_first_candidates_alone(make) -> None:
    texts = plain()
    oracle = Oracle([(*r.prompt, *texts[r.request_id]) for r in requests()], (0, 0, 0))
    shape = searched_shape([[0.5, 0.4], [0.5, 0.4], [0.5, 0.4]])
    drafter = TokenHeadDrafter(spec_of("hydra"), make(oracle), shape, tree=False)
    assert drafter.spec.shape == "chain"
    loop = DecodeLoop(ToyEngine(RULE, WORDS, hidden=2, branches=1), drafter, draft_length=3)
    outcome = run(loop, requests())
    assert {id: c.token_ids for id, c in outcome.completions.items()} == texts
    assert {s.accepted for c in outcome.completions.values() for s in c.steps[:-2]} == {3}


@pytest.mark.parametrize("make", [medusa, hydra], ids=["medusa", "hydra"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_drafts_change_no_text(make, sampling: dict[str, float]) -> None:
    texts = plain(**sampling)
    oracle = Oracle([(*r.prompt, *texts[r.request_id]) for r in requests()], (1, 1, 0))
    drafter = TokenHeadDrafter(spec_of("medusa"), make(oracle), searched_shape([[0.4, 0.3, 0.1]] * HEADS))
    outcome = run(DecodeLoop(engine(), drafter, draft_length=6), requests(**sampling))
    assert {id: c.token_ids for id, c in outcome.completions.items()} == texts


def test_nothing_is_drafted_before_a_state_is_known_and_asking_again_gives_the_same() -> None:
    heads = MedusaHeads(lambda hidden: np.tile(np.arange(RANKS), (len(hidden), HEADS, 1)))
    drafter = TokenHeadDrafter(spec_of("medusa"), heads, fixed_shape(CHOICES, HEADS))
    new, known = (drafter.open(requests()[i], seed=0) for i in range(2))
    drafter.observe(known, (4, 5), np.ones((2, 2), np.float32))
    asks = [Ask(new, 7, 3, 4), Ask(known, 7, 3, 4), Ask(known, 2, 1, 4)]
    empty, full, shallow = drafter.propose(asks, 3)
    assert len(empty.tree) == 0
    assert full.tree.depth == 3
    assert shallow.tree.tokens == (0, 1)
    assert drafter.propose(asks, 3) == [empty, full, shallow]
