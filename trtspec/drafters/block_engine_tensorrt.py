"""A DFlash or DSpark head on TensorRT: two plans over one KV cache (see compile/heads/dflash_tensorrt.py)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtspec.drafters.block_engine import BLOCK, CONTEXT, Context, Floats, blocks_of
from trtspec.drafters.head_engine import plan_folder
from trtspec.engines import tensorrt
from trtspec.engines.tensorrt_info import TensorRtInfo

if TYPE_CHECKING:
    import torch

_STEPS, _PROMPT = 0, 1  # profiles of the context's plan


class TensorRtBlockEngine:
    """The `BlockEngine` on TensorRT; `Context.rows` is a slot. Opens the head in the engine folder `engine`.

    info: head.json. What is raised: as of a target's engine.
    """

    def __init__(self, engine: Path, info: Mapping[str, Any]) -> None:
        import torch

        self._info = info
        self._context, self._block = (_Plan(plan_folder(engine, name)) for name in (CONTEXT, BLOCK))
        shapes, device = self._block.shapes, self._block.device
        slots = shapes.profiles[0].batch
        self._free = list(range(slots))  # a heap: the lowest slots are the cheapest
        self._cache = torch.zeros(
            (info["layers"], 2, slots, info["kv_heads"], shapes.capacity, info["head_dim"]),
            dtype=getattr(torch, shapes.cache_dtype),
            device=device,
        )
        by_draft = (slots, info["drafts"])
        self._results = {"tokens": torch.zeros(by_draft, dtype=torch.int32, device=device)}
        if info["confidence"]:
            self._results["confidence"] = torch.zeros(by_draft, device=device)

    def open(self) -> Context:
        if not self._free:
            raise ValueError("all slots of the head are taken")
        return Context(heapq.heappop(self._free))

    def extend(self, contexts: Sequence[Context], hidden: Sequence[Floats]) -> None:
        """Rows of a step are made for all sequences together, those of a prompt one sequence at a time."""
        steps, prompt = self._context.shapes.profiles
        rest = []
        for context, states in zip(contexts, hidden, strict=True):
            while len(states) > steps.rows:
                self._extend(_PROMPT, [(context, states[: prompt.rows])], offset=context.rows)
                states = states[prompt.rows :]
            if len(states):
                rest.append((context, states))
        if rest:
            self._extend(_STEPS, rest)

    def draft(self, contexts: Sequence[Context], last: Sequence[int]) -> Sequence[np.ndarray]:
        shapes, size = self._block.shapes, self._info["block_size"]
        (profile,) = shapes.profiles
        lanes = [context.rows for context in contexts]
        stored = np.array([context.stored for context in contexts], np.int64)
        tokens, positions = np.zeros((2, profile.batch, size), np.int64)
        keys, queries = np.zeros((2, profile.batch), np.int32)
        starts = np.full(profile.batch, shapes.capacity - size)  # of idle slots: behind all that is read
        tokens[lanes] = blocks_of(self._info, last)
        positions[lanes] = stored[:, None] + np.arange(size)
        starts[lanes], keys[lanes], queries[lanes] = stored, stored + size, size
        feeds = {
            "input_ids": tokens,
            "position_ids": positions,
            "write_starts": starts,
            "kv_lengths": keys,
            "query_lengths": queries,
        }
        if shapes.trees:
            whole = tensorrt.packed(np.ones((size, size), np.bool_), size)
            feeds["tree_mask"] = np.tile(whole, (profile.batch, 1, 1))
        self._block.run(0, feeds, self._cache_of(0, profile.batch), self._results)
        return [result.cpu().numpy()[lanes] for result in self._results.values()]

    def release(self, context: Context) -> None:
        heapq.heappush(self._free, context.rows)

    def close(self) -> None:
        self._context.close()
        self._block.close()

    def _extend(self, index: int, pieces: Sequence[tuple[Context, Floats]], offset: int = 0) -> None:
        """Run the next rows of some sequences on one profile, whose first one is slot `offset`."""
        profile = self._context.shapes.profiles[index]
        captured = np.zeros((profile.batch, profile.rows, pieces[0][1].shape[1]), np.float32)
        positions = np.zeros((profile.batch, profile.rows), np.int64)
        starts = np.full(profile.batch, self._block.shapes.capacity - profile.rows)
        for context, states in pieces:
            lane = context.rows - offset
            captured[lane, : len(states)] = states
            # Padding is written too, behind the sequence's rows.
            places = context.stored + np.arange(profile.rows)
            positions[lane] = np.minimum(places, self._info["max_positions"] - 1)
            starts[lane] = context.stored
            context.stored += len(states)
        feeds = {"captured": captured, "position_ids": positions, "write_starts": starts}
        self._context.run(index, feeds, self._cache_of(offset, profile.batch), {})

    def _cache_of(self, slot: int, count: int) -> dict[str, torch.Tensor]:
        """The KV of `count` slots from `slot` on, by the names of the graphs' outputs."""
        cache = self._cache[:, :, slot : slot + count]
        parts = enumerate(("keys", "values"))
        return {f"{name}.{layer}": cache[layer, i] for i, name in parts for layer in range(len(cache))}


class _Plan:
    """One of the two. What it reads lies in memory that stays where it is, as a CUDA graph needs."""

    def __init__(self, folder: Path) -> None:
        self.shapes = TensorRtInfo.read(folder)
        self._runner = tensorrt.PlanRunner(folder, self.shapes)
        self.device = self._runner.device
        self._inputs: dict[int, dict[str, torch.Tensor]] = {}

    def run(
        self,
        profile: int,
        feeds: Mapping[str, np.ndarray],
        cache: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor],
    ) -> None:
        """Fill `results`, and write the rows of this run into `cache`."""
        import torch

        given = {name: torch.from_numpy(array) for name, array in feeds.items()}
        if profile not in self._inputs:
            self._inputs[profile] = {
                name: torch.empty_like(values, device=self.device) for name, values in given.items()
            }
        inputs = self._inputs[profile]
        for name, values in given.items():
            inputs[name].copy_(values)
        past = {f"past_{name}": rows for name, rows in cache.items()}
        self._runner.run(profile, {**inputs, **past}, {**results, **cache})

    def close(self) -> None:
        self._runner.close()
