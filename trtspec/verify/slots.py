"""Which sequence is in which slot of the engine, and what a new one finds there already.

A slot keeps the KV of the last sequence that was in it. A new request starts from the longest prefix of its prompt
that any slot holds, a running one's too: a chat template, a system prompt, the earlier turns of a conversation. With
an exact engine those rows are bit for bit the ones its own prefill would write, so nothing but time changes. (Time can
tell, though: whoever times answers learns that a beginning was sent before. `serving.reuse_prefixes: false` ends that.)
"""

from __future__ import annotations

import numpy as np

from trtspec.engines.base import Engine
from trtspec.verify.sequence import Sequence


class Slots:
    """The first `count` slots of `engine`. reuse: whether new sequences start from what the slots hold."""

    def __init__(self, engine: Engine, count: int, *, reuse: bool) -> None:
        self._engine = engine
        self._reuse = reuse
        self._occupants: list[Sequence | None] = [
            None
        ] * count  # ended ones stay until another takes the slot
        self._last_taken = [0] * count
        self._taken = 0

    def __len__(self) -> int:
        return len(self._occupants)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have not ended, by slot."""
        return [s for s in self._occupants if s is not None and not s.ended]

    @property
    def free(self) -> bool:
        """Whether another sequence fits."""
        return any(_is_free(s) for s in self._occupants)

    def take(self, sequence: Sequence) -> None:
        """Put a new sequence in a free slot: sets its `slot`, and `stored` to the prompt rows it need not compute.

        It continues the slot that holds its prefix where that is most of what the slot holds, and otherwise gets a
        copy of it in the free slot that was taken longest ago.
        """
        free = [slot for slot, occupant in enumerate(self._occupants) if _is_free(occupant)]
        target = min(free, key=lambda slot: self._last_taken[slot])
        source, length = self._longest_prefix(sequence)
        if length and source in free and 2 * length > self._occupants[source].stored:
            target = source
        elif length and source != target:
            self._engine.copy(source, target, length)
        sequence.stored = sequence.cached = length
        sequence.slot = target
        self._occupants[target] = sequence
        self._taken += 1
        self._last_taken[target] = self._taken

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, int]:
        """The slot that holds most of a prompt, and how many rows of it; 0 rows where there is none."""
        if not self._reuse:
            return 0, 0
        lengths = [0 if holder is None else self._shared_rows(holder, sequence) for holder in self._occupants]
        longest = max(lengths)
        return lengths.index(longest), longest

    def _shared_rows(self, holder: Sequence, sequence: Sequence) -> int:
        """Rows of `holder` that `sequence` can start from; its last prompt row is computed always, for the logits."""
        most = min(holder.stored, len(sequence.prompt) - 1)
        held = np.concatenate((holder.prompt, np.array(holder.tokens, np.int64)))[:most]
        differs = held != sequence.prompt[:most]
        shared = int(differs.argmax()) if differs.any() else most
        return shared if self._engine.spec.rewinds or shared == holder.stored else 0


def _is_free(occupant: Sequence | None) -> bool:
    return occupant is None or occupant.ended
