"""What running a trained head takes: its folder inside the engine's, its graphs, the table it shares with the target.

engine/head/head.json     what the head is, written by trtspec/compile/heads
engine/head/*.onnx        its graphs, and their weights
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.errors import SetupError
from trtspec.files import JSON

HEAD_FOLDER = "head"  # of the compiled head, inside the target's engine
_INFO = "head.json"


def write_info(engine: Path, info: Mapping[str, JSON]) -> None:
    """Write `head.json` of the head in an engine folder."""
    (engine / HEAD_FOLDER / _INFO).write_text(json.dumps(info, indent=2, sort_keys=True) + "\n")


def read_info(engine: Path, method: str) -> dict[str, Any]:
    """`head.json` of the head in an engine folder; SetupError where there is none, or one of another method."""
    path = engine / HEAD_FOLDER / _INFO
    if not path.is_file():
        raise SetupError("the engine has no draft head", where=str(path), hint="run `trtspec build` again")
    info = json.loads(path.read_text())
    if info.get("method") != method:
        raise SetupError(
            f"the head in this engine is for {info.get('method')}, not {method}", where=str(path)
        )
    return info


class HeadGraph:
    """One graph of a head, run on the CPU. threads: None takes the cores this process may use."""

    def __init__(self, engine: Path, name: str, threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(engine / HEAD_FOLDER / name), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, **inputs: np.ndarray) -> list[np.ndarray]:
        """The graph's outputs, in their order."""
        return self._session.run(None, inputs)


def shared_embedding(engine: Path, info: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """float32 [V, H]: the target's embedding, mapped from the weights of its engine; nothing is copied.

    info: `embedding` of head.json, {file, offset, shape} (see compile/heads).
    """
    table = info["embedding"]
    return np.memmap(engine / table["file"], np.float32, "r", table["offset"], tuple(table["shape"]))
