"""One module per command: `HELP`, `add_arguments(parser)` and `run(arguments, context)`.

`run` returns its `Outcome`, or an exit code when it announced its outcome itself (a server that is ready).
Modules import nothing heavy until they run. The command's name is its module's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trtspec.events import Emit
from trtspec.files import JSON


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer: `result` with --json, `text` without. exit_code: 0 unless the answer is "no"."""

    result: Mapping[str, JSON]
    text: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """What a running command may use. announce: prints an outcome before the command ends."""

    emit: Emit
    announce: Callable[[Outcome], None]
