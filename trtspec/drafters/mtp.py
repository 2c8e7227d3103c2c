"""Multi-token prediction in the DeepSeek-V3 form (2412.19437, section 2.2): module k drafts the k-th token ahead.

Row i of module k (from 0) pairs token i + 1 + k with a state: for module 0 the target's at token i, after its final
norm, for the next the one that module k − 1 gave at the same row. So all modules run over the same rows, one token
further on each, and the last k rows of module k stand on drafted tokens: they are made again when the target has
judged those. Past its depth the last module goes on by itself, from its own state one row before, as EAGLE does.

Proposals have no q: the target compares them with its own draws, which keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.drafters.base import NOTHING, Ask, Draft
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.eagle import PairDrafter, PairState, open_vocabulary
from trtspec.drafters.growth import DynamicGrowth, Vocabulary
from trtspec.drafters.pair_engine import PairEngine, PairStep, States
from trtspec.engines.base import SlotLogits
from trtspec.values import GenerationRequest
from trtspec.verify.tree import ROOT


@dataclass(slots=True, eq=False)
class _Module:
    """One sequence in a module after the first. stored: rows on known tokens. pending: states of the rows after."""

    stored: int = 0
    pending: list[States] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _State(PairState):
    """later: of the modules after the first."""

    later: list[_Module] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Growing:
    """A draft that grows. outputs: of the module that ran last, at its last rows."""

    state: _State
    growth: DynamicGrowth
    outputs: States
    wanted: list[int]


class MtpDrafter(PairDrafter):
    """The `Drafter` of method mtp. engines: the modules, in order; owned, and closed with the drafter.

    least: drafts end where the product of the modules' probabilities falls below this. special_ids: a draft ends with
    the first of them.
    """

    def __init__(
        self,
        engines: Sequence[PairEngine],
        vocabulary: Vocabulary,
        *,
        least: float = 0.0,
        special_ids: Collection[int] = (),
    ) -> None:
        super().__init__(spec_of("mtp"), engines[0])
        self._engines = tuple(engines)
        self._vocabulary = vocabulary
        self._least = least
        self._special = frozenset(special_ids)

    def open(self, request: GenerationRequest, seed: int) -> _State:
        base = super().open(request, seed)
        later = [_Module() for _ in self._engines[1:]]
        return _State(base.slot, base.prompt_length, base.tokens, later=later)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        rooms = [min(self._room(ask), ask.nodes) for ask in asks]
        self._feed([ask.state for ask, room in zip(asks, rooms, strict=True) if room])
        growing = {i: self._start(asks[i].state, room) for i, room in enumerate(rooms) if room}
        ahead = 0
        while running := [draft for draft in growing.values() if self._goes_on(draft)]:
            ahead += 1
            engine = self._engines[min(ahead, len(self._engines) - 1)]
            steps = [self._step(draft, ahead) for draft in running]
            for draft, output in zip(running, engine.forward(steps), strict=True):
                draft.outputs = output.hidden.copy()
                draft.wanted = draft.growth.extend(draft.wanted, output.logits)
        return [Draft(growing[i].growth.proposal()) if i in growing else NOTHING for i in range(len(asks))]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _start(self, state: _State, room: int) -> _Growing:
        growth = DynamicGrowth(self._vocabulary, room, room, 1, least=self._least)
        wanted = growth.extend([ROOT], state.scored.logits[-1:])
        return _Growing(state, growth, state.scored.hidden[-1:], wanted)

    def _goes_on(self, draft: _Growing) -> bool:
        return bool(draft.wanted) and draft.growth.tree.tokens[-1] not in self._special

    def _step(self, draft: _Growing, ahead: int) -> PairStep:
        """Rows for the token after `ahead` drafted ones."""
        state, drafted = draft.state, draft.growth.tree.tokens
        if ahead >= len(self._engines):  # past the depth
            start, states = state.rows + ahead - len(self._engines), draft.outputs[-1:]
        else:
            known = state.later[ahead - 1].pending
            states = np.concatenate([*known, *([draft.outputs] if ahead > 1 else [])])
            start = state.rows - len(states)
        tokens = np.array(drafted[-len(states) :], np.int64)
        return PairStep(state.slot, start, tokens, logits_from=len(tokens) - 1, states=states, recycled=True)

    def _feed(self, states: Sequence[PairState]) -> None:
        super()._feed(states)
        for index, engine in enumerate(self._engines[1:], start=1):
            while behind := [s for s in states if s.later[index - 1].stored < s.rows - index]:
                steps = [self._later_piece(state, index) for state in behind]
                for state, step, output in zip(behind, steps, engine.forward(steps), strict=True):
                    state.later[index - 1].stored += len(step.tokens)
                    self._hand_on(state, index, output)

    def _later_piece(self, state: _State, index: int) -> PairStep:
        """Rows on known tokens that a later module has not run; the last state stays pending."""
        module = state.later[index - 1]
        pending, first = np.concatenate(module.pending), module.stored
        count = min(state.rows - index - first, self.engine.spec.max_rows)
        module.pending[:] = [pending[count:]] if count < len(pending) else []
        tokens = np.array(state.tokens[first + 1 + index : first + 1 + index + count], np.int64)
        return PairStep(state.slot, first, tokens, logits_from=count, states=pending[:count], recycled=True)

    def _ran(self, state: _State, output: SlotLogits) -> None:
        self._hand_on(state, 0, output)

    def _hand_on(self, state: _State, index: int, output: SlotLogits) -> None:
        """What a module gave at known rows is the next one's state there."""
        if index < len(state.later):
            state.later[index].pending.append(output.hidden.copy())


def open_mtp(
    speculation: Mapping[str, Any],
    engine: Path,
    *,
    slots: int | None = None,
    threads: int | None = None,
    special_ids: Collection[int] = (),
) -> MtpDrafter:
    """Open the modules inside the engine folder. Raises SetupError when they are not there."""
    from trtspec.drafters.head_engine import read_info
    from trtspec.drafters.pair_engine import open_pair_engine

    info = read_info(engine, "mtp")
    engines = [
        open_pair_engine(engine, info, module=index, max_batch=slots, threads=threads)
        for index in range(int(info["modules"]))
    ]
    return MtpDrafter(
        engines,
        open_vocabulary(engine, engines[0].spec.vocab_size),
        least=float(speculation.get("min_path_probability", 0.0)),
        special_ids=special_ids,
    )
