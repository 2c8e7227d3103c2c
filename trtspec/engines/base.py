"""The one seam between decoding and whatever computes logits: the `Engine` protocol.

An engine owns `max_batch` *slots*. A slot is one sequence's KV cache; its length is kept by the caller (the
decode loop), who says with every step where the new rows begin. Nothing is ever rolled back: rows past the
committed length are simply written over by the next step. After a tree step, `commit` moves the accepted
rows together.

    step input   one `SlotStep` per active sequence (ragged: each brings its own number of rows)
    step output  one `SlotLogits` per step, in the same order

**Exactness.** With `EngineSpec.exact` a row's logits depend only on its own token, position and visible
keys: bit for bit the same whatever other rows, slots or draft lengths share the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine can do; asked before use, never probed by calling.

    vocab_size: rows of the logits; token ids at or past `tokenizer_vocab_size` are padding and never emitted.
    max_batch: slots. max_seq_len: tokens a slot can hold, the public limit (any internal reserve is on top).
    max_rows: the most new rows one slot may bring in one step (longer prompts are fed in pieces).
    exact: see the module docstring. max_branches: the most leaves a `SlotStep`'s tree may have; 1 takes chains only.
    rewinds: a slot may go on from any row it holds, not only from the last committed one.
    hidden_size: width of one captured hidden state; taps: 0-based target layers whose output is captured, in order.
    """

    vocab_size: int
    tokenizer_vocab_size: int
    max_batch: int
    max_seq_len: int
    max_rows: int
    exact: bool = True
    max_branches: int = 1
    rewinds: bool = True
    hidden_size: int = 0
    taps: tuple[int, ...] = ()

    @property
    def trees(self) -> bool:
        """Whether steps may be token trees."""
        return self.max_branches > 1


@dataclass(frozen=True, slots=True)
class SlotStep:
    """New rows of one sequence.

    slot: 0 ≤ slot < max_batch. start: committed tokens in the slot; row i is stored at start + i.
    tokens: int64 [T]. parents: int64 [T], the row index of each row's parent or -1 for the committed prefix;
    None means a chain (parent of row i is i − 1). Parents come before children. Row i sees the committed
    prefix, its ancestors and itself; its position is start + depth.
    logits_from: logits are returned for rows ≥ logits_from only (a prompt needs just its last row);
    equal to T means none.
    """

    slot: int
    start: int
    tokens: Tokens
    parents: Tokens | None = None
    logits_from: int = 0


@dataclass(frozen=True, slots=True)
class SlotLogits:
    """logits: float32 [T − logits_from, vocab_size]; hidden: float32 [T, len(taps)·hidden_size], empty without taps.

    Both are valid until the engine's next `forward`; copy what must live longer.
    """

    logits: Floats
    hidden: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))


def check_steps(steps: Sequence[SlotStep], spec: EngineSpec) -> None:
    """Raise ValueError, naming what is wrong, for steps that `Engine.forward` cannot take."""
    if len({step.slot for step in steps}) < len(steps):
        raise ValueError("a slot takes part in a step once")
    for step in steps:
        slot, length = step.slot, len(step.tokens)
        if not 0 <= slot < spec.max_batch:
            raise ValueError(f"slot {slot}: this engine has slots 0 to {spec.max_batch - 1}")
        if not 0 < length <= spec.max_rows:
            raise ValueError(f"{length} rows in slot {slot}; a step takes 1 to {spec.max_rows}")
        if step.start < 0 or step.start + length > spec.max_seq_len:
            raise ValueError(f"slot {slot}: rows {step.start}+{length} pass max_seq_len {spec.max_seq_len}")
        if step.parents is not None and not spec.trees:
            raise ValueError(f"slot {slot}: a token tree, and this engine takes chains only")


@runtime_checkable
class Engine(Protocol):
    """Target or draft model on some runtime."""

    spec: EngineSpec

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        """Run one step for distinct slots. Writes KV at [start, start + T) of each slot.

        Raises ValueError when a step does not fit (see `check_steps`).
        """

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Keep `rows` (ascending row indices of the slot's last step) as the KV of positions start, start+1, …"""

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` KV rows of slot `source` to slot `destination` (which is overwritten)."""

    def close(self) -> None:
        """Release the runtime; calling it twice is harmless."""
