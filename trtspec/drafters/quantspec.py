"""QuantSpec (2502.10424): the target drafts for itself, with 4-bit weights, over the upper halves of its own KV cache.

The draft has no prompt to read and no cache to keep: it starts from the rows that the target has stored and adds its
own, which the target writes over when it judges them. What a row of either reads is said in engines/hierarchical_kv.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import Ask, Draft
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.draft_model import DRAFT_FOLDER, DraftModelDrafter, DraftState
from trtspec.engines.base import Engine
from trtspec.errors import SetupError
from trtspec.values import GenerationRequest
from trtspec.verify.randomness import PositionRandom


class QuantSpecDrafter(DraftModelDrafter):
    """The `Drafter` of method quantspec.

    engine: reads and writes the KV cache of the target, in the target's slots; owned, and closed with the drafter. The
    other settings are those of a draft model.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        temperature: float | None = None,
        min_probability: float = 0.0,
        special_ids: Collection[int] = (),
    ) -> None:
        super().__init__(
            engine,
            engine.spec.tokenizer_vocab_size,
            temperature=temperature,
            min_probability=min_probability,
            special_ids=special_ids,
        )
        self.spec = replace(spec_of("quantspec"), deterministic=temperature == 0)

    def open(self, request: GenerationRequest, seed: int) -> DraftState:
        return DraftState(
            slot=-1,  # said by every ask
            prompt_length=len(request.prompt),
            sampling=self._draft_sampling(request.sampling),
            random=PositionRandom(seed),
            tokens=list(request.prompt[:1]),
        )

    def observe(self, state: DraftState, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        state.tokens.extend(tokens)
        state.stored = len(state.tokens) - 1  # the target's rows

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        for ask in asks:
            ask.state.slot = ask.slot
        return super().propose(asks, rows)

    def release(self, state: DraftState) -> None:
        """Nothing is held for one sequence."""


def open_quantspec(
    speculation: Mapping[str, Any],
    folder: Path,
    target: Engine,
    *,
    threads: int | None,
    special_ids: Collection[int],
) -> QuantSpecDrafter:
    """Open the draft inside the engine folder that `target` was opened from.

    Raises SetupError when it is not there or was built for another cache.
    """
    from trtspec.engines.info import EngineInfo

    draft, settings = EngineInfo.read(folder / DRAFT_FOLDER), {}
    if draft.backend == "tensorrt":
        from trtspec.engines.hierarchical_tensorrt import HierarchicalTensorRtEngine as kind
    else:
        from trtspec.engines.hierarchical import HierarchicalEngine as kind

        settings["threads"] = threads
    if not isinstance(target, kind) or draft.kv_group != target.info.kv_group:
        raise SetupError(
            "the draft reads another KV cache than the target keeps",
            where=str(folder / DRAFT_FOLDER),
            hint="build the engine again",
        )
    engine = kind(folder / DRAFT_FOLDER, kv=target.kv, max_batch=target.spec.max_batch, **settings)
    return QuantSpecDrafter(
        engine,
        temperature=speculation.get("draft_temperature"),
        min_probability=speculation.get("min_token_probability", 0.0),
        special_ids=special_ids,
    )
