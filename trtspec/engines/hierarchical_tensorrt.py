"""The TensorRT engine over QuantSpec's hierarchical KV cache; what a row reads, and why that is exact:
hierarchical_kv.py.

The target and its 4-bit draft are two of these engines over one `DeviceKv`. Chains only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtspec.engines.base import SlotLogits, SlotStep, check_steps
from trtspec.engines.hierarchical_device_kv import DeviceKv
from trtspec.engines.hierarchical_kv import KEYS, VALUES, in_pieces
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt import Input, Piece, TensorRtEngine
from trtspec.engines.tensorrt_info import Profile

if TYPE_CHECKING:
    import torch


def open_tensorrt_engine(folder: Path, **settings: Any) -> TensorRtEngine:
    """The engine of a folder, over the cache its plan reads. settings: of the engine's constructor."""
    kind = HierarchicalTensorRtEngine if EngineInfo.read(folder).kv_group else TensorRtEngine
    return kind(folder, **settings)


class HierarchicalTensorRtEngine(TensorRtEngine):
    """kv: the cache of another engine of the same shape, to read and write; None for one of its own. The other
    settings, and what is raised, are the base's."""

    def __init__(self, folder: Path, *, kv: DeviceKv | None = None, **settings: Any) -> None:
        self._shared = kv
        super().__init__(folder, **settings)

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        """See `Engine.forward`. One pass for each group that a step's rows lie in."""
        check_steps(steps, self.spec)
        return in_pieces(steps, self.kv.group, self._pass)

    def copy(self, source: int, destination: int, length: int) -> None:
        """See `Engine.copy`."""
        self.kv.copy(source, destination)

    def _pass(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        for step in steps:
            self.kv.write_from(step.slot, step.start)
        return super().forward(steps)

    def _open_cache(self, slots: int) -> torch.Tensor:
        info, shapes = self.info, self._shapes
        self.kv = self._shared or DeviceKv(
            layers=info.layers,
            slots=slots,
            kv_heads=info.kv_heads,
            head_dim=info.head_dim,
            group=info.kv_group,
            capacity=shapes.quantized,
            rows=shapes.capacity,
            dtype=getattr(self._torch, shapes.cache_dtype),
            device=self._runner.device,
        )
        return self.kv.recent

    def _inputs_of(self, profile: Profile) -> list[Input]:
        return [*super()._inputs_of(profile), ("quantized_lengths", (profile.batch,), self._torch.int32)]

    def _read_only(self, slot: int, count: int) -> dict[str, torch.Tensor]:
        kv, lanes = self.kv, slice(slot, slot + count)
        tensors = {}
        for layer in range(self.info.layers):
            for word, part in (("key", KEYS), ("value", VALUES)):
                tensors[f"{word}_upper.{layer}"] = kv.upper[layer, part, lanes]
                if self._shapes.kv_bits == 8:
                    tensors[f"{word}_lower.{layer}"] = kv.lower[layer, part, lanes]
            tensors[f"key_scales.{layer}"] = kv.key_scales[layer, lanes]
            tensors[f"key_zeros.{layer}"] = kv.key_zeros[layer, lanes]
            tensors[f"value_scales.{layer}"] = kv.value_scales[layer, lanes]
            tensors[f"value_zeros.{layer}"] = kv.value_zeros[layer, lanes]
        return tensors

    def _feeds(self, profile: Profile, pieces: Mapping[int, Piece], offset: int) -> dict[str, np.ndarray]:
        """Rows are written and counted from the first that is held in full."""
        feeds = super()._feeds(profile, pieces, offset)
        quantized = np.zeros(profile.batch, np.int32)
        for slot in pieces:
            quantized[slot - offset] = self.kv.first_recent(slot)
        taking_part = feeds["query_lengths"] > 0
        feeds["write_starts"] -= np.where(taking_part, quantized, 0)
        feeds["kv_lengths"] -= quantized
        return feeds | {"quantized_lengths": quantized}
