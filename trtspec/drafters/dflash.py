"""DFlash (2602.06036): a small block-diffusion head fills a whole block in one pass; DSpark (2607.05147) reads the
block's tokens off one after the other, each biased by the one before.

The head attends over the target's captured states, projected once into keys and values of its own layers, and over
the block: the last known token and mask tokens. A sequence's context keeps the rows of committed tokens only, so
nothing is ever rolled back. Tokens are the likeliest ones: a function of the text, without q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.checkpoints.pairing import last_draft_length
from trtspec.drafters.base import NOTHING, Ask, Draft
from trtspec.drafters.block_engine import BlockEngine, Context, Floats, open_block_engine
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.head_engine import read_info
from trtspec.values import GenerationRequest


@dataclass(slots=True, eq=False)
class _State:
    """last: the last known token. waiting: captured states of the tokens behind the context's, whose rows are made
    when a draft is asked for.
    """

    last: int
    context: Context
    waiting: list[Floats] = field(default_factory=list)


class DFlashDrafter:
    """The `Drafter` of methods dflash and dspark. engine: the head; owned, and closed with the drafter.

    info: head.json. min_confidence: a DSpark draft ends before the first token that its confidence head gives less.
    """

    def __init__(self, engine: BlockEngine, info: Mapping[str, Any], *, min_confidence: float = 0.0) -> None:
        self.spec = spec_of(info["method"])
        self._engine = engine
        self._info = info
        self._min_confidence = min_confidence

    def open(self, request: GenerationRequest, seed: int) -> _State:
        return _State(request.prompt[0], self._engine.open())

    def observe(self, state: _State, tokens: Sequence[int], hidden: Floats) -> None:
        if len(tokens):
            state.last = int(tokens[-1])
            state.waiting.append(hidden.copy())

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        asked = [ask for ask in asks if self._room(ask)]
        if asked:
            states = [ask.state for ask in asked]
            self._take_in(states)
            contexts, last = [state.context for state in states], [state.last for state in states]
            tokens, *sure = self._engine.draft(contexts, last)
            for row, ask in enumerate(asked):
                count = self._confident(sure[0][row]) if sure else tokens.shape[1]
                drafts[id(ask)] = Draft.chain(tokens[row, : min(count, self._room(ask))].tolist())
        return [drafts.get(id(ask), NOTHING) for ask in asks]

    def release(self, state: _State) -> None:
        self._engine.release(state.context)

    def close(self) -> None:
        self._engine.close()

    def _room(self, ask: Ask) -> int:
        """Tokens that may be drafted: no draft position passes what the head knows."""
        known = ask.state.context.stored + sum(len(rows) for rows in ask.state.waiting)
        if known == 0:
            return 0
        return last_draft_length(known + 1, self._info["max_positions"], min(ask.nodes, ask.depth))

    def _confident(self, confidence: Floats) -> int:
        unsure = np.flatnonzero(confidence < self._min_confidence)
        return int(unsure[0]) if len(unsure) else len(confidence)

    def _take_in(self, states: Sequence[_State]) -> None:
        """Make the context rows that are waiting, of all sequences together."""
        behind = [state for state in states if state.waiting]
        if not behind:
            return
        hidden = [np.concatenate(state.waiting) for state in behind]
        self._engine.extend([state.context for state in behind], hidden)
        for state in behind:
            state.waiting.clear()


def open_dflash(speculation: Mapping[str, Any], engine: Path, *, threads: int | None = None) -> DFlashDrafter:
    """Open the head inside an engine folder. Raises SetupError when it is not there."""
    info = read_info(engine, speculation["method"])
    blocks = open_block_engine(engine, info, threads)
    return DFlashDrafter(blocks, info, min_confidence=speculation.get("min_token_probability", 0.0))
