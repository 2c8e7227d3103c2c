"""What several drafts cost: all passes one after the other, all memory, and a tree as deep as each one's share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.bare_configs import SMOLLM2
from trtspec.checkpoints.facts import facts_from
from trtspec.plan import make_plan

RATES = (0.6, 0.5, 0.4)


def draft(layers: int):
    return facts_from(SMOLLM2 | {"num_hidden_layers": layers}, f"draft-{layers}/config.json")


def plan_of(make_config, tiny, layers: tuple[int, ...], draft_length: int = 6):
    entries = tuple(SimpleNamespace(quantization="none") for _ in layers)
    speculation = {"method": "specinfer", "draft_length": draft_length, "drafts": entries}
    config = make_config(speculation=speculation, workload={"acceptance": RATES})
    first, *others = (draft(n) for n in layers)
    return make_plan(config, tiny, draft=first, others=others)


def test_drafting_takes_every_drafts_passes(make_config, tiny) -> None:
    deep, flat = plan_of(make_config, tiny, (8,)), plan_of(make_config, tiny, (2,))
    both = plan_of(make_config, tiny, (8, 2))
    for length in (2, 4, 6):
        assert both.draft_ms[length] == pytest.approx(deep.draft_ms[length // 2] + flat.draft_ms[length // 2])
    assert both.draft_ms[3] == pytest.approx(deep.draft_ms[2] + flat.draft_ms[1]), (
        "the first has the one left over"
    )


def test_memory_holds_all_drafts(make_config, tiny) -> None:
    one, two, both = (plan_of(make_config, tiny, layers).drafter for layers in ((8,), (2,), (8, 2)))
    assert both.memory_bytes == one.memory_bytes + two.memory_bytes
    assert both.kv_bytes_per_token == one.kv_bytes_per_token + two.kv_bytes_per_token


def test_acceptance_is_by_depth_and_not_by_nodes(make_config, tiny) -> None:
    """Six nodes of two drafts are three deep: what was declared for three positions is all that is used."""
    both = plan_of(make_config, tiny, (8, 2))
    assert both.chosen.acceptance_length == pytest.approx(1 + 0.6 + 0.6 * 0.5 + 0.6 * 0.5 * 0.4)
    assert not both.chosen.extrapolated
    alone = plan_of(make_config, tiny, (8,), draft_length=3)
    assert alone.chosen.acceptance_length == pytest.approx(both.chosen.acceptance_length)
