"""The engine of an autoregressive head on TensorRT (see compile/heads/tensorrt.py).

The attention plugin's mask says which rows of a step see each other; all rows before it are seen by all. A draft that
branches grows over several steps, so each runs the rows drafted so far again, with the new ones as one tree: the rows
of a step are few, and the weights are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.drafters.head_engine import HEAD_FOLDER
from trtspec.drafters.pair_engine import PairStep, module_folder
from trtspec.engines.base import SlotLogits
from trtspec.engines.tensorrt import Input, Piece, Runner, TensorRtEngine
from trtspec.engines.tensorrt_info import Profile
from trtspec.verify.tree import ROOT


class TensorRtPairEngine(TensorRtEngine):
    """Opens one graph of the head in the engine folder `engine`. info: of head.json. module: of several MTP modules.

    max_batch, runner, and what is raised: as of a target's engine.
    """

    def __init__(
        self,
        engine: Path,
        info: Mapping[str, Any],
        *,
        module: int = 0,
        max_batch: int | None = None,
        runner: Runner | None = None,
    ) -> None:
        self._captured_width = int(info["captured_width"])
        super().__init__(engine / HEAD_FOLDER / module_folder(module), max_batch=max_batch, runner=runner)
        self._drafted: dict[int, PairStep] = {}  # by slot, the rows of the draft that grows there

    def forward(self, steps: Sequence[PairStep]) -> list[SlotLogits]:
        """See `PairEngine`."""
        whole = [self._with_drafted(step) for step in steps]
        outputs = super().forward(whole)
        return [
            SlotLogits(output.logits, output.hidden[len(every.tokens) - len(step.tokens) :])
            for step, every, output in zip(steps, whole, outputs, strict=True)
        ]

    def _with_drafted(self, step: PairStep) -> PairStep:
        """`step`; of a tree, with the rows it hangs below. The draft's rows are remembered for the next one."""
        drafted = self._drafted.pop(step.slot, None)
        if not (step.recycled and self.spec.trees):
            return step
        if drafted is None or drafted.start + len(drafted.tokens) != step.start:
            drafted = replace(step, tokens=step.tokens[:0], states=step.states[:0], parents=step.tokens[:0])
        offset = len(drafted.tokens)
        whole = replace(
            step,
            start=drafted.start,
            tokens=np.concatenate([drafted.tokens, step.tokens]),
            states=np.concatenate([drafted.states, step.states]),
            parents=np.concatenate([drafted.parents, _parents(step, offset)]),
            logits_from=offset + step.logits_from,
        )
        self._drafted[step.slot] = whole
        return step if step.sees is None else whole  # a chain's rows see all before them

    def _inputs_of(self, profile: Profile) -> list[Input]:
        by_row, f32 = (profile.batch, profile.rows), self._torch.float32
        return [
            *super()._inputs_of(profile),
            ("captured", (*by_row, self._captured_width), f32),
            ("recycled", (*by_row, self.spec.hidden_size), f32),
            ("is_recycled", (*by_row, 1), self._torch.bool),
        ]

    def _feeds(self, profile: Profile, pieces: Mapping[int, Piece], offset: int) -> dict[str, np.ndarray]:
        """States that no row of the run has stay as they are on the device: nothing reads them."""
        feeds = super()._feeds(profile, pieces, offset)
        by_row = (profile.batch, profile.rows)
        feeds["is_recycled"] = np.zeros((*by_row, 1), np.bool_)
        for slot, piece in pieces.items():
            lane, step = slot - offset, piece.step
            name = "recycled" if step.recycled else "captured"
            if name not in feeds:
                feeds[name] = np.zeros((*by_row, step.states.shape[1]), np.float32)
            feeds[name][lane, : piece.rows] = step.states[piece.first : piece.last]
            feeds["is_recycled"][lane] = step.recycled
        return feeds


def _parents(step: PairStep, offset: int) -> np.ndarray:
    """int64 [T]: the row of the draft that each row of the step follows, −1 for the committed ones. offset: the step's
    first row in the draft. Raises ValueError for a tree whose beginning was not run."""
    count = len(step.tokens)
    if step.sees is None:
        return np.arange(offset, offset + count) - 1
    if step.sees.shape[1] != offset + count:
        raise ValueError(f"slot {step.slot}: rows of a tree whose beginning was not run")
    ancestors = [np.flatnonzero(sees[: offset + row]) for row, sees in enumerate(step.sees)]
    return np.array([seen[-1] if len(seen) else ROOT for seen in ancestors], np.int64)
