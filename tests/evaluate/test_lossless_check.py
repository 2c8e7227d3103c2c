"""Near ties are allowed only where the engine may round differently, and only within its rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.evaluate.conftest import request
from trtspec.evaluate.lossless import check, compare, judge, ulp

LONG = [(3, 2, 3)]
OURS = replace(request(LONG), token_ids=(5, 9, 4))
PLAIN = replace(request(LONG, arm="baseline"), token_ids=(5, 9, 3))


def rows(best: float, second: float) -> np.ndarray:
    """Logits that predict 5, 9, 3 – and 4 with `second` at the last position."""
    logits = np.zeros((3, 12), np.float32)
    logits[0, 5] = logits[1, 9] = 20.0
    logits[2, 3], logits[2, 4] = best, second
    return logits


@pytest.mark.parametrize(
    ("value", "dtype", "step"),
    [
        (23.5, "bfloat16", 0.125),
        (16.0, "bfloat16", 0.125),
        (-15.9, "bfloat16", 0.0625),
        (1.0, "float16", 2**-10),
        (1.0, "float32", 2**-23),
    ],
)
def test_a_unit_in_the_last_place_depends_on_dtype_and_magnitude(
    value: float, dtype: str, step: float
) -> None:
    assert ulp(value, dtype) == step
    if dtype != "bfloat16":
        assert step == np.spacing(np.dtype(dtype).type(value))


def test_one_bfloat16_step_is_a_near_tie() -> None:
    found = compare(OURS, PLAIN, exact=False, dtype="bfloat16", logits=lambda: rows(23.625, 23.5))
    assert (found.verdict, found.position) == ("near tie", 2)
    assert (found.speculative_token, found.baseline_token) == (4, 3)
    assert (found.gap, found.ulps) == pytest.approx((0.125, 1.0))


def test_a_large_gap_is_a_mismatch() -> None:
    found = compare(OURS, PLAIN, exact=False, dtype="bfloat16", logits=lambda: rows(23.6, 20.0))
    assert found.verdict == "mismatch" and found.ulps == pytest.approx(28.8, abs=0.1)


def test_an_exact_engine_has_no_near_ties_and_is_not_asked_for_logits() -> None:
    def never() -> np.ndarray:
        raise AssertionError("scored an exact engine")

    assert compare(OURS, PLAIN, exact=True, dtype="bfloat16", logits=never).verdict == "mismatch"


def test_without_logits_a_difference_is_a_mismatch() -> None:
    assert compare(OURS, PLAIN, exact=False, dtype="bfloat16", logits=lambda: None).verdict == "mismatch"


def test_every_later_token_is_judged_too() -> None:
    # The first difference is a tie, but a later token of the speculative arm is far from the target's best.
    ours, plain = replace(OURS, token_ids=(5, 4, 7)), replace(PLAIN, token_ids=(5, 9, 3))
    logits = rows(20.0, 0.0)
    logits[1, 4] = 20.0
    assert compare(ours, plain, exact=False, dtype="bfloat16", logits=lambda: logits).verdict == "mismatch"


def test_ending_early_is_a_mismatch_whatever_the_logits() -> None:
    short = replace(OURS, token_ids=(5, 9))
    found = compare(short, PLAIN, exact=False, dtype="bfloat16", logits=lambda: rows(1, 1))
    assert (found.verdict, found.position, found.speculative_token) == ("mismatch", 2, None)
    stopped = replace(PLAIN, finish_reason="stop")
    assert compare(PLAIN, stopped, exact=True, dtype="float32", logits=lambda: None).verdict == "mismatch"
    assert compare(PLAIN, PLAIN, exact=True, dtype="float32", logits=lambda: None) is None


def test_judge_reports_the_worst_position() -> None:
    logits = np.array([[1.0, 1.0 - 2**-20], [4.0, 3.0]], np.float32)
    gap, ulps = judge(logits, [1, 1], "float32")
    assert gap == 1.0 and ulps == 2**21


def test_the_report_counts_each_request_once() -> None:
    ours = [replace(OURS, question_id=name) for name in ("a", "b", "c")]
    plain = [
        replace(PLAIN, question_id="a", token_ids=OURS.token_ids),
        replace(PLAIN, question_id="b"),
        replace(PLAIN, question_id="c"),
    ]
    logits = {"b": rows(23.625, 23.5), "c": rows(23.6, 20.0)}
    report = check(ours, plain, exact=False, dtype="bfloat16", score=lambda r: logits[r.question_id])
    assert (report.checked, report.near_ties, report.mismatches) == (3, 1, 1)
    assert [d.question_id for d in report.differences] == ["b", "c"]
    assert not report.passed


def test_prompts_that_were_rendered_differently_are_not_compared() -> None:
    report = check(
        [OURS],
        [replace(OURS, arm="baseline", prompt_tokens=11)],
        exact=True,
        dtype="float32",
        score=lambda r: None,
    )
    assert report.checked == 0 and "prompt" in report.not_checked and not report.passed
