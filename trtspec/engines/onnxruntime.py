"""The `Engine` on ONNX Runtime's CPU kernels. KV is read and written in place (see kv_cache.py).

**Why attention never sees a single row.** With one query row the attention kernel takes a matrix-vector path whose
rounding differs from the matrix-matrix path in the last bit, and 8-bit activations amplify that bit into another
token. So a lone row gets a companion: itself again, one position on, whose KV the next step overwrites. Then each
row's logits are bit for bit the same for any number of rows, chunks and batch-mates. Float32 products have such a
path too, so a step with float32 weights has two rows at least. `numerics: fast` drops both: faster without
speculation, and no longer equal to it.

**Token trees.** Each row runs once through the projections. Attention sees every branch as a sequence of its own,
in a lane of the cache where it is contiguous. An engine whose graph has masks scores a tree in one lane under one:
cheaper, and equal to rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trtspec.engines.base import SlotLogits, SlotStep, check_steps
from trtspec.engines.cpu_session import open_session
from trtspec.engines.huge_pages import use_huge_pages
from trtspec.engines.info import EngineInfo
from trtspec.engines.kv_cache import KvCache
from trtspec.verify.tree import TokenTree

GRAPH = "model.onnx"
RESERVE_ROWS = 1  # positions past the public limit, for the companion of the last one


class Lane(NamedTuple):
    """Rows of one step that attention sees as one sequence: `rows` of the ragged step, stored from `start` on.

    positions: of each row. sees: for a masked tree, which rows each row sees.
    """

    index: int
    start: int
    rows: np.ndarray
    positions: np.ndarray
    sees: np.ndarray | None = None


class _Output(NamedTuple):
    array: np.ndarray
    value: Any


class _OutputBuffers:
    """Memory the graph writes its outputs to, the same at every step: one buffer a name, sized by the largest step."""

    def __init__(self, ort_value: Callable[[np.ndarray], Any]) -> None:
        self._ort_value = ort_value
        self._buffers: dict[str, np.ndarray] = {}
        self._outputs: dict[tuple[str, int], _Output] = {}

    def __call__(self, name: str, rows: int, width: int) -> _Output:
        """float32 [rows, width]; overwritten by the next call with this name."""
        if name not in self._buffers or rows > len(self._buffers[name]):
            self._buffers[name] = np.empty((rows, width), np.float32)
            self._outputs = {key: output for key, output in self._outputs.items() if key[0] != name}
        if (name, rows) not in self._outputs:
            array = self._buffers[name][:rows]
            self._outputs[name, rows] = _Output(array, self._ort_value(array))
        return self._outputs[name, rows]


class Binding(NamedTuple):
    io: Any
    kept: list[Any]  # the cache's OrtValues: a binding keeps no reference of its own


class OnnxRuntimeEngine:
    """Opens `folder` (engine.json, model.onnx and its weights).

    max_batch: fewer slots than the folder allows. threads: None takes the cores this process may use. graph: which
    graph of the folder. Raises SetupError when onnxruntime is missing or the folder is not an engine.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_batch: int | None = None,
        threads: int | None = None,
        graph: str = GRAPH,
    ) -> None:
        self.info = EngineInfo.read(folder)
        self.spec = self.info.spec
        if max_batch is not None:
            self.spec = replace(self.spec, max_batch=min(max_batch, self.spec.max_batch))
        self._session = open_session(folder / graph, threads)
        use_huge_pages()  # the session's weights; before the cache, whose pages shall come only as they are used
        from onnxruntime import OrtValue

        self._ort_value = OrtValue.ortvalue_from_numpy
        self._least_queries = 2 if self.spec.exact else 1
        self._least_rows = self.info.least_rows if self.spec.exact else 1
        self._masks = any(given.name == "attention_bias" for given in self._session.get_inputs())
        self._cache = self._open_cache()
        self._zeros = np.zeros(0, np.float32)
        self._bindings: dict[int, Binding] = {}
        self._outputs = _OutputBuffers(self._ort_value)
        self._paths: dict[int, list[np.ndarray]] = {}  # by slot, the branches of its last tree

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        """See `Engine.forward`. Cheapest when the slots of `steps` are the lowest ones: those between lie idle."""
        lanes: list[Lane] = []
        wanted: list[int] = []
        offset = 0
        check_steps(steps, self.spec)
        for step in steps:
            lanes += self._lanes(step, offset)
            wanted.extend(range(offset + step.logits_from, offset + len(step.tokens)))
            offset += len(step.tokens)
        logits, hidden = self._run(self._feeds(steps, lanes, wanted))
        return list(_split(steps, logits, hidden))

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """See `Engine.commit`."""
        rows = list(rows)
        if slot not in self._paths:
            if rows != list(range(len(rows))):
                self._cache.compact(slot, start, rows)
            return
        for branch, path in enumerate(self._paths[slot]):
            if path[: len(rows)].tolist() == rows:
                self._cache.adopt(slot, branch, start, len(rows))
                return
        raise ValueError(f"rows {rows} are no path of the tree in slot {slot}")

    def copy(self, source: int, destination: int, length: int) -> None:
        """See `Engine.copy`."""
        self._cache.copy(source, destination, length)

    def close(self) -> None:
        """See `Engine.close`."""
        self._bindings.clear()
        self._session = None

    def _open_cache(self) -> Any:
        """What `_lanes`, `commit`, `copy` and `_bind` work on."""
        return KvCache(
            layers=self.info.layers,
            slots=self.spec.max_batch,
            branches=1 if self._masks else self.spec.max_branches,
            kv_heads=self.info.kv_heads,
            # A step pads every lane to its widest, and the kernel wants that room behind each lane's own rows.
            capacity=self.spec.max_seq_len + max(self.spec.max_rows, self._least_queries),
            head_dim=self.info.head_dim,
        )

    def _lanes(self, step: SlotStep, offset: int) -> list[Lane]:
        """Where a step's rows meet the cache; the first of them is row `offset` of all."""
        rows = np.arange(offset, offset + len(step.tokens))
        cache, slot, start = self._cache, step.slot, step.start
        cache.write_from(slot, start)
        self._paths.pop(slot, None)
        if step.parents is None:
            return [Lane(cache.lane(slot), start, rows, start + np.arange(len(rows)))]
        tree = TokenTree(tuple(step.tokens.tolist()), tuple(step.parents.tolist()))
        leaves = tree.leaves()
        if len(leaves) > self.spec.max_branches:
            raise ValueError(f"slot {slot}: {len(leaves)} branches, at most {self.spec.max_branches} fit")
        if self._masks:
            positions = start - 1 + np.array(tree.depths)
            return [Lane(cache.lane(slot), start, rows, positions, tree.ancestor_mask())]
        paths = [np.array(tree.path(leaf)) for leaf in leaves]
        cache.spread(slot, len(paths), start)
        self._paths[slot] = paths
        return [
            Lane(cache.lane(slot, branch), start, rows[path], start + np.arange(len(path)))
            for branch, path in enumerate(paths)
        ]

    def _feeds(
        self, steps: Sequence[SlotStep], lanes: Sequence[Lane], wanted: list[int]
    ) -> dict[str, np.ndarray]:
        """The graph's inputs (see compile/export_onnx.py). Lanes in between that have no rows are left idle."""
        tokens = np.concatenate([step.tokens for step in steps])
        tokens = np.pad(tokens, (0, max(0, self._least_rows - len(tokens))))
        batch = max(lane.index for lane in lanes) + 1
        width = max(max(len(lane.rows) for lane in lanes), self._least_queries)
        places = np.zeros(len(tokens), np.int64)
        padded = np.zeros((batch, width), np.int64)
        positions = np.zeros((batch, width), np.int64)
        queries = np.zeros(batch, np.int32)
        totals = np.ones(batch, np.int32)
        for lane in lanes:
            count = len(lane.rows)
            places[lane.rows] = np.arange(count) + lane.index * width
            padded[lane.index, :count] = lane.rows
            padded[lane.index, count:] = lane.rows[-1]  # a lone row's companion among them
            positions[lane.index, :count] = lane.positions
            positions[lane.index, count:] = lane.start + count
            queries[lane.index] = max(count, self._least_queries)
            totals[lane.index] = lane.start + queries[lane.index]
        longest = max(int(totals.max()), width)
        feeds = {
            "input_ids": tokens,
            "padded_rows": padded,
            "flat_places": places,
            "position_ids": positions,
            "total_lengths": totals - 1,
            "query_lengths": queries,
            "longest": np.array(longest, np.int32),
            "logit_rows": np.array(wanted + [0] * (self._least_rows - len(wanted)), np.int64),
        }
        if self._masks:
            feeds["attention_bias"] = self._mask(lanes, batch, width, longest)
        return feeds

    def _mask(self, lanes: Sequence[Lane], batch: int, width: int, longest: int) -> np.ndarray:
        """float32 [batch or 1, 1, width, longest]: zeros, and −inf on the non-ancestors of masked trees."""
        if all(lane.sees is None for lane in lanes):
            size = width * longest
            if size > self._zeros.size:
                self._zeros = np.zeros(size, np.float32)
            return self._zeros[:size].reshape(1, 1, width, longest)
        mask = np.zeros((batch, 1, width, longest), np.float32)
        for lane in lanes:
            if lane.sees is not None:
                count = len(lane.rows)
                hidden = np.where(lane.sees, np.float32(0), np.float32(-np.inf))
                mask[lane.index, 0, :count, lane.start : lane.start + count] = hidden
        return mask

    def _run(self, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        binding = self._binding(len(feeds["padded_rows"]))
        # ONNX Runtime aliases numpy memory and keeps no reference: `values` must outlive the run.
        values = {name: self._ort_value(array) for name, array in feeds.items()}
        for name, value in values.items():
            binding.io.bind_ortvalue_input(name, value)
        logits = self._outputs("logits", len(feeds["logit_rows"]), self.spec.vocab_size)
        hidden = None
        if self.spec.taps:
            width = len(self.spec.taps) * self.spec.hidden_size
            hidden = self._outputs("hidden", len(feeds["flat_places"]), width)
            binding.io.bind_ortvalue_output("hidden", hidden.value)
        binding.io.bind_ortvalue_output("logits", logits.value)
        self._session.run_with_iobinding(binding.io)
        return logits.array, None if hidden is None else hidden.array

    def _binding(self, batch: int) -> Binding:
        if batch not in self._bindings:
            self._bindings[batch] = self._bind(batch)
        return self._bindings[batch]

    def _bind(self, batch: int) -> Binding:
        """The first `batch` lanes of every layer's cache, bound as past and present alike: in place."""
        io, kept = self._session.io_binding(), []
        for layer in range(self.info.layers):
            for part, name in enumerate(("keys", "values")):
                value = self._ort_value(self._cache.data[layer, part, :batch])
                io.bind_ortvalue_input(f"past_{name}.{layer}", value)
                io.bind_ortvalue_output(f"{name}.{layer}", value)
                kept.append(value)
        return Binding(io, kept)


def _split(steps: Sequence[SlotStep], logits: np.ndarray, hidden: np.ndarray | None) -> Iterator[SlotLogits]:
    """Each sequence's share of the ragged outputs."""
    row = wanted = 0
    for step in steps:
        length = len(step.tokens)
        count = length - step.logits_from
        share = logits[wanted : wanted + count]
        yield SlotLogits(share) if hidden is None else SlotLogits(share, hidden[row : row + length])
        row, wanted = row + length, wanted + count
