"""Measured step times: monotone in rows, linear between points, honest outside them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.errors import ConfigError
from trtspec.plan.measured import measured_curve, read_measured
from trtspec.plan.step_table import StepSample, StepTable, isotonic, table_of


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_noise_never_makes_more_rows_faster(values: list[float]) -> None:
    fitted = isotonic(values)
    assert len(fitted) == len(values)
    assert all(a <= b + 1e-9 for a, b in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))


def test_between_and_beyond_measured_rows() -> None:
    table = table_of([(1, 10.0), (3, 14.0), (5, 20.0)], "probe")
    assert [table.ms(1, rows, 0) for rows in (1, 2, 3, 4, 5, 7)] == [10, 12, 14, 17, 20, 26]


def test_contexts_interpolate_and_larger_batches_count_as_rows() -> None:
    samples = [
        StepSample(1, rows, context, rows * scale)
        for rows in (1, 8)
        for context, scale in ((100, 1.0), (200, 2.0))
    ]
    table = StepTable(tuple(samples), "probe")
    assert table.ms(1, 4, 150) == pytest.approx(6.0)
    assert table.ms(1, 4, 50) == pytest.approx(4.0)
    assert table.ms(2, 4, 100) == pytest.approx(8.0)  # two sequences of four rows are eight rows
    two = StepTable((*samples, StepSample(4, 1, 100, 2.0), StepSample(4, 8, 100, 40.0)), "probe")
    assert two.ms(4, 8, 100) == 40.0
    assert 8.0 < two.ms(2, 8, 100) < 40.0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    table = StepTable((StepSample(1, 1, 64, 5.0), StepSample(1, 4, 64, 7.0)), "probe of x", 4.5)
    (tmp_path / "probe.json").write_text(json.dumps({"mem_bw_bytes_per_s": 1e10} | table.as_json()))
    assert read_measured(tmp_path).steps == table


@pytest.mark.parametrize(
    "content",
    [
        {"steps": []},
        {"steps": [[1, 1]]},
        {"steps": [[1, 1, 1, 0]]},
        {"steps": "x"},
        {},
        {"conditional_accept_rates": [2]},
    ],
)
def test_files_that_are_no_measurement_are_refused(tmp_path: Path, content: dict[str, object]) -> None:
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        read_measured(file)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json"):
        read_measured(tmp_path)


def test_a_speculation_profile(tmp_path: Path) -> None:
    file = tmp_path / "speculation_profile.json"
    file.write_text(json.dumps({"method": "dflash", "conditional_accept_rates": [0.816, 0.777, 0.750]}))
    measured = read_measured(tmp_path)
    assert measured.method == "dflash"
    assert measured.curve is not None
    assert measured.curve.acceptance_length(3) == pytest.approx(2.926, abs=5e-4)


def _request(arm: str, steps: list[tuple[int, int]], step_s: dict[int, float]) -> dict[str, object]:
    records, at = [], 0.5
    for drafted, accepted in steps:
        at += step_s[drafted]
        records.append({"drafted": drafted, "accepted": accepted, "emitted": accepted + 1, "at_s": at})
    tokens = list(range(sum(a + 1 for _, a in steps) + 1))
    return {"arm": arm, "steps": records, "prompt_tokens": 100, "token_ids": tokens}


def test_a_run_gives_acceptance_and_step_times(tmp_path: Path) -> None:
    drafting = [(0, 0), (3, 3), (3, 1), (3, 0)] * 10
    run = {
        "name": "smoke",
        "speculative": {"method": "ngram", "draft_length": 3},
        "settings": {"concurrency": 1, "temperature": 0.0},
        "requests": [
            _request("speculative", drafting, {0: 0.010, 3: 0.016}),
            _request("baseline", [(0, 0)] * 30, {0: 0.008}),
        ],
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    measured = read_measured(tmp_path)
    assert measured.includes_drafting
    assert measured.curve is not None
    assert measured.curve.acceptance_length(3) == pytest.approx(2.0)
    assert dict(measured.curve.draft_lengths(3)) == pytest.approx({0: 0.25, 3: 0.75})
    assert measured.steps is not None
    assert measured.steps.plain_ms == pytest.approx(8.0)
    assert measured.steps.ms(1, 1, 100) == pytest.approx(10.0)
    assert measured.steps.ms(1, 4, 100) == pytest.approx(16.0)


def test_rates_of_a_model_drafter_count_steps_that_drafted_that_far() -> None:
    """Near the context limit drafts are cut short: that is no rejection."""
    steps = [(4, 4)] * 6 + [(4, 1)] * 2 + [(1, 1)] * 8
    curve = measured_curve(steps, draft_length=4, retrieval=False, source="run")
    assert curve is not None
    assert curve.conditional == pytest.approx((1.0, 0.75, 1.0, 1.0))
    lookup = measured_curve(steps + [(0, 0)] * 16, draft_length=4, retrieval=True, source="run")
    assert lookup is not None
    assert lookup.conditional[0] == pytest.approx(0.5)
    assert measured_curve([(0, 0)] * 5, draft_length=4, retrieval=True, source="run") is None
