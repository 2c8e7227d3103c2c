"""A graph over rows of a trained head, on TensorRT (see compile/heads/tensorrt.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trtspec.engines import tensorrt
from trtspec.engines.tensorrt_info import TensorRtInfo

if TYPE_CHECKING:
    import torch


class HeadPlan:
    """Opens `folder` (tensorrt.json, model.plan). results: int32 outputs, each with its shape for one row.

    Rows come in any number and are run in pieces of the plan's own, the last one padded: no row sees another. What is
    raised: as of a target's engine.
    """

    def __init__(self, folder: Path, results: Mapping[str, tuple[int, ...]]) -> None:
        import torch

        self._torch = torch
        shapes = TensorRtInfo.read(folder)
        self._rows = shapes.profiles[0].batch
        self._runner = tensorrt.PlanRunner(folder, shapes)
        self.device = self._runner.device
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs = {
            name: torch.zeros((self._rows, *shape), dtype=torch.int32, device=self.device)
            for name, shape in results.items()
        }

    def __call__(self, **inputs: np.ndarray | torch.Tensor) -> list[np.ndarray]:
        """See `HeadGraph`. inputs: float32 [N, …], on any device."""
        count = len(next(iter(inputs.values())))
        pieces = [
            self._run(inputs, first, min(count - first, self._rows)) for first in range(0, count, self._rows)
        ]
        return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]

    def _run(
        self, inputs: Mapping[str, np.ndarray | torch.Tensor], first: int, count: int
    ) -> list[np.ndarray]:
        """Of `count` rows."""
        for name, values in inputs.items():
            if name not in self._inputs:  # it stays where it is, as a CUDA graph needs
                shape = (self._rows, *values.shape[1:])
                self._inputs[name] = self._torch.zeros(shape, device=self.device)
            self._inputs[name][:count].copy_(self._torch.as_tensor(values[first : first + count]))
        self._runner.run(0, self._inputs, self._outputs)
        return [np.array(output[:count].cpu()) for output in self._outputs.values()]
