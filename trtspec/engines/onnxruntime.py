"""The `Engine` on ONNX Runtime's CPU kernels.

Every slot's KV lives in one array that ONNX Runtime reads and writes in place:

    cache float32 [layers, 2 (keys, values), slots, KV heads, capacity, head_dim]

Pages the kernels never touch are never committed by the operating system, so a large capacity costs address
space, not memory.

**Why attention never sees a single row.** With one query row the attention kernel takes a matrix-vector path whose
rounding differs from the matrix-matrix path in the last bit, and 8-bit activations amplify that bit into another
token. So a lone row gets a companion: itself again, one position on, whose KV the next step overwrites. Then each
row's logits are bit for bit the same for any number of rows, chunks and batch-mates. Float32 products have such a
path too, so a step with float32 weights has two rows at least. `numerics: fast` drops both: faster without
speculation, and no longer equal to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trtspec.engines.base import SlotLogits, SlotStep
from trtspec.engines.info import EngineInfo
from trtspec.errors import SetupError
from trtspec.verify.tree import TokenTree

GRAPH = "model.onnx"
RESERVE_ROWS = 1  # cache rows past the public limit, for the companion row


class _Binding(NamedTuple):
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
        try:
            import onnxruntime
        except ImportError as error:
            raise SetupError("onnxruntime is not installed", hint="pip install 'trtspec[cpu]'") from error
        self.info = EngineInfo.read(folder)
        self.spec = self.info.spec
        if max_batch is not None:
            self.spec = replace(self.spec, max_batch=min(max_batch, self.spec.max_batch))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(folder / graph), options, providers=["CPUExecutionProvider"]
        )
        self._ort_value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._least_queries = 2 if self.spec.exact else 1
        self._least_rows = self.info.least_rows if self.spec.exact else 1
        self._capacity = self.spec.max_seq_len + RESERVE_ROWS
        shape = (
            self.info.layers,
            2,
            self.spec.max_batch,
            self.info.kv_heads,
            self._capacity,
            self.info.head_dim,
        )
        self._cache = np.zeros(shape, np.float32)
        self._zeros = np.zeros(0, np.float32)
        self._bindings: dict[int, _Binding] = {}

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        """See `Engine.forward`. The slots of `steps` must be 0, 1, … in order (a dense prefix)."""
        lengths = [self._checked_length(index, step) for index, step in enumerate(steps)]
        valid = [max(length, self._least_queries) for length in lengths]
        width = max(valid)
        rows = max(sum(lengths), self._least_rows)
        tokens = np.zeros(rows, np.int64)
        places = np.zeros(rows, np.int64)
        padded = np.zeros((len(steps), width), np.int64)
        positions = np.zeros((len(steps), width), np.int64)
        wanted: list[int] = []
        columns = np.arange(width)
        offset = 0
        for index, (step, length) in enumerate(zip(steps, lengths)):
            tokens[offset : offset + length] = step.tokens
            places[offset : offset + length] = columns[:length] + index * width
            np.minimum(columns + offset, offset + length - 1, out=padded[index])
            np.minimum(columns + step.start, self._capacity - 1, out=positions[index])
            if step.parents is not None:
                positions[index, :length] = step.start - 1 + np.array(_tree(step).depths)
            wanted.extend(range(offset + step.logits_from, offset + length))
            offset += length
        totals = np.array([step.start + count for step, count in zip(steps, valid)], np.int32)
        longest = max(int(totals.max()), width)
        feeds = {
            "input_ids": tokens,
            "padded_rows": padded,
            "flat_places": places,
            "position_ids": positions,
            "total_lengths": totals - 1,
            "query_lengths": np.array(valid, np.int32),
            "longest": np.array(longest, np.int32),
            "attention_bias": self._mask(steps, width, longest),
            "logit_rows": np.array(wanted + [0] * (self._least_rows - len(wanted)), np.int64),
        }
        logits, hidden = self._run(feeds)
        return list(_split(steps, lengths, logits, hidden))

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """See `Engine.commit`."""
        if list(rows) == list(range(len(rows))):
            return
        slots = self._cache[:, :, slot]
        source = start + np.asarray(rows)
        slots[:, :, :, start : start + len(rows)] = slots[:, :, :, source]

    def move(self, source: int, destination: int, length: int) -> None:
        """See `Engine.move`."""
        self._cache[:, :, destination, :, :length] = self._cache[:, :, source, :, :length]

    def close(self) -> None:
        """See `Engine.close`."""
        self._bindings.clear()
        self._session = None

    def _checked_length(self, index: int, step: SlotStep) -> int:
        length = len(step.tokens)
        if step.slot != index or index >= self.spec.max_batch:
            raise ValueError(
                f"slot {step.slot} at place {index}: slots must be 0, 1, … below {self.spec.max_batch}"
            )
        if not 0 < length <= self.spec.max_rows:
            raise ValueError(f"{length} rows in slot {index}; a step takes 1 to {self.spec.max_rows}")
        if step.start < 0 or step.start + length > self.spec.max_seq_len:
            raise ValueError(
                f"slot {index}: rows {step.start}+{length} pass max_seq_len {self.spec.max_seq_len}"
            )
        return length

    def _mask(self, steps: Sequence[SlotStep], width: int, longest: int) -> np.ndarray:
        """float32 [B or 1, 1, width, longest]: zeros for chains, −inf on the non-ancestors of tree rows."""
        if all(step.parents is None for step in steps):
            size = width * longest
            if size > self._zeros.size:
                self._zeros = np.zeros(size, np.float32)
            return self._zeros[:size].reshape(1, 1, width, longest)
        mask = np.zeros((len(steps), 1, width, longest), np.float32)
        for row, step in enumerate(steps):
            if step.parents is not None:
                hidden = np.where(_tree(step).ancestor_mask(), np.float32(0), np.float32(-np.inf))
                length = len(step.tokens)
                mask[row, 0, :length, step.start : step.start + length] = hidden
        return mask

    def _run(self, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        batch = len(feeds["padded_rows"])
        if batch not in self._bindings:
            self._bindings[batch] = self._bind(batch)
        binding = self._bindings[batch]
        # ONNX Runtime aliases numpy memory and keeps no reference: `values` must outlive the run.
        values = {name: self._ort_value(array) for name, array in feeds.items()}
        for name, value in values.items():
            binding.io.bind_ortvalue_input(name, value)
        outputs = ["logits", "hidden"] if self.spec.taps else ["logits"]
        for name in outputs:
            binding.io.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding.io)
        results = binding.io.get_outputs()[-len(outputs) :]
        arrays = [result.numpy() for result in results]
        return arrays[0], arrays[1] if self.spec.taps else None

    def _bind(self, batch: int) -> _Binding:
        """The first `batch` slots of every layer's cache, bound as past and present alike: in place."""
        io, kept = self._session.io_binding(), []
        for layer in range(self.info.layers):
            for part, name in enumerate(("keys", "values")):
                value = self._ort_value(self._cache[layer, part, :batch])
                io.bind_ortvalue_input(f"past_{name}.{layer}", value)
                io.bind_ortvalue_output(f"{name}.{layer}", value)
                kept.append(value)
        return _Binding(io, kept)


def _tree(step: SlotStep) -> TokenTree:
    return TokenTree(tuple(step.tokens.tolist()), tuple(step.parents.tolist()))


def _split(
    steps: Sequence[SlotStep], lengths: Sequence[int], logits: np.ndarray, hidden: np.ndarray | None
) -> Iterator[SlotLogits]:
    """Each sequence's share of the ragged outputs."""
    row = wanted = 0
    for step, length in zip(steps, lengths):
        count = length - step.logits_from
        share = logits[wanted : wanted + count]
        yield SlotLogits(share) if hidden is None else SlotLogits(share, hidden[row : row + length])
        row, wanted = row + length, wanted + count
