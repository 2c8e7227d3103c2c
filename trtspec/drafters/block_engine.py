"""What runs a DFlash or DSpark head: rows of each sequence's context, and blocks behind them.

Rows of committed tokens alone are kept; a block's own are written over by whatever comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trtspec.drafters.head_engine import HeadGraph, shared_embedding
from trtspec.engines.info import EngineInfo

CONTEXT, BLOCK = "context.onnx", "block.onnx"  # in the head's folder
_BUCKET = 64  # context rows are allocated and attended over in multiples of this

Floats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Context:
    """One sequence in a `BlockEngine`. stored: tokens whose rows are there. rows: the engine's own."""

    rows: Any
    stored: int = 0


class BlockEngine(Protocol):
    """What a drafter runs."""

    def open(self) -> Context:
        """A sequence without rows. Raises ValueError where the engine has no more room."""

    def extend(self, contexts: Sequence[Context], hidden: Sequence[Floats]) -> None:
        """Make the rows of each sequence's next tokens. hidden: their captured states, float32 [n, W]."""

    def draft(self, contexts: Sequence[Context], last: Sequence[int]) -> Sequence[np.ndarray]:
        """Tokens [S, D] of a block behind each sequence, whose last known token is not in its context yet, and with a
        confidence head confidence [S, D]."""

    def release(self, context: Context) -> None:
        """The sequence has ended."""

    def close(self) -> None:
        """Release the runtime."""


@dataclass(slots=True)
class _Rows:
    """keys, values: [L, KV, capacity, d]."""

    keys: Floats
    values: Floats


class DFlashGraphs(NamedTuple):
    """context: (hidden [N, W], positions [N]) to keys and values [N, L, KV, d]. block: the inputs of block.onnx by name
    to tokens [S, D] and, with a confidence head, confidence [S, D]. embedding: [V, H].
    """

    context: Callable[[Floats, npt.NDArray[np.int64]], Sequence[Floats]]
    block: Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]
    embedding: Floats


class OnnxBlockEngine:
    """The `BlockEngine` on a CPU. info: head.json."""

    def __init__(self, graphs: DFlashGraphs, info: Mapping[str, Any]) -> None:
        self._graphs, self._info = graphs, info

    def open(self) -> Context:
        info = self._info
        empty = np.zeros((info["layers"], info["kv_heads"], 0, info["head_dim"]), np.float32)
        return Context(_Rows(empty, empty))

    def extend(self, contexts: Sequence[Context], hidden: Sequence[Floats]) -> None:
        pairs = list(zip(contexts, hidden, strict=True))
        positions = [context.stored + np.arange(len(new)) for context, new in pairs]
        keys, values = self._graphs.context(np.concatenate(hidden), np.concatenate(positions))
        first = 0
        for context, new in pairs:
            made, rows = slice(first, first + len(new)), context.rows
            places = slice(context.stored, context.stored + len(new))
            rows.keys, rows.values = _grown(rows.keys, places.stop), _grown(rows.values, places.stop)
            rows.keys[:, :, places] = keys[made].transpose(1, 2, 0, 3)
            rows.values[:, :, places] = values[made].transpose(1, 2, 0, 3)
            context.stored, first = places.stop, made.stop

    def draft(self, contexts: Sequence[Context], last: Sequence[int]) -> Sequence[np.ndarray]:
        info, graphs = self._info, self._graphs
        block = blocks_of(info, last)
        longest = max(context.rows.keys.shape[2] for context in contexts)
        stored = np.array([context.stored for context in contexts], np.int64)
        positions = stored[:, None] + np.arange(info["block_size"])
        feeds = {
            "embedded": graphs.embedding[block],
            "positions": positions,
            "keys": np.stack([_padded(context.rows.keys, longest) for context in contexts]),
            "values": np.stack([_padded(context.rows.values, longest) for context in contexts]),
            "mask": self._mask(stored, positions, longest),
        }
        return graphs.block(feeds | {"last": block[:, 0]} if info["method"] == "dspark" else feeds)

    def release(self, context: Context) -> None:
        """Nothing is shared: the rows go with their last reference."""

    def close(self) -> None:
        """Nothing to release: the graphs go with their last reference."""

    def _mask(self, stored: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], longest: int) -> Floats:
        """float32 [S, 1, 1, B, longest + B]; see compile/heads/dflash.py."""
        block, window = self._info["block_size"], self._info["window"]
        rows = np.arange(longest)
        seen = np.broadcast_to((rows < stored[:, None])[:, None], (len(stored), block, longest))
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


def blocks_of(info: Mapping[str, Any], last: Sequence[int]) -> npt.NDArray[np.int64]:
    """Tokens of each sequence's block, [S, B]: the last known one, and mask tokens."""
    block = np.full((len(last), info["block_size"]), info["mask_token_id"], np.int64)
    block[:, 0] = last
    return block


def open_block_engine(engine: Path, info: Mapping[str, Any], threads: int | None = None) -> BlockEngine:
    """The head in the engine folder `engine`, on the backend it was built for. info: head.json."""
    if EngineInfo.read(engine).backend == "tensorrt":
        from trtspec.drafters.block_engine_tensorrt import TensorRtBlockEngine

        return TensorRtBlockEngine(engine, info)
    context, block = (HeadGraph(engine, name, threads) for name in (CONTEXT, BLOCK))
    graphs = DFlashGraphs(
        lambda hidden, positions: context(hidden=hidden, positions=positions),
        lambda feeds: block(**feeds),
        shared_embedding(engine, info),
    )
    return OnnxBlockEngine(graphs, info)
