"""What running a trained head takes: its folder inside the engine's, its graphs, the table it shares with the target.

engine/head/head.json     what the head is, written by trtspec/compile/heads
engine/head/*.onnx        its graphs, and their weights; on TensorRT each is a plan in a folder of that name
engine/head/embedding.safetensors     the target's table, where a head on TensorRT reads it outside its graphs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtspec.engines.cpu_session import open_session
from trtspec.engines.info import EngineInfo
from trtspec.errors import SetupError
from trtspec.files import JSON, pretty_json, write_atomic

if TYPE_CHECKING:
    import torch

    from trtspec.drafters.head_plan import HeadPlan

HEAD_FOLDER = "head"  # of the compiled head, inside the target's engine
TABLE = "embedding"  # in the file of a table of its own
_INFO = "head.json"

# int64 [...] to float32 [..., H], where the graph that reads it runs.
Embedding = Callable[[npt.NDArray[np.int64]], "npt.NDArray[np.float32] | torch.Tensor"]


def write_info(engine: Path, info: Mapping[str, JSON]) -> None:
    """Write `head.json` of the head in an engine folder. A file that is there may be another folder's too, and is
    replaced, not changed."""
    write_atomic(engine / HEAD_FOLDER / _INFO, pretty_json(info))


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

    device = "cpu"

    def __init__(self, engine: Path, name: str, threads: int | None = None) -> None:
        self._session = open_session(engine / HEAD_FOLDER / name, threads)

    def __call__(self, **inputs: np.ndarray) -> list[np.ndarray]:
        """The graph's outputs, in their order."""
        return self._session.run(None, inputs)


def plan_folder(engine: Path, name: str) -> Path:
    """Where the plan of a head's graph is, which on a CPU were the file `name`."""
    return engine / HEAD_FOLDER / name.removesuffix(".onnx")


def open_graph(
    engine: Path, name: str, results: Mapping[str, tuple[int, ...]], threads: int | None = None
) -> HeadGraph | HeadPlan:
    """A graph over rows of the head in an engine folder, on the backend it was built for.

    results: what it gives, int32, each with its shape for one row.
    """
    if EngineInfo.read(engine).backend == "tensorrt":
        from trtspec.drafters.head_plan import HeadPlan

        return HeadPlan(plan_folder(engine, name), results)
    return HeadGraph(engine, name, threads)


def shared_embedding(engine: Path, info: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """float32 [V, H]: the target's embedding, mapped from the weights of its engine; nothing is copied.

    info: `embedding` of head.json, {file, offset, shape} (see compile/heads).
    """
    table = info["embedding"]
    return np.memmap(engine / table["file"], np.float32, "r", table["offset"], tuple(table["shape"]))


def open_embedding(engine: Path, info: Mapping[str, Any], device: str) -> Embedding:
    """The target's embedding as a function of ids. info: head.json; device: of the graph that reads its rows."""
    if EngineInfo.read(engine).backend == "tensorrt":
        import torch
        from safetensors.torch import load_file

        table = load_file(engine / info["embedding"]["file"], device)[TABLE]
        return lambda ids: table[torch.from_numpy(ids)]
    return shared_embedding(engine, info).__getitem__
