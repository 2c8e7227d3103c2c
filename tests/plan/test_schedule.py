"""Draft length by batch size, and TensorRT-LLM's two opposite forms of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.errors import ConfigError
from trtspec.plan.schedule import Schedule, checked_ranges, monotone, ngram_auto, tensorrt_llm_schedule

SCHEDULE = Schedule(((4, 4), (8, 2), (32, 1), (64, 0)))


def test_lengths_never_rise_with_the_batch() -> None:
    assert monotone({1: 3, 2: 5, 4: 2, 8: 2, 16: 0, 32: 1}).entries == ((2, 3), (8, 2), (32, 0))


@given(st.dictionaries(st.integers(1, 512), st.integers(0, 20), min_size=1))
def test_a_schedule_covers_every_batch_and_never_exceeds_the_best(best: dict[int, int]) -> None:
    schedule = monotone(best)
    lengths = [schedule.at(batch) for batch in sorted(best)]
    assert lengths == sorted(lengths, reverse=True)
    assert all(schedule.at(batch) <= length for batch, length in best.items())
    assert schedule.longest == best[min(best)]


def test_lower_bounds_up_to_1_2_and_upper_bounds_from_1_3() -> None:
    """The same schedule: keys are the first batch of a range in 1.2, the last one from 1.3 on."""
    assert tensorrt_llm_schedule(SCHEDULE, "1.2.1") == {1: 4, 5: 2, 9: 1, 33: 0}
    for version in ("1.3.0rc27", "1.4.0rc1"):
        assert tensorrt_llm_schedule(SCHEDULE, version) == {
            4: 4,
            8: 2,
            32: 1,
        }  # beyond the last key it is off anyway
    assert tensorrt_llm_schedule(SCHEDULE, "1.1.0") is None


@given(
    st.dictionaries(st.integers(1, 512), st.integers(0, 20), min_size=1),
    st.sampled_from(["1.2.1", "1.3.0"]),
    st.booleans(),
)
def test_each_version_reads_back_what_was_meant(best: dict[int, int], version: str, guided: bool) -> None:
    schedule = monotone(best)
    written = tensorrt_llm_schedule(schedule, version, guided=guided)
    assert written
    largest = max(best)

    def read(batch: int) -> int:
        if version == "1.2.1":
            return written[max(key for key in written if key <= batch)]
        return next((written[key] for key in sorted(written) if batch <= key), 0)

    for batch in {*best, 1, largest}:
        assert read(batch) == max(schedule.at(batch), 1 if guided else 0)
    assert written[min(written)] == max(
        written.values()
    )  # the field's own rule: the smallest key holds max_draft_len
    assert not guided or min(written.values()) >= 1
    if version == "1.2.1":
        assert 1 in written


def test_zero_is_kept_from_guided_decoding() -> None:
    """Length 0 in a schedule crashes CUDA-graph capture with a grammar: the floor is 1."""
    assert tensorrt_llm_schedule(SCHEDULE, "1.3.0", guided=True) == {4: 4, 8: 2, 64: 1}
    assert 0 not in tensorrt_llm_schedule(SCHEDULE, "1.2.1", guided=True).values()


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([[1, 4, 2], [4, 8, 1]], "overlaps"),
        ([[1, 4, 2], [6, 8, 1]], "batch sizes 5 to 5 out"),
        ([[2, 4, 2]], "batch sizes 1 to 1 out"),
        ([[1, 4, 2], [5, 8, 3]], "rises"),
        ([[1, 4]], "first batch, last batch"),
        ([[1, 0, 2]], "empty"),
        ([], "at least one"),
    ],
)
def test_ranges_with_gaps_overlaps_and_rises_are_refused(ranges: list[list[int]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked_ranges(ranges)


def test_good_ranges() -> None:
    assert checked_ranges([[1, 4, 2], [5, 512, 0]]).entries == ((4, 2), (512, 0))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(4, (5, 3, "on")), (5, (3, 5, "on")), (32, (3, 5, "on")), (33, (0, 0, "off")), (64, (0, 0, "off"))],
)
def test_tensorrt_llms_own_ngram_rule(batch: int, expected: tuple[int, int, str]) -> None:
    auto = ngram_auto(batch)
    assert (auto.draft_length, auto.max_ngram, auto.mode) == expected
