"""A trained head that training goes on from: one of ours, or a published one in any layout that is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.heads import read_head
from trtspec.errors import PlanInfeasible
from trtspec.files import sha256_file, sha256_json
from trtspec.train.head_modules import METHODS, REPORT

WHERE = "training.start"
_TOLD = ("command", "response_tokens", "steps")


def read_start(folder: Path, method: str) -> Head:
    """The head in `folder`. Raises ConfigError as its layout does, PlanInfeasible for one of another method."""
    held = read_head(folder).method or "eagle"  # EAGLE-1's files do not say
    wanted = "eagle" if method == "eagle2" else method  # one head, drafted from in two ways
    if held != wanted:
        raise PlanInfeasible(
            f"{folder} holds a head of {held}; {method} cannot go on from it",
            where=WHERE,
            hint=f"name a head of {wanted}, or set speculation.method: {held}",
        )
    return import_module(METHODS[method].layout).read_head(folder)


def weights_digest(folder: Path) -> str:
    """Of all tensor files in `folder`, by their content."""
    return sha256_json([sha256_file(file) for file in sorted(folder.glob("*.safetensors"))])


def earlier_runs(folder: Path) -> list[Mapping[str, Any]]:
    """What is known of how the head in `folder` was made, the first run first: command, response tokens and steps of
    each where its report lies beside it, else its name alone.
    """
    if not (folder / REPORT).is_file():
        return [{"head": folder.name}]
    told = json.loads((folder / REPORT).read_text())
    return [*told.get("earlier", []), {name: told[name] for name in _TOLD}]
