"""Lookahead's window is run whether its n-grams are right or not: the plan pays for its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.config import load_config
from trtspec.plan.planner import plan_bare
from trtspec.plan.request import request_from
from trtspec.plan.step_time import RooflineStepTimes

CONFIGS = Path(__file__).resolve().parents[2] / "build_configs"


def plan(facts: ArchitectureFacts, rows: int):
    return plan_bare(
        facts,
        device="cpu",
        method="lookahead",
        draft_length=2,
        batch_sizes=(1,),
        context=512,
        probe_rows=rows,
    )


def test_every_row_of_the_window_is_in_the_step(tiny: ArchitectureFacts) -> None:
    made = plan(tiny, rows=5)
    times = RooflineStepTimes(made.deployment)
    points = {point.draft_length: point for point in made.batches[0].points}
    assert points[0].step.linear == times.step(1, 0, 512).linear
    assert points[2].step.linear == pytest.approx(times.step(1, 2 + 5, 512).linear)
    assert plan(tiny, rows=11).batches[0].at(2).speedup < points[2].speedup


def test_the_rows_are_those_of_the_configured_window() -> None:
    config = load_config(CONFIGS / "smollm2-lookahead.yaml", ["speculation.window_size=5"])
    assert request_from(config).probe_rows == 5 * 2 - 1
