"""QuantSpec's hierarchical KV cache (2502.10424, section 4): one store that a 4-bit draft and an 8-bit target read.

A sequence's rows lie in groups of G tokens. Of a sequence of p tokens the first `quantized_groups(p)` groups are read
in quantized form and the rest, G to 2G − 1 tokens (all of them below 2G), in full precision:

    codes      uint8    one byte an element: the upper half is its 4-bit value, the whole byte its 8-bit value
    scales     float32  value of one step of the byte; of a key by group and channel, of a value by token
    lows       float32  value of code 0, likewise
    recent     float32  the full-precision rows, position p at p mod their number

Upper half: asymmetric, u = round((x − min) / s) with s = (max − min) / 15. Lower half: what is left of x, in steps of
s / 16 and raised by 8. The draft reads the byte as if its lower half were 8, nothing left over.

**Exactness.** The row at position p reads `quantized_groups(p)` groups in quantized form, whatever else shares its
step: a function of p alone, so plain and speculative decoding see the same cache at every position. Therefore a pass
of the graph stays between two multiples of G. Rows that a target may still reject are never among those it quantizes
as long as a draft is shorter than G; and where a step that went past a multiple of G is taken back, the rows it
quantized are all still there in full precision. (The paper's prefill attends in full precision. Here a prompt's rows
read what a decoded text's would, so that how a prompt is cut, or whose answer it was, changes nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from trtspec.engines.base import SlotLogits, SlotStep

STEPS = 15  # of the upper half
SUBSTEPS = 16  # steps of the byte in one of the upper half
HALF = 8  # the lower half of a byte with nothing left over

KEYS, VALUES = 0, 1


class HierarchicalKv:
    """All sequences' keys and values: index KEYS or VALUES of the second axis of every array.

    codes uint8 [layers, 2, slots, KV heads, groups, G, head_dim].
    recent float32 [layers, 2, slots, KV heads, recent_rows, head_dim].
    key_scales, key_lows: float32 [layers, slots, KV heads, groups, 1, head_dim].
    value_scales, value_lows: float32 [layers, slots, KV heads, groups, G, 1].

    max_rows: the most rows of one step. Pages that nothing touches are never committed by the operating system.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        group: int,
        max_rows: int,
        max_seq_len: int,
    ) -> None:
        self.group = group
        # A step may be as long as max_rows, and has a companion row behind it.
        self.recent_rows = 2 * group + max_rows + 1
        groups = (max_seq_len + max_rows) // group + 1
        heads = (slots, kv_heads)
        self.codes = np.zeros((layers, 2, *heads, groups, group, head_dim), np.uint8)
        self.recent = np.zeros((layers, 2, *heads, self.recent_rows, head_dim), np.float32)
        self.key_scales = np.zeros((layers, *heads, groups, 1, head_dim), np.float32)
        self.key_lows = np.zeros_like(self.key_scales)
        self.value_scales = np.zeros((layers, *heads, groups, group, 1), np.float32)
        self.value_lows = np.zeros_like(self.value_scales)
        self._known = [0] * slots  # groups whose codes are those of the sequence
        self._end = [0] * slots  # one past the highest position in `recent`

    def quantized_groups(self, position: int) -> int:
        """Groups that the row at `position` reads in quantized form."""
        return quantized_groups(position, self.group)

    def lane(self, slot: int) -> int:
        """Where a slot's sequence lies along the axis of slots."""
        return slot

    def write_from(self, slot: int, start: int) -> None:
        """The next pass writes rows from `start` on; quantizes what they read in that form.

        Raises ValueError where a row they read in full precision is no longer held.
        """
        if start == 0:
            self._end[slot] = 0
        groups = self.quantized_groups(start)
        if self._end[slot] - self.recent_rows > groups * self.group:
            raise ValueError(
                f"slot {slot}: position {start} is too far back, its full-precision rows are gone"
            )
        first = min(self._known[slot], groups)
        for index in range(first, groups):
            self._quantize(slot, index)
        self._known[slot] = groups

    def recent_positions(self, start: int) -> np.ndarray:
        """int64: the positions before `start` that a pass from there reads in full precision."""
        return np.arange(self.quantized_groups(start) * self.group, start)

    def store(self, slot: int, positions: np.ndarray, rows: np.ndarray) -> None:
        """Keep a pass's rows: float32 [layers, 2, KV heads, len(positions), head_dim]."""
        self.recent[:, :, slot][:, :, :, positions % self.recent_rows] = rows
        self._end[slot] = max(self._end[slot], int(positions[-1]) + 1)

    def copy(self, source: int, destination: int, length: int) -> None:
        """The first `length` rows of one slot's sequence become another slot's."""
        groups = self.quantized_groups(length)
        for array in (self.key_scales, self.key_lows, self.value_scales, self.value_lows):
            array[:, destination, :, :groups] = array[:, source, :, :groups]
        self.codes[:, :, destination, :, :groups] = self.codes[:, :, source, :, :groups]
        self.recent[:, :, destination] = self.recent[:, :, source]
        self._known[destination] = min(self._known[source], groups)
        self._end[destination] = self._end[source]

    def _quantize(self, slot: int, index: int) -> None:
        """Group `index` of a slot, from its full-precision rows."""
        places = np.arange(index * self.group, (index + 1) * self.group) % self.recent_rows
        for part, axis, scales, lows in (
            (KEYS, -2, self.key_scales, self.key_lows),
            (VALUES, -1, self.value_scales, self.value_lows),
        ):
            coded = quantize(self.recent[:, part, slot][:, :, places], axis)
            self.codes[:, part, slot, :, index], scales[:, slot, :, index], lows[:, slot, :, index] = coded


def quantized_groups(position: int, group: int) -> int:
    """Groups that the row at `position` reads in quantized form."""
    return max(0, position // group - 1)


def in_pieces(
    steps: Sequence[SlotStep], group: int, forward: Callable[[Sequence[SlotStep]], list[SlotLogits]]
) -> list[SlotLogits]:
    """What `forward` gives for steps cut at the multiples of G: rows of one piece read the same groups in quantized
    form."""
    pieces = [list(_pieces(step, group)) for step in steps]
    if all(len(each) == 1 for each in pieces):
        return forward(steps)
    outputs: list[list[SlotLogits]] = [[] for _ in steps]
    for turn in range(max(map(len, pieces))):
        members = [index for index, each in enumerate(pieces) if turn < len(each)]
        for index, output in zip(members, forward([pieces[index][turn] for index in members]), strict=True):
            outputs[index].append(SlotLogits(output.logits.copy(), output.hidden.copy()))
    return [_joined(each) for each in outputs]


def _pieces(step: SlotStep, group: int) -> Iterator[SlotStep]:
    first = 0
    while first < len(step.tokens):
        start = step.start + first
        count = min(len(step.tokens) - first, group - start % group)
        wanted = min(max(step.logits_from - first, 0), count)
        yield replace(step, start=start, tokens=step.tokens[first : first + count], logits_from=wanted)
        first += count


def _joined(parts: Sequence[SlotLogits]) -> SlotLogits:
    """The output of a step from those of its pieces."""
    return SlotLogits(
        np.concatenate([part.logits for part in parts]), np.concatenate([part.hidden for part in parts])
    )


def quantize(rows: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, lows) of float32 rows whose elements along `axis` share a scale; the latter two have 1 there."""
    smallest = rows.min(axis, keepdims=True)
    step = (rows.max(axis, keepdims=True) - smallest) / np.float32(STEPS)
    step = np.where(step > 0, step, np.float32(1))
    upper = np.rint((rows - smallest) / step).clip(0, STEPS)
    scale = step / np.float32(SUBSTEPS)
    left = np.rint((rows - (upper * step + smallest)) / scale).clip(-HALF, HALF - 1)
    codes = (upper * SUBSTEPS + left + HALF).astype(np.uint8)
    return codes, scale, smallest - HALF * scale
