"""Heads that draft many positions at once: what they cost does not grow with a tree's nodes, nor past their heads."""

from __future__ import annotations

import pytest

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.plan.planner import plan_bare


def plan(facts: ArchitectureFacts, method: str, draft_length: int, **request: object):
    return plan_bare(
        facts,
        device="cpu",
        method=method,
        draft_length=draft_length,
        batch_sizes=(1,),
        context=512,
        **request,
    )


def draft_s(made, draft_length: int) -> float:
    points = {point.draft_length: point for point in made.batches[0].points}
    return points[draft_length].step.draft


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_a_tree_may_have_more_nodes_than_there_are_heads(tiny: ArchitectureFacts, method: str) -> None:
    made = plan(tiny, method, 12)
    assert made.draft_length == 12
    assert draft_s(made, 1) < draft_s(made, 5) == draft_s(made, 12), "five heads are assumed"


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_eight_bit_heads_read_a_quarter(tiny: ArchitectureFacts, method: str) -> None:
    wide = plan(tiny, method, 3)
    narrow = plan(tiny, method, 3, draft_quantization="int8_weight_only")
    assert draft_s(narrow, 3) < draft_s(wide, 3)
