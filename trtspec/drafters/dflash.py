"""DFlash (2602.06036): a small block-diffusion head fills a whole block in one pass; DSpark (2607.05147) reads the
block's tokens off one after the other, each biased by the one before.

The head attends over the target's captured states, projected once into keys and values of its own layers, and over
the block: the last known token and mask tokens. A sequence's context keeps the rows of committed tokens only, so
nothing is ever rolled back. Tokens are the likeliest ones: a function of the text, without q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.pairing import last_draft_length
from trtspec.drafters.base import NOTHING, Ask, Draft
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.head_engine import HeadGraph, read_info, shared_embedding
from trtspec.values import GenerationRequest

CONTEXT, BLOCK = "context.onnx", "block.onnx"  # in the head's folder
_BUCKET = 64  # context rows are allocated and attended over in multiples of this

Floats = npt.NDArray[np.float32]


class DFlashGraphs(NamedTuple):
    """context: (hidden [N, W], positions [N]) to keys and values [N, L, KV, d]. block: the inputs of block.onnx by name
    to tokens [S, D] and, with a confidence head, confidence [S, D]. embedding: [V, H].
    """

    context: Callable[[Floats, npt.NDArray[np.int64]], Sequence[Floats]]
    block: Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]
    embedding: Floats


@dataclass(slots=True, eq=False)
class _State:
    """last: the last known token. keys, values: [L, KV, capacity, d], of the first `stored` tokens. waiting: captured
    states of the tokens behind them, whose rows are made when a draft is asked for.
    """

    last: int
    keys: Floats
    values: Floats
    stored: int = 0
    waiting: list[Floats] = field(default_factory=list)


class DFlashDrafter:
    """The `Drafter` of methods dflash and dspark. info: head.json.

    min_confidence: a DSpark draft ends before the first token that its confidence head gives less.
    """

    def __init__(self, graphs: DFlashGraphs, info: Mapping[str, Any], *, min_confidence: float = 0.0) -> None:
        self.spec = spec_of(info["method"])
        self._graphs = graphs
        self._info = info
        self._min_confidence = min_confidence

    def open(self, request: GenerationRequest, seed: int) -> _State:
        info = self._info
        empty = np.zeros((info["layers"], info["kv_heads"], 0, info["head_dim"]), np.float32)
        return _State(request.prompt[0], empty, empty)

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
            tokens, *sure = self._graphs.block(self._feeds(states))
            for row, ask in enumerate(asked):
                count = self._confident(sure[0][row]) if sure else tokens.shape[1]
                drafts[id(ask)] = Draft.chain(tokens[row, : min(count, self._room(ask))].tolist())
        return [drafts.get(id(ask), NOTHING) for ask in asks]

    def release(self, state: _State) -> None:
        """Nothing is shared: the state goes with its last reference."""

    def close(self) -> None:
        """Nothing to release: the graphs go with their last reference."""

    def _room(self, ask: Ask) -> int:
        """Tokens that may be drafted: no draft position passes what the head knows."""
        known = ask.state.stored + sum(len(rows) for rows in ask.state.waiting)
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
        positions = [state.stored + np.arange(len(new)) for state, new in zip(behind, hidden, strict=True)]
        keys, values = self._graphs.context(np.concatenate(hidden), np.concatenate(positions))
        first = 0
        for state, new in zip(behind, hidden, strict=True):
            rows, end = slice(first, first + len(new)), state.stored + len(new)
            state.keys, state.values = _grown(state.keys, end), _grown(state.values, end)
            state.keys[:, :, state.stored : end] = keys[rows].transpose(1, 2, 0, 3)
            state.values[:, :, state.stored : end] = values[rows].transpose(1, 2, 0, 3)
            state.stored, first = end, first + len(new)
            state.waiting.clear()

    def _feeds(self, states: Sequence[_State]) -> dict[str, np.ndarray]:
        info, graphs = self._info, self._graphs
        last = np.array([state.last for state in states], np.int64)
        block = np.full((len(states), info["block_size"]), info["mask_token_id"], np.int64)
        block[:, 0] = last
        longest = max(state.keys.shape[2] for state in states)
        places = np.arange(info["block_size"])
        positions = np.array([state.stored for state in states], np.int64)[:, None] + places
        feeds = {
            "embedded": graphs.embedding[block],
            "positions": positions,
            "keys": np.stack([_padded(state.keys, longest) for state in states]),
            "values": np.stack([_padded(state.values, longest) for state in states]),
            "mask": self._mask([state.stored for state in states], positions, longest),
        }
        return feeds | {"last": last} if info["method"] == "dspark" else feeds

    def _mask(self, stored: Sequence[int], positions: npt.NDArray[np.int64], longest: int) -> Floats:
        """float32 [S, 1, 1, B, longest + B]; see compile/heads/dflash.py."""
        block, window = self._info["block_size"], self._info["window"]
        rows = np.arange(longest)
        seen = np.broadcast_to((rows < np.array(stored)[:, None])[:, None], (len(stored), block, longest))
        if window is not None:
            seen = seen & (rows > positions[:, :, None] - window)
        places = np.arange(block)
        inside = places <= places[:, None] if self._info["causal"] else np.ones((block, block), bool)
        whole = np.concatenate([seen, np.broadcast_to(inside, (len(stored), block, block))], axis=2)
        return np.where(whole, np.float32(0), np.float32(-np.inf))[:, None, None]


def _grown(rows: Floats, needed: int) -> Floats:
    """The same rows [L, KV, capacity, d] with room for `needed`."""
    return _padded(rows, -(-needed // _BUCKET) * _BUCKET) if needed > rows.shape[2] else rows


def _padded(rows: Floats, capacity: int) -> Floats:
    """The same rows with exactly that capacity, zeros behind them."""
    if rows.shape[2] == capacity:
        return rows
    padded = np.zeros((*rows.shape[:2], capacity, rows.shape[3]), np.float32)
    padded[:, :, : rows.shape[2]] = rows
    return padded


def open_dflash(speculation: Mapping[str, Any], engine: Path, *, threads: int | None = None) -> DFlashDrafter:
    """Open the head inside an engine folder. Raises SetupError when it is not there."""
    info = read_info(engine, speculation["method"])
    context, block = (HeadGraph(engine, name, threads) for name in (CONTEXT, BLOCK))
    graphs = DFlashGraphs(
        lambda hidden, positions: context(hidden=hidden, positions=positions),
        lambda feeds: block(**feeds),
        shared_embedding(engine, info),
    )
    return DFlashDrafter(graphs, info, min_confidence=speculation.get("min_token_probability", 0.0))
