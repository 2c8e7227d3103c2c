"""`engine.json`: what a compiled engine folder says of itself. Written by compile, read by whatever runs it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.engines.base import EngineSpec
from trtspec.errors import SetupError

FILE = "engine.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """spec: the engine's capabilities. layers, kv_heads, head_dim: shape of its KV cache.

    least_rows: rows the engine's products must have at a time for exactness (2 where a product runs in float32).
    stop_token_ids: ids that end a text, from the target's folder. weights: one line on what the kernels read.
    speculation: `method`, `draft_length` and the method's own options, as planned.
    checks: figures of the comparison with the PyTorch model the engine came from.
    kv_group: tokens of a group of its hierarchical KV cache (see hierarchical_kv.py); 0 where it has another.
    """

    trtspec_version: str
    backend: str
    model: str
    spec: EngineSpec
    layers: int
    kv_heads: int
    head_dim: int
    least_rows: int
    stop_token_ids: tuple[int, ...]
    weights: str
    speculation: Mapping[str, Any]
    checks: Mapping[str, float] = field(default_factory=dict)
    kv_group: int = 0
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write `engine.json` into `folder`."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
        (folder / FILE).write_text(text + "\n")

    @staticmethod
    def read(folder: Path) -> EngineInfo:
        """Read `engine.json` of `folder`; SetupError when it is missing or of another format."""
        path = folder / FILE
        if not path.is_file():
            raise SetupError("not an engine folder", where=str(path), hint="run `trtspec build` first")
        raw = json.loads(path.read_text())
        if raw.get("format") != FORMAT:
            raise SetupError(
                f"engine format {raw.get('format')}, this trtspec reads {FORMAT}",
                where=str(path),
                hint="build the engine again with this version",
            )
        spec = raw["spec"] | {"taps": tuple(raw["spec"]["taps"])}
        stops = tuple(raw["stop_token_ids"])
        return EngineInfo(**raw | {"spec": EngineSpec(**spec), "stop_token_ids": stops})
