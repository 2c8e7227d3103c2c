"""The CPU engine over QuantSpec's hierarchical KV cache; what a row reads, and why that is exact: hierarchical_kv.py.

The target and its 4-bit draft are two of these engines over one `HierarchicalKv`. The target's rows overwrite the
draft's, so what is committed is always the target's own. Chains only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trtspec.engines.base import SlotLogits, SlotStep, check_steps
from trtspec.engines.hierarchical_kv import KEYS, VALUES, HierarchicalKv, in_pieces
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import Binding, Lane, OnnxRuntimeEngine


def open_cpu_engine(folder: Path, **settings: Any) -> OnnxRuntimeEngine:
    """The engine of a folder, over the cache its graph reads. settings: of the engine's constructor."""
    kind = HierarchicalEngine if EngineInfo.read(folder).kv_group else OnnxRuntimeEngine
    return kind(folder, **settings)


class _NewRows(NamedTuple):
    """Where a pass's rows arrive: float32 [layers, 2, B, KV heads, T, head_dim], and the graph's outputs in it."""

    array: np.ndarray
    outputs: dict[str, Any]


class HierarchicalEngine(OnnxRuntimeEngine):
    """kv: the cache of another engine of the same shape, to read and write; None for one of its own. The other
    settings, and what is raised, are the base's."""

    def __init__(self, folder: Path, *, kv: HierarchicalKv | None = None, **settings: Any) -> None:
        self._shared = kv
        self._rows_buffer = np.zeros(0, np.float32)
        self._new_rows: dict[tuple[int, int], _NewRows] = {}  # views of that buffer
        super().__init__(folder, **settings)

    @property
    def kv(self) -> HierarchicalKv:
        """The cache, for a draft that shares it."""
        return self._cache

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        """See `Engine.forward`. One pass of the graph for each group that a step's rows lie in."""
        check_steps(steps, self.spec)
        return in_pieces(steps, self.kv.group, super().forward)

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """See `Engine.commit`: a chain's rows lie in place."""
        if list(rows) != list(range(len(rows))):
            raise ValueError(f"rows {list(rows)} are no beginning of a chain")

    def close(self) -> None:
        """See `Engine.close`."""
        self._new_rows.clear()
        super().close()

    def _open_cache(self) -> HierarchicalKv:
        if self._shared is not None:
            return self._shared
        return HierarchicalKv(
            layers=self.info.layers,
            slots=self.spec.max_batch,
            kv_heads=self.info.kv_heads,
            head_dim=self.info.head_dim,
            group=self.info.kv_group,
            max_rows=self.spec.max_rows,
            max_seq_len=self.spec.max_seq_len,
        )

    def _feeds(
        self, steps: Sequence[SlotStep], lanes: Sequence[Lane], wanted: list[int]
    ) -> dict[str, np.ndarray]:
        feeds, kv = super()._feeds(steps, lanes, wanted), self.kv
        batch, width = feeds["padded_rows"].shape
        # Every lane wants room for the widest of the step, and one row is nobody's.
        groups = (max(lane.start for lane in lanes) + width) // kv.group + 1
        recent = self._places(batch, kv.recent_rows)
        recent[..., 2] = groups * kv.group - 1
        new = self._places(batch, width)
        for lane in lanes:
            positions = kv.recent_positions(lane.start)
            recent[lane.index, :, positions % kv.recent_rows, 2] = positions[:, None]
            new[lane.index, :, :, 2] = lane.start + np.arange(width)
        return feeds | {
            "groups": np.array([groups], np.int64),
            "recent_places": recent,
            "new_places": new,
        }

    def _places(self, batch: int, rows: int) -> np.ndarray:
        """int64 [batch, KV heads, rows, 3]: (b, head, 0)."""
        places = np.zeros((batch, self.info.kv_heads, rows, 3), np.int64)
        places[..., 0] = np.arange(batch)[:, None, None]
        places[..., 1] = np.arange(self.info.kv_heads)[:, None]
        return places

    def _run(self, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        batch, width = feeds["padded_rows"].shape
        new = self._rows_of(batch, width)
        for name, value in new.outputs.items():
            self._binding(batch).io.bind_ortvalue_output(name, value)
        outputs = super()._run(feeds)
        for slot, count in enumerate(feeds["query_lengths"].tolist()):
            if count:
                self.kv.store(slot, feeds["position_ids"][slot, :count], new.array[:, :, slot, :, :count])
        return outputs

    def _rows_of(self, batch: int, width: int) -> _NewRows:
        if (batch, width) not in self._new_rows:
            info = self.info
            shape = (info.layers, 2, batch, info.kv_heads, width, info.head_dim)
            size = math.prod(shape)
            if size > self._rows_buffer.size:
                self._rows_buffer = np.empty(size, np.float32)
                self._new_rows.clear()
            array = self._rows_buffer[:size].reshape(shape)
            outputs = {
                f"{name}.{layer}": self._ort_value(array[layer, part])
                for layer in range(info.layers)
                for part, name in ((KEYS, "keys"), (VALUES, "values"))
            }
            self._new_rows[batch, width] = _NewRows(array, outputs)
        return self._new_rows[batch, width]

    def _bind(self, batch: int) -> Binding:
        """The first `batch` slots of the cache, bound as inputs."""
        io, kv = self._session.io_binding(), self.kv
        arrays = {"key_scales": kv.key_scales, "key_lows": kv.key_lows}
        arrays |= {"value_scales": kv.value_scales, "value_lows": kv.value_lows}
        arrays |= {"key_codes": kv.codes[:, KEYS], "value_codes": kv.codes[:, VALUES]}
        arrays |= {"recent_keys": kv.recent[:, KEYS], "recent_values": kv.recent[:, VALUES]}
        kept = []
        for name, array in arrays.items():
            for layer in range(self.info.layers):
                value = self._ort_value(array[layer, :batch])
                io.bind_ortvalue_input(f"{name}.{layer}", value)
                kept.append(value)
        return Binding(io, kept)
