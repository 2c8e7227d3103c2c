"""Listeners of the events that stages emit: bars on a terminal, plain lines elsewhere, JSON lines on request.

A reporter never ends a build: when its stream is closed or cannot show a character, it goes on without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal, Protocol, TextIO

from trtspec.events import Event, Note, Progress, StageFinished, StageStarted

LogStyle = Literal["auto", "plain", "json", "quiet"]
LOG_STYLES: tuple[LogStyle, ...] = ("auto", "plain", "json", "quiet")

_PROGRESS_EVERY_S = 5.0


class Reporter(Protocol):
    """Called from any thread with each event; `close` once at the end, after which it stays silent."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def make_reporter(style: LogStyle, stream: TextIO | None) -> Reporter:
    """The reporter for a stream: with "auto", bars when it is a terminal and plain lines when it is not."""
    if stream is None or style == "quiet":
        return QuietReporter()
    if style == "json":
        return JsonReporter(stream)
    if style == "auto" and _is_terminal(stream):
        return BarReporter(stream)
    return PlainReporter(stream)


class QuietReporter:
    """Drops everything."""

    def __call__(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


class PlainReporter:
    """One line when a stage starts, ends or has something to say; of progress, one line every few seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begun: dict[tuple[str, str], tuple[float, int]] = {}
        self._last = clock()
        self._warnings: list[Note] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._progress(event)
            return
        if isinstance(event, Note) and event.level == "warning":
            self._warnings.append(event)
        _write(self._stream, describe(event))

    def close(self) -> None:
        for line in closing_summary(self._warnings):
            _write(self._stream, line)
        self._warnings.clear()

    def _progress(self, event: Progress) -> None:
        now = self._clock()
        began, first = self._begun.setdefault((event.stage, event.task), (now, event.done))
        if now - self._last < _PROGRESS_EVERY_S:
            return
        self._last = now
        of = f"/{event.total}" if event.total is not None else ""
        left = time_left(event.done - first, event.total and event.total - first, now - began)
        _write(self._stream, f"{event.stage}: {event.task} {event.done}{of} {event.unit}{left}")


class JsonReporter:
    """One JSON object a line: an event's fields, `event` (its name) and `time_s` (since the start)."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begun = clock()

    def __call__(self, event: Event) -> None:
        record = {
            "event": type(event).__name__,
            "time_s": round(self._clock() - self._begun, 3),
            **asdict(event),
        }
        _write(self._stream, json.dumps(record))

    def close(self) -> None:
        pass


class BarReporter:
    """Progress bars with the time left (rich), under them a line for every stage and note."""

    def __init__(self, stream: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(file=_Unbreakable(stream), stderr=True, highlight=False, soft_wrap=True)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[tuple[str, str], progress.TaskID] = {}
        self._warnings: list[Note] = []
        self._closed = False
        self._bars.start()

    def __call__(self, event: Event) -> None:
        if self._closed:
            return
        if isinstance(event, Progress):
            name = (event.stage, event.task)
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(f"{event.stage}: {event.task}", total=event.total)
            self._bars.update(self._tasks[name], completed=event.done, total=event.total)
            return
        if isinstance(event, StageFinished):
            for name in [name for name in self._tasks if name[0] == event.stage]:
                self._bars.remove_task(self._tasks.pop(name))
        warning = isinstance(event, Note) and event.level == "warning"
        if warning:
            self._warnings.append(event)
        self._console.print(describe(event), markup=False, style="yellow" if warning else None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._bars.stop()
        for line in closing_summary(self._warnings):
            self._console.print(line, markup=False, style="yellow")


def describe(event: Event) -> str:
    """One line for a reader."""
    match event:
        case StageStarted(stage, cached):
            return f"{stage}: unchanged, taken from the cache" if cached else f"{stage}: started"
        case StageFinished(stage, seconds, summary, _):
            return f"{stage}: done in {duration(seconds)}" + (f": {summary}" if summary else "")
        case Note(stage, text, level):
            return f"{stage}: warning: {text}" if level == "warning" else f"{stage}: {text}"
        case Progress(stage, task, done, total, unit):
            return f"{stage}: {task} {done}{'' if total is None else f'/{total}'} {unit}"


def closing_summary(warnings: list[Note]) -> list[str]:
    """The warnings again, when other lines may have pushed them out of sight; each once."""
    texts = list(dict.fromkeys(f"{note.stage}: {note.text}" for note in warnings))
    if not texts:
        return []
    return [f"{len(texts)} warning{'s' if len(texts) > 1 else ''}:", *(f"  {text}" for text in texts)]


def duration(seconds: float) -> str:
    """4.2 s, 3 min 07 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_left(done: int, total: int | None, elapsed_s: float) -> str:
    """ ", 3 min 07 s left" at the average rate so far, or nothing while it cannot be told."""
    if not total or done <= 0 or done >= total or elapsed_s <= 0:
        return ""
    return f", {duration(elapsed_s / done * (total - done))} left"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # a closed stream is no terminal
        return False


def _write(stream: TextIO, line: str) -> None:
    _Unbreakable(stream).write(line + "\n")
    _Unbreakable(stream).flush()


class _Unbreakable:
    """A stream whose reader may leave at any time: what cannot be written is dropped, never raised."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "replace").decode())
        except (OSError, ValueError):
            # Closed or broken pipe. The build goes on: losing its narration is not losing its result.
            return 0
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return  # as in write

    def __getattr__(self, name: str):
        return getattr(self._stream, name)
