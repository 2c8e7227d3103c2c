"""The engine of an autoregressive head: rows are pairs of a token and a state (see compile/heads/eagle.py).

Row i of a slot pairs token i + 1 with the state it was predicted from. Committed rows come first, made from the
target's states; rows that are drafted lie behind them, see those and their own ancestors, and are written over by the
next step. So nothing is rolled back, whatever the target rejects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtspec.drafters.head_engine import HEAD_FOLDER, shared_embedding
from trtspec.engines.base import EngineSpec, SlotLogits, SlotStep
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import Lane, OnnxRuntimeEngine

# Files of the head's folder, where the head has a table of its own.
EMBEDDING, VOCABULARY, MASK = "embedding.npy", "d2t.npy", "mask_hidden.npy"

States = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PairStep(SlotStep):
    """New rows of one sequence; their tokens are the pairs', one on from the row's index.

    states: float32 [T, W], captured from the target, or [T, H], given by this engine: `recycled` says which.
    sees: bool [T, S] for rows of a tree, which of the last S rows stored (these T among them) each one sees besides
    the committed ones; None for a chain. positions: of a tree's rows, int64 [T].
    """

    states: States = field(default_factory=lambda: np.empty((0, 0), np.float32))
    recycled: bool = False
    sees: npt.NDArray[np.bool_] | None = None
    positions: npt.NDArray[np.int64] | None = None


class PairEngine(Protocol):
    """What a drafter runs; `forward` is `Engine.forward` with pairs, and gives as hidden what may be recycled."""

    spec: EngineSpec

    def forward(self, steps: Sequence[PairStep]) -> list[SlotLogits]: ...

    def close(self) -> None: ...


class OnnxPairEngine(OnnxRuntimeEngine):
    """Opens one graph of the head in the engine folder `engine`. info: of head.json. module: of several MTP modules."""

    def __init__(
        self,
        engine: Path,
        info: dict[str, Any],
        *,
        module: int = 0,
        max_batch: int | None = None,
        threads: int | None = None,
    ) -> None:
        head = engine / HEAD_FOLDER
        super().__init__(head / module_folder(module), max_batch=max_batch, threads=threads)
        self._captured_width = int(info["captured_width"])
        if info["embedding"] is None:
            self._table: npt.NDArray[np.float32] = np.load(head / EMBEDDING, mmap_mode="r")
        else:
            self._table = shared_embedding(engine, info)

    def _lanes(self, step: PairStep, offset: int) -> list[Lane]:
        if step.sees is not None and not self._masks:
            raise ValueError("rows of a tree, and the head was compiled for chains")
        rows = np.arange(offset, offset + len(step.tokens))
        positions = step.start + np.arange(len(rows)) if step.positions is None else step.positions
        return [Lane(self._cache.lane(step.slot), step.start, rows, positions, step.sees)]

    def _feeds(
        self, steps: Sequence[PairStep], lanes: Sequence[Lane], wanted: list[int]
    ) -> dict[str, np.ndarray]:
        feeds = super()._feeds(steps, lanes, wanted)
        feeds["embedded"] = self._table[feeds.pop("input_ids")]
        captured = [step.states for step in steps if not step.recycled]
        recycled = [step.states for step in steps if step.recycled]
        feeds["captured"] = _stacked(captured, self._captured_width)
        feeds["recycled"] = _stacked(recycled, self.spec.hidden_size)
        places = {False: 0, True: len(feeds["captured"])}
        found = []
        for step in steps:
            first = places[step.recycled]
            found.append(np.arange(first, first + len(step.tokens)))
            places[step.recycled] = first + len(step.tokens)
        spare = len(feeds["embedded"]) - sum(map(len, found))
        feeds["feature_rows"] = np.concatenate([*found, np.zeros(spare, np.int64)])
        return feeds

    def _mask(self, lanes: Sequence[Lane], batch: int, width: int, longest: int) -> np.ndarray:
        """As for a target, and rows of earlier steps may be hidden too: those of other branches."""
        if all(lane.sees is None for lane in lanes):
            return super()._mask(lanes, batch, width, longest)
        mask = np.zeros((batch, 1, width, longest), np.float32)
        for lane in lanes:
            if lane.sees is not None:
                count, keys = lane.sees.shape
                end = lane.start + count
                hidden = np.where(lane.sees, np.float32(0), np.float32(-np.inf))
                mask[lane.index, 0, :count, end - keys : end] = hidden
        return mask


def open_pair_engine(
    engine: Path,
    info: dict[str, Any],
    *,
    module: int = 0,
    max_batch: int | None = None,
    threads: int | None = None,
) -> PairEngine:
    """A graph of the head in the engine folder `engine`, on the backend it was built for; see `OnnxPairEngine`."""
    if EngineInfo.read(engine / HEAD_FOLDER / module_folder(module)).backend == "tensorrt":
        from trtspec.drafters.pair_engine_tensorrt import TensorRtPairEngine

        return TensorRtPairEngine(engine, info, module=module, max_batch=max_batch)
    return OnnxPairEngine(engine, info, module=module, max_batch=max_batch, threads=threads)


def module_folder(module: int) -> str:
    """Place of a module's engine inside the head's folder."""
    return f"module-{module}" if module else "."


def _stacked(states: Sequence[States], width: int) -> States:
    return np.concatenate(states) if states else np.zeros((0, width), np.float32)
