"""Every error trtspec raises on purpose, sorted by whose turn it is to act.

    TrtspecError
    ├── ConfigError     exit 2    the user edits the config (or the command line)
    ├── SetupError      exit 3    the user installs or starts something on this machine
    ├── PlanInfeasible  exit 4    no plan satisfies the config; the nearest feasible change is named
    ├── StageFailed     exit 5    a stage ran and its result did not pass its own check
    └── InternalError   exit 70   a defect of trtspec

Each says what happened, where (file:line:column, or the artifact) and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TrtspecError(Exception):
    """Base of the tree: `message` (what), `where` (file:line:column or artifact), `hint` (what to do next)."""

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{place}{self.message}{advice}"

    def as_json(self) -> dict[str, object]:
        """The `error` object of `--json` output: kind, message, where, hint."""
        return {"kind": self.kind, "message": self.message, "where": self.where, "hint": self.hint}


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One fault of a config: `where` is file:line:column (lines and columns count from 1)."""

    where: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f"\n  hint: {self.hint}" if self.hint else "")


class ConfigError(TrtspecError):
    """The config or the command line is wrong; all problems found are reported at once."""

    kind = "config"
    exit_code = 2

    def __init__(
        self,
        message: str = "",
        *,
        where: str | None = None,
        hint: str | None = None,
        problems: Sequence[ConfigProblem] = (),
    ) -> None:
        self.problems = tuple(problems)
        if self.problems and not message:
            count = len(self.problems)
            message = f"{count} problem{'s' if count > 1 else ''} in the config"
        super().__init__(
            message, where=where or (self.problems[0].where if self.problems else None), hint=hint
        )

    def __str__(self) -> str:
        if not self.problems:
            return super().__str__()
        return "\n".join([*map(str, self.problems), *([f"  hint: {self.hint}"] if self.hint else [])])

    def as_json(self) -> dict[str, object]:
        problems = [{"where": p.where, "message": p.message, "hint": p.hint} for p in self.problems]
        return {**super().as_json(), "problems": problems}


class SetupError(TrtspecError):
    """Something this machine lacks: a package, a server, a driver, a file."""

    kind = "setup"
    exit_code = 3


class PlanInfeasible(TrtspecError):
    """The config is well formed and nothing can satisfy it; `hint` names the nearest feasible change."""

    kind = "infeasible"
    exit_code = 4


class StageFailed(TrtspecError):
    """A stage ran and its own check refused the result; nothing was published."""

    kind = "stage"
    exit_code = 5


class InternalError(TrtspecError):
    """A defect of trtspec itself."""

    kind = "internal"
    exit_code = 70
