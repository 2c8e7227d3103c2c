"""What stages say while they run. Stages emit; reporters (see reporters.py) listen; neither knows the other.

A stage receives one callable, `emit: Emit`, and calls it with the frozen events below. Events carry
plain values only, so that the JSON-lines reporter can write any of them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins; `cached` means its result is already in the store and nothing will run."""

    stage: str
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` `unit`s of `task`; `total` None while it is unknown. Reporters derive the time left."""

    stage: str
    task: str
    done: int
    total: int | None
    unit: str = "it"


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the reader; `level` "warning" is repeated in the closing summary."""

    stage: str
    text: str
    level: Literal["info", "warning"] = "info"


@dataclass(frozen=True, slots=True)
class StageFinished:
    """A stage ended well after `seconds`; `summary` is one line, `artifact` where the result lies."""

    stage: str
    seconds: float
    summary: str = ""
    artifact: str | None = None


Event = StageStarted | Progress | Note | StageFinished
Emit = Callable[[Event], None]


def silent(_event: Event) -> None:
    """An `Emit` that drops everything: for library callers and tests."""
