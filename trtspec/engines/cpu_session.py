"""ONNX Runtime sessions as all CPU graphs are opened: the target's, a draft model's, a head's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trtspec.errors import SetupError


def open_session(graph: Path, threads: int | None) -> Any:
    """An `onnxruntime.InferenceSession` of `graph`. threads: None takes the cores this process may use.

    Threads that wait spin between the operators of a run, but not after it: target and draft take turns in one step,
    each with threads of its own, and those of the one would else keep the cores from the other. Raises SetupError
    where onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise SetupError("onnxruntime is not installed", hint="pip install 'trtspec[cpu]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
