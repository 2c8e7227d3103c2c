"""A trained head that training goes on from: one of ours, or a published one in any layout that is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.heads import head_of, read_head
from trtspec.errors import PlanInfeasible
from trtspec.files import sha256_file, sha256_json
from trtspec.train.head_modules import REPORT

WHERE = "training.start"
_TOLD = ("command", "response_tokens", "steps")


def read_start(folder: Path, method: str, target_layers: int) -> Head:
    """The head in `folder`, for a target with so many layers. Raises ConfigError as its layout does, PlanInfeasible for
    one of another method.
    """
    held = read_head(folder).method or "eagle"  # EAGLE-1's files do not say
    if head_of(held) != head_of(method):
        raise PlanInfeasible(
            f"{folder} holds a head of {held}; {method} cannot go on from it",
            where=WHERE,
            hint=f"name a head of {head_of(method)}, or set speculation.method: {held}",
        )
    return mtp.read_head(folder) if method == "mtp" else eagle.read_head(folder, target_layers)


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
