"""Reporters: readable where they are read, silent where nobody reads, and never the end of a build."""

from __future__ import annotations

import contextlib
import io
import json
import os

import pytest

from trtspec.events import Note, Progress, StageFinished, StageStarted
from trtspec.reporters import (
    BarReporter,
    JsonReporter,
    PlainReporter,
    QuietReporter,
    duration,
    make_reporter,
    time_left,
)

BUILD = (
    StageStarted("quantize"),
    Progress("quantize", "calibration", 1, 4, "batch"),
    Note("quantize", "block 64 is used"),
    Note("quantize", "perplexity rose by 4 %", "warning"),
    Progress("quantize", "calibration", 4, 4, "batch"),
    StageFinished("quantize", 187.0, "int8", "/store/x"),
    StageStarted("compile", cached=True),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_tell_each_stage_once_and_repeat_warnings_at_the_end():
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    for event in BUILD:
        reporter(event)
    reporter.close()
    reporter.close()
    assert stream.getvalue().splitlines() == [
        "quantize: started",
        "quantize: block 64 is used",
        "quantize: warning: perplexity rose by 4 %",
        "quantize: done in 3 min 07 s: int8",
        "compile: unchanged, taken from the cache",
        "1 warning:",
        "  quantize: perplexity rose by 4 %",
    ]


def test_plain_progress_is_rare_and_gives_the_time_left():
    """A log of a long calibration must stay short: 10,000 events in 20 seconds give a handful of lines."""
    now = [0.0]
    stream = io.StringIO()
    reporter = PlainReporter(stream, clock=lambda: now[0])
    for done in range(10_001):
        now[0] = done * 0.002
        reporter(Progress("quantize", "calibration", done, 10_000, "batch"))
    lines = stream.getvalue().splitlines()
    assert 3 <= len(lines) <= 5
    assert lines[0] == "quantize: calibration 2500/10000 batch, 15.0 s left"


def test_json_lines_carry_every_event_unchanged():
    stream = io.StringIO()
    reporter = JsonReporter(stream)
    for event in BUILD:
        reporter(event)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [record["event"] for record in records] == [type(event).__name__ for event in BUILD]
    assert records[1] | {"time_s": 0} == {
        "event": "Progress", "time_s": 0, "stage": "quantize", "task": "calibration", "done": 1, "total": 4,
        "unit": "batch",
    }  # fmt: skip


@pytest.mark.parametrize("columns", ["20", "80", "1"])
def test_bars_survive_any_width(columns: str, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    reporter = BarReporter(stream)
    for event in BUILD:
        reporter(event)
    reporter.close()
    reporter.close()
    reporter(BUILD[0])
    text = stream.getvalue()
    assert "quantize: done in 3 min 07 s: int8" in text and "1 warning:" in text


def test_text_in_brackets_is_text_and_not_markup():
    stream = Terminal()
    reporter = BarReporter(stream)
    reporter(Note("compile", "logits [bold]B,T,V[/bold] of [/x]"))
    reporter.close()
    assert "[bold]B,T,V[/bold] of [/x]" in stream.getvalue()


@pytest.mark.parametrize("style", ["plain", "json", "auto"])
def test_a_closed_stream_does_not_end_the_build(style: str):
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", buffering=1)
    reporter = make_reporter(style, stream)
    os.close(reading)
    for event in BUILD:
        reporter(event)
    reporter.close()
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    for event in BUILD:
        reporter(event)


def test_bars_on_a_terminal_that_goes_away_do_not_end_the_build():
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    reporter = make_reporter("auto", Gone())
    assert isinstance(reporter, BarReporter)
    for event in BUILD:
        reporter(event)
    reporter.close()


def test_a_stream_that_cannot_show_a_character_shows_the_rest():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    PlainReporter(stream)(Note("plan", "2 × 64 rows → one tile"))
    assert raw.getvalue() == b"plan: 2 ? 64 rows ? one tile\n"


def test_the_reporter_fits_the_stream():
    assert isinstance(make_reporter("auto", io.StringIO()), PlainReporter)
    assert isinstance(make_reporter("auto", None), QuietReporter)
    assert isinstance(make_reporter("quiet", Terminal()), QuietReporter)
    assert isinstance(make_reporter("json", Terminal()), JsonReporter)
    closed = io.StringIO()
    closed.close()
    assert isinstance(make_reporter("auto", closed), PlainReporter)


def test_durations_are_read_at_a_glance():
    assert [duration(s) for s in (0, 4.26, 59.97, 187, 3599.7, 7500)] == [
        "0.0 s", "4.3 s", "1 min 00 s", "3 min 07 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip
    assert time_left(0, 10, 1.0) == time_left(3, None, 1.0) == time_left(10, 10, 1.0) == ""
    assert time_left(5, 10, 30.0) == ", 30.0 s left"
