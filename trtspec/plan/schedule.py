"""Draft length by batch size: a monotone schedule, and the form each TensorRT-LLM version takes it in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trtspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """entries: (largest batch, draft length), ascending batches, lengths never rising; 0 means plain decoding."""

    entries: tuple[tuple[int, int], ...]

    def at(self, batch: int) -> int:
        """The draft length at a batch size; beyond the last entry its length."""
        return next((length for largest, length in self.entries if batch <= largest), self.entries[-1][1])

    @property
    def longest(self) -> int:
        """The largest draft length of the schedule."""
        return max(length for _, length in self.entries)

    def as_json(self) -> dict[str, int]:
        """Batch size (upper bound of its range) → draft length."""
        return {str(batch): length for batch, length in self.entries}


def monotone(best: Mapping[int, int]) -> Schedule:
    """A schedule from the best D at some batch sizes: lengths never rise with the batch, equal neighbours merged."""
    entries: list[tuple[int, int]] = []
    ceiling: int | None = None
    for batch, length in sorted(best.items()):
        ceiling = length if ceiling is None else min(ceiling, length)
        if entries and entries[-1][1] == ceiling:
            entries[-1] = (batch, ceiling)
        else:
            entries.append((batch, ceiling))
    return Schedule(tuple(entries))


def checked_ranges(ranges: Sequence[Sequence[int]]) -> Schedule:
    """A schedule from [first batch, last batch, draft length]. Raises ConfigError for gaps, overlaps and rises."""
    expected = 1
    entries: list[tuple[int, int]] = []
    for entry in ranges:
        if len(entry) != 3:
            raise ConfigError(
                f"a schedule range is [first batch, last batch, draft length], got {list(entry)}"
            )
        first, last, length = entry
        if first < expected:
            raise ConfigError(
                f"schedule range {list(entry)} overlaps the one before it: expected to start at {expected}"
            )
        if first > expected:
            raise ConfigError(f"schedule leaves batch sizes {expected} to {first - 1} out")
        if last < first or length < 0:
            raise ConfigError(f"schedule range {list(entry)} is empty or negative")
        if entries and length > entries[-1][1]:
            raise ConfigError(
                f"draft length rises from {entries[-1][1]} to {length} with the batch size: it must not"
            )
        entries.append((last, length))
        expected = last + 1
    if not entries:
        raise ConfigError("a schedule needs at least one range")
    return Schedule(tuple(entries))


def tensorrt_llm_schedule(schedule: Schedule, version: str, *, guided: bool = False) -> dict[int, int] | None:
    """`draft_len_schedule` for a TensorRT-LLM version; None where that version has no such field.

    1.2: keys are lower bounds, key 1 is required and holds max_draft_len. 1.3 on: keys are upper bounds, the
    smallest maps to max_draft_len, no value exceeds it, and beyond the last key speculation is off.
    Length 0 crashes guided decoding at CUDA-graph capture (bitmask and logits batch sizes differ): with `guided`
    the floor is 1.
    """
    floor = 1 if guided else 0
    entries = [(batch, max(floor, length)) for batch, length in schedule.entries]
    generation = version_tuple(version)
    if generation < (1, 2):
        return None
    if generation < (1, 3):
        lower: dict[int, int] = {}
        first = 1
        for batch, length in entries:
            if not lower or lower[max(lower)] != length:
                lower[first] = length
            first = batch + 1
        return lower
    upper: dict[int, int] = {}
    for batch, length in entries:
        upper = {key: value for key, value in upper.items() if value != length}
        upper[batch] = length
    if not guided:
        while len(upper) > 1 and upper[max(upper)] == 0:
            del upper[max(upper)]  # 0 is what stands beyond the last key anyway
    return upper


def version_tuple(version: str) -> tuple[int, int]:
    """(major, minor) of `1.3.0rc27`. Raises ConfigError where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ConfigError(f"{version!r} is not a version", hint="for example 1.2.1")
    return int(found.group(1)), int(found.group(2))


@dataclass(frozen=True, slots=True)
class NGramAuto:
    """TensorRT-LLM's own choice for n-gram speculation at a largest batch size."""

    draft_length: int
    max_ngram: int
    mode: Literal["on", "off"]


def ngram_auto(max_batch_size: int) -> NGramAuto:
    """Up to 4 sequences: 5 drafts from 3-grams; up to 32: 3 drafts from 5-grams; above: off."""
    if max_batch_size <= 4:
        return NGramAuto(5, 3, "on")
    if max_batch_size <= 32:
        return NGramAuto(3, 5, "on")
    return NGramAuto(0, 0, "off")
