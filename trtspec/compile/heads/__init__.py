"""Trained heads: a head's folder becomes `head/` in the engine folder of its target (see drafters/head_engine.py)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from trtspec.checkpoints.heads import HeadFacts
from trtspec.checkpoints.pairing import captured_layers
from trtspec.drafters.catalog import AUTOREGRESSIVE_HEADS
from trtspec.events import Emit, silent

# Method → module with `build(request, engine, emit)`; they import onnx.
_BUILDERS = {
    "medusa": "medusa",
    "hydra": "hydra",
    **dict.fromkeys(("dflash", "dspark"), "dflash"),
    **dict.fromkeys(AUTOREGRESSIVE_HEADS, "eagle"),
}
# Heads that read the state the target's output layer reads: the last layer's, which the graph norms.
_OF_THE_LAST_LAYER = ("medusa", "hydra", "eagle", "eagle2", "mtp")


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """head: the head's folder. model: the folder that the engine was compiled from. draft_length: as planned.

    quantization: of the head's weights; none or int8_weight_only.
    """

    method: str
    head: Path
    model: Path
    draft_length: int
    quantization: str = "none"


def head_taps(method: str, head: HeadFacts, layers: int) -> tuple[int, ...]:
    """0-based layers of a target of `layers` layers whose output the engine must capture for this head."""
    if method in _OF_THE_LAST_LAYER:
        return (layers - 1,)
    return captured_layers(head.captured, layers, method).zero_based


def compile_head(request: HeadRequest, engine: Path, emit: Emit = silent) -> None:
    """Write the head into the finished engine folder `engine`, whose taps are `head_taps`.

    Hits of TOKEN_HEADS are counted afterwards, where the engine can run: see measure.py. Raises ConfigError for a head
    that contradicts itself or its target.
    """
    module = import_module(f"trtspec.compile.heads.{_BUILDERS[request.method]}")
    module.build(request, engine, emit)
