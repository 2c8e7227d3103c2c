"""Opening an engine folder with whatever runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.engines.info import EngineInfo

if TYPE_CHECKING:
    from trtspec.engines.onnxruntime import OnnxRuntimeEngine
    from trtspec.engines.tensorrt import TensorRtEngine


def open_engine(
    folder: Path, *, max_batch: int | None = None, threads: int | None = None
) -> OnnxRuntimeEngine | TensorRtEngine:
    """The engine of `folder`, by the backend it was built for.

    max_batch: fewer slots than the folder allows. threads: of a CPU engine, None for all cores. Raises SetupError
    when the folder is no engine, or what it runs on is not here.
    """
    if EngineInfo.read(folder).backend == "tensorrt":
        from trtspec.engines.hierarchical_tensorrt import open_tensorrt_engine

        return open_tensorrt_engine(folder, max_batch=max_batch)
    from trtspec.engines.hierarchical import open_cpu_engine

    return open_cpu_engine(folder, max_batch=max_batch, threads=threads)
