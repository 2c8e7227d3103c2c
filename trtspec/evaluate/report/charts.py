"""Charts as inline SVG text: no library, no network, legible at phone width and in print.

Colours come from the page's CSS (classes s0, s1, …), so that light, dark and print each bring their own. Every
chart carries a title and a description for screen readers; the page puts the same numbers in a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 440
_HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 20, 40
_ROW = 22
_LABELS_AT_MOST = 16
_BESIDE = 20  # characters of a label that fit beside bars

Spell = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One set of values, None where nothing was measured."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: points in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, about that many, that span low … high: the first is ≤ low and the last ≥ high."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def bars(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    spell: Spell,
    x_title: str,
    top: float | None = None,
) -> str:
    """Grouped vertical bars from 0. top: end of the axis, None fits the largest value."""
    marks = ticks(0.0, top if top is not None else _largest(series) or 1.0)
    x_at = _scale(0, len(labels), _LEFT, _WIDTH - _RIGHT)
    y_at = _scale(0, marks[-1], _HEIGHT - _BOTTOM, _TOP)
    body = [_horizontal(y_at(mark), spell(mark)) for mark in marks]
    group = x_at(1) - x_at(0)
    width = min(0.78 * group / len(series), 46)
    numbered = len(labels) * len(series) <= _LABELS_AT_MOST
    every = math.ceil(len(labels) / _LABELS_AT_MOST)
    for i, label in enumerate(labels):
        middle = x_at(i + 0.5)
        if i % every == 0:
            body.append(_text(middle, _HEIGHT - _BOTTOM + 16, label, "middle"))
        for k, one in enumerate(series):
            value = one.values[i]
            if value is None:
                continue
            left, y = middle + (k - len(series) / 2) * width, y_at(value)
            body.append(_bar(left + 1, y, width - 2, y_at(0) - y, k, f"{one.name}, {label}: {spell(value)}"))
            if numbered:
                body.append(_text(left + width / 2, y - 4, spell(value), "middle", "value"))
    body.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_title, "middle", "axis"))
    return _svg(title, _describe(labels, series, spell), _HEIGHT, body)


def rows(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    spell: Spell,
    x_title: str,
    origin: float = 0.0,
) -> str:
    """Grouped horizontal bars, one group a label, that start at `origin`; lower values go to the left of it.

    Labels stand beside their bars, above them where one is long.
    """
    found = [value for one in series for value in one.values if value is not None]
    marks = ticks(min([origin, *found]), max([origin, *found], default=origin + 1) or 1.0, about=4)
    longest = max(map(len, labels), default=0)
    above = longest > _BESIDE
    left = _RIGHT if above else 14 + 6.6 * longest
    bar = 14.0
    line = 16.0 if above else 0.0
    group = max(_ROW, bar * len(series) + 6) + line
    height = _TOP / 2 + group * len(labels) + _BOTTOM
    x_at = _scale(marks[0], marks[-1], left, _WIDTH - 44)
    bottom = height - _BOTTOM
    body = [_vertical(x_at(mark), _TOP / 2, bottom, _plain(mark)) for mark in marks]
    body.append(
        f'<line class="origin" x1="{x_at(origin):.1f}" x2="{x_at(origin):.1f}" y1="6" y2="{bottom:.1f}"/>'
    )
    for i, label in enumerate(labels):
        middle = _TOP / 2 + group * (i + 0.5) + line / 2
        if above:
            body.append(_text(left + 4, _TOP / 2 + group * i + 14, label, "start"))
        else:
            body.append(_text(left - 8, middle + 4, label, "end"))
        for k, one in enumerate(series):
            value = one.values[i]
            if value is None:
                continue
            y, ends = middle + (k - len(series) / 2) * bar, sorted((x_at(origin), x_at(value)))
            body.append(
                _bar(ends[0], y + 0.5, ends[1] - ends[0], bar - 1, k, f"{one.name}, {label}: {spell(value)}")
            )
            body.append(
                _text(max(ends[1], x_at(origin)) + 5, y + bar / 2 + 4, spell(value), "start", "value")
            )
    body.append(_text((left + _WIDTH) / 2, height - 6, x_title, "middle", "axis"))
    return _svg(title, _describe(labels, series, spell), height, body)


def curves(
    title: str,
    lines: Sequence[Curve],
    *,
    x_title: str,
    description: str,
    top: float = 1.0,
    spell: Spell = "{:.0%}".format,
) -> str:
    """Lines over a common x axis from 0. y goes from 0 to `top` at least, by default a share of 100 %."""
    heights = (0, 0.25, 0.5, 0.75, 1) if top == 1.0 else ticks(0.0, top)
    marks = ticks(0.0, max((x for line in lines for x, _ in line.points), default=1.0) or 1.0)
    x_at = _scale(0, marks[-1], _LEFT, _WIDTH - _RIGHT - 8)
    y_at = _scale(0, heights[-1], _HEIGHT - _BOTTOM, _TOP)
    body = [_horizontal(y_at(height), spell(height)) for height in heights]
    body += [_text(x_at(mark), _HEIGHT - _BOTTOM + 16, _plain(mark), "middle") for mark in marks]
    for k, line in enumerate(lines):
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
        body.append(
            f'<polyline class="line l{k % 6}" points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
    body.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_title, "middle", "axis"))
    return _svg(title, description, _HEIGHT, body)


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution as a staircase: share of values ≤ x, thinned to at most 200 steps."""
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    picked = sorted({round(i * last / 199) for i in range(200)}) if last > 199 else range(last + 1)
    points = [(ordered[0], 0.0)]
    for i in picked:
        points += [(ordered[i], points[-1][1]), (ordered[i], (i + 1) / len(ordered))]
    return points


def _svg(title: str, description: str, height: float, body: Sequence[str]) -> str:
    words = escape(f"{title}. {description}")
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{words}">{"".join(body)}</svg>'


def _describe(labels: Sequence[str], series: Sequence[Series], spell: Spell) -> str:
    def one(part: Series) -> str:
        pairs = zip(labels, part.values)
        return f"{part.name}: " + ", ".join(f"{label} {spell(v)}" for label, v in pairs if v is not None)

    return "; ".join(map(one, series)) + "."


def _largest(series: Sequence[Series]) -> float:
    return max((value for one in series for value in one.values if value is not None), default=0.0)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _plain(mark: float) -> str:
    return f"{mark:,.10g}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, series: int, hover: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{max(height, 0.5):.1f}" rx="1.5"'
    return f'<rect class="s{series % 6}" {box}><title>{escape(hover)}</title></rect>'


def _horizontal(y: float, label: str) -> str:
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 6, y + 4, label, "end")


def _vertical(x: float, top: float, bottom: float, label: str) -> str:
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
    return line + _text(x, bottom + 16, label, "middle")
