"""A measured table of step times, interpolated so that more rows never take less time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measurement: median milliseconds of a step of `rows` rows for each of `batch` sequences at `context`."""

    batch: int
    rows: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True)
class StepTable:
    """Measured steps. plain_ms: the fastest plain step (one row) where it was measured apart, else None."""

    samples: tuple[StepSample, ...]
    source: str
    plain_ms: float | None = None

    def ms(self, batch: int, rows: int, context: int) -> float:
        """Milliseconds at a point: monotone in rows, linear between measured rows, contexts and batches.

        Outside the measured range the nearest slope continues for rows; contexts and batches below or above take
        the edge, except that an unmeasured larger batch counts as more rows of the largest measured one.
        """
        batches = sorted({s.batch for s in self.samples})
        low, high, weight = _between(batches, batch)
        if batch > batches[-1]:
            scaled = -(-rows * batch // batches[-1])
            return self._at_batch(batches[-1], scaled, context)
        at_low = self._at_batch(low, rows, context)
        return at_low if low == high else at_low + weight * (self._at_batch(high, rows, context) - at_low)

    def _at_batch(self, batch: int, rows: int, context: int) -> float:
        contexts = sorted({s.context for s in self.samples if s.batch == batch})
        low, high, weight = _between(contexts, context)
        at_low = self._at_context(batch, low, rows)
        return at_low if low == high else at_low + weight * (self._at_context(batch, high, rows) - at_low)

    def _at_context(self, batch: int, context: int, rows: int) -> float:
        points = sorted((s.rows, s.ms) for s in self.samples if s.batch == batch and s.context == context)
        xs = [row for row, _ in points]
        ys = isotonic([ms for _, ms in points])
        if len(xs) == 1:
            return ys[0]
        right = min(max(bisect_left(xs, rows), 1), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        if rows < xs[0]:
            return ys[0]
        return ys[right - 1] + slope * (rows - xs[right - 1])

    def as_json(self) -> dict[str, Any]:
        """The form `from_json` reads."""
        return {
            "source": self.source,
            "plain_ms": self.plain_ms,
            "steps": [[s.batch, s.rows, s.context, s.ms] for s in self.samples],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any], where: str) -> StepTable:
        """Read `{source, plain_ms, steps: [[batch, rows, context, ms], …]}`. Raises ConfigError."""
        try:
            samples = tuple(StepSample(int(b), int(r), int(c), float(ms)) for b, r, c, ms in value["steps"])
            plain = value.get("plain_ms")
            table = StepTable(
                samples, str(value.get("source") or where), None if plain is None else float(plain)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a step-time table: {error}", where=where) from None
        if not samples or any(s.ms <= 0 or s.rows < 1 or s.batch < 1 for s in samples):
            raise ConfigError(
                "a step-time table needs at least one step with positive rows and time", where=where
            )
        return table


def table_of(
    rows: Iterable[tuple[int, float]], source: str, *, batch: int = 1, context: int = 0
) -> StepTable:
    """A table of one batch and context from (rows, ms) pairs."""
    return StepTable(tuple(StepSample(batch, row, context, ms) for row, ms in rows), source)


def isotonic(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence (pool adjacent violators): measurement noise never makes more rows faster."""
    blocks: list[list[float]] = []  # [mean, count]
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    return [mean for mean, count in blocks for _ in range(int(count))]


def _between(points: Sequence[int], value: int) -> tuple[int, int, float]:
    """The measured neighbours of `value` and its weight towards the upper one; an edge outside the range."""
    if value <= points[0]:
        return points[0], points[0], 0.0
    if value >= points[-1]:
        return points[-1], points[-1], 0.0
    right = bisect_left(points, value)
    low, high = points[right - 1], points[right]
    return low, high, (value - low) / (high - low)
