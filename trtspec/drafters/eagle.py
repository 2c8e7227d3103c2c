"""EAGLE (2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840) and P-EAGLE (2602.01469).

A head of one layer reads the target's own states beside the tokens: row i pairs token i + 1 with the state that token
was predicted from, and scores token i + 2. Past the last known token it takes its own output for the state that the
target has not computed yet. When the target has judged a draft, the accepted tokens' rows are made again, from the
states it gave then; what the head made up is never kept.

The mechanisms differ in the state (EAGLE-1, -2: the last, after the final norm; EAGLE-3: of several layers, fused) and
in the tree (EAGLE-1: static; EAGLE-2, -3: dynamic), see growth.py. P-EAGLE does not take its output back: positions
whose state is unknown get one that was learned for that, and all tokens come out of one pass, as a chain.

Proposals have no q: the target compares them with its own draws, which keeps its distribution.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.pairing import last_draft_length
from trtspec.drafters.base import NOTHING, Ask, Draft, DrafterSpec
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.growth import EAGLE_CHOICES, DynamicGrowth, Growth, StaticGrowth, Vocabulary
from trtspec.drafters.pair_engine import PairEngine, PairStep, States
from trtspec.drafters.rank_tree import fixed_shape
from trtspec.engines.base import SlotLogits
from trtspec.values import GenerationRequest
from trtspec.verify.tree import ROOT, TokenTree

# (nodes, depth, branches) → the growth of one draft.
OpenGrowth = Callable[[int, int, int], Growth]


@dataclass(slots=True, eq=False)
class PairState:
    """One sequence. tokens: all that are known. stored: rows in the head's KV that the target's states made.

    pending: captured states [·, W] of the rows after those, in order. scored: what the head gave after the last row,
    until there are new ones: logits and its output. over: it has outgrown the head's context.
    """

    slot: int
    prompt_length: int
    tokens: list[int]
    stored: int = 0
    pending: list[States] = field(default_factory=list)
    scored: SlotLogits | None = None
    over: bool = False

    @property
    def rows(self) -> int:
        """Pairs that are known: each token but the first with the state before it."""
        return len(self.tokens) - 1


@dataclass(slots=True, eq=False)
class _Growing:
    """A draft that grows. outputs: of the head at each node that was run, and at the last known row for ROOT.

    place: of each node that was run, its row behind the committed ones. wanted: nodes to be run next.
    """

    state: PairState
    growth: Growth
    outputs: dict[int, States]
    place: dict[int, int] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)

    def step(self) -> PairStep:
        """Rows for the wanted nodes; each sees the committed rows, its ancestors and itself."""
        tree, first = self.growth.tree, len(self.place)
        for node in self.wanted:
            self.place[node] = len(self.place)
        rows = np.array([tree.tokens[node] for node in self.wanted], np.int64)
        states = np.stack([self.outputs[tree.parents[node]] for node in self.wanted])
        start = self.state.rows + first
        if len(self.wanted) == 1 and first == tree.depths[self.wanted[0]] - 1:
            return PairStep(self.state.slot, start, rows, states=states, recycled=True)  # a chain so far
        sees = np.zeros((len(rows), len(self.place)), np.bool_)
        for row, node in enumerate(self.wanted):
            while node != ROOT:
                sees[row, self.place[node]] = True
                node = tree.parents[node]
        positions = self.state.rows - 1 + np.array([tree.depths[node] for node in self.wanted], np.int64)
        return PairStep(
            self.state.slot, start, rows, states=states, recycled=True, sees=sees, positions=positions
        )

    def take(self, output: SlotLogits) -> None:
        """The head's answer to `step`."""
        self.outputs |= {node: output.hidden[row].copy() for row, node in enumerate(self.wanted)}
        self.wanted = self.growth.extend(self.wanted, output.logits)


class PairDrafter:
    """What drafters with a head over pairs share: slots, and rows brought up to what the target has computed.

    engine: the head; owned, and closed with the drafter.
    """

    def __init__(self, spec: DrafterSpec, engine: PairEngine) -> None:
        self.spec = spec
        self.engine = engine
        self._free = list(range(engine.spec.max_batch))  # a heap: the lowest slots are the cheapest

    def open(self, request: GenerationRequest, seed: int) -> PairState:
        if not self._free:
            raise ValueError(f"all {self.engine.spec.max_batch} slots of the head are taken")
        return PairState(heapq.heappop(self._free), len(request.prompt), list(request.prompt[:1]))

    def observe(self, state: PairState, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        if len(tokens) != len(hidden):
            raise ValueError(
                f"{len(hidden)} hidden states came with {len(tokens)} tokens: the head needs each"
            )
        state.tokens.extend(tokens)
        state.scored = None
        state.over = state.over or state.rows > self.engine.spec.max_seq_len
        if state.over:
            state.pending.clear()
            return
        if len(tokens):
            state.pending.append(hidden.copy())
        # A long prompt reaches the head piece by piece, as it reaches the target, and is not kept in memory.
        if len(state.tokens) <= state.prompt_length:
            self._feed([state])

    def release(self, state: PairState) -> None:
        heapq.heappush(self._free, state.slot)

    def close(self) -> None:
        self.engine.close()

    def _room(self, ask: Ask) -> int:
        """Positions that may be drafted."""
        limit = self.engine.spec.max_seq_len
        return 0 if ask.state.over else last_draft_length(len(ask.state.tokens), limit, ask.depth)

    def _feed(self, states: Sequence[PairState]) -> None:
        """Run all pending rows; afterwards every state whose prompt is in is `scored`."""
        behind = [state for state in states if state.pending]
        while behind:
            steps = [self._piece(state) for state in behind]
            for state, step, output in zip(behind, steps, self.engine.forward(steps), strict=True):
                state.stored = min(step.start + len(step.tokens), state.rows)
                self._ran(state, output)
                if len(output.logits):
                    state.scored = SlotLogits(output.logits.copy(), output.hidden[step.logits_from :].copy())
            behind = [state for state in behind if state.stored < state.rows]

    def _ran(self, state: PairState, output: SlotLogits) -> None:
        """What the head gave at known rows; for drafters that take it further."""

    def _piece(self, state: PairState, ahead: int = 0) -> PairStep:
        """The next pending rows, so many that `ahead` rows more have room behind the last one."""
        pending = np.concatenate(state.pending)
        count, most = len(pending), self.engine.spec.max_rows
        if count + ahead > most:
            count = min(count - 1, most)
        state.pending[:] = [pending[count:]] if count < len(pending) else []
        first = state.stored
        tokens = np.array(state.tokens[first + 1 : first + 1 + count], np.int64)
        last = first + count == state.rows and len(state.tokens) > state.prompt_length
        return PairStep(state.slot, first, tokens, logits_from=count - last, states=pending[:count])


class EagleDrafter(PairDrafter):
    """The `Drafter` of eagle, eagle2 and eagle3. open_growth: of a tree for its room."""

    def __init__(
        self,
        spec: DrafterSpec,
        engine: PairEngine,
        open_growth: OpenGrowth,
        *,
        special_ids: Collection[int] = (),
    ) -> None:
        super().__init__(spec, engine)
        self._open_growth = open_growth
        self._special = frozenset(special_ids)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        rooms = [self._room(ask) for ask in asks]
        self._feed([ask.state for ask, room in zip(asks, rooms, strict=True) if room])
        growing = {
            index: self._start(ask, room)
            for index, (ask, room) in enumerate(zip(asks, rooms, strict=True))
            if room
        }
        running = self._fitting(growing.values())
        while running:
            for draft, output in zip(
                running, self.engine.forward([draft.step() for draft in running]), strict=True
            ):
                draft.take(output)
            running = self._fitting(running)
        return [
            Draft(growing[index].growth.proposal()) if index in growing else NOTHING
            for index in range(len(asks))
        ]

    def _start(self, ask: Ask, room: int) -> _Growing:
        branches = ask.branches if self.spec.shape == "tree" else 1
        growth = self._open_growth(ask.nodes, min(room, ask.nodes), branches)
        scored = ask.state.scored
        draft = _Growing(ask.state, growth, {ROOT: scored.hidden[-1]})
        draft.wanted = growth.extend([ROOT], scored.logits[-1:])
        return draft

    def _fitting(self, drafts: Collection[_Growing]) -> list[_Growing]:
        """Those that go on: a text does not go on behind its end, and no row lies past the head's context."""
        for draft in drafts:
            tokens = draft.growth.tree.tokens
            room = self.engine.spec.max_seq_len - draft.state.rows - len(draft.place)
            draft.wanted = [node for node in draft.wanted if tokens[node] not in self._special][:room]
        return [draft for draft in drafts if draft.wanted]


class ParallelDrafter(PairDrafter):
    """The `Drafter` of p_eagle. positions: tokens of one pass. mask_token_id, mask_hidden [W]: of those to come."""

    def __init__(
        self,
        spec: DrafterSpec,
        engine: PairEngine,
        vocabulary: Vocabulary,
        *,
        positions: int,
        mask_token_id: int,
        mask_hidden: States,
    ) -> None:
        super().__init__(spec, engine)
        self._vocabulary = vocabulary
        self._ahead = min(positions, engine.spec.max_rows) - 1
        self._mask_token, self._mask_hidden = mask_token_id, mask_hidden

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        rooms = [min(self._room(ask), ask.nodes) for ask in asks]
        self._feed([ask.state for ask, room in zip(asks, rooms, strict=True) if room])
        return [
            self._draft(ask.state, room) if room else NOTHING for ask, room in zip(asks, rooms, strict=True)
        ]

    def _draft(self, state: PairState, room: int) -> Draft:
        ids, _ = self._vocabulary.likeliest(state.scored.logits[:room], 1)
        return Draft(TokenTree.chain(ids[:, 0].tolist()))

    def _piece(self, state: PairState, ahead: int = 0) -> PairStep:
        ahead = min(self._ahead, self.engine.spec.max_seq_len - state.rows)
        step = super()._piece(state, ahead)
        if step.logits_from == len(step.tokens):  # the prompt goes on
            return step
        return replace(
            step,
            tokens=np.concatenate([step.tokens, np.full(ahead, self._mask_token)]),
            states=np.concatenate([step.states, np.tile(self._mask_hidden, (ahead, 1))]),
        )


def open_eagle(
    speculation: Mapping[str, Any],
    engine: Path,
    *,
    slots: int | None = None,
    threads: int | None = None,
    special_ids: Collection[int] = (),
) -> PairDrafter:
    """Open the head inside the engine folder. Raises SetupError when it is not there, or is another method's."""
    from trtspec.drafters.head_engine import HEAD_FOLDER, read_info
    from trtspec.drafters.pair_engine import MASK, open_pair_engine

    method = speculation["method"]
    info = read_info(engine, method)
    runner = open_pair_engine(engine, info, max_batch=slots, threads=threads)
    vocabulary = open_vocabulary(engine, runner.spec.vocab_size)
    spec = replace(spec_of(method), shape=speculation.get("shape", spec_of(method).shape))
    if method == "p_eagle":
        return ParallelDrafter(
            spec,
            runner,
            vocabulary,
            positions=int(speculation["draft_length"]),
            mask_token_id=int(info["mask_token_id"]),
            mask_hidden=np.load(engine / HEAD_FOLDER / MASK),
        )
    return EagleDrafter(spec, runner, growth_of(speculation, vocabulary, spec), special_ids=special_ids)


def open_vocabulary(engine: Path, rows: int) -> Vocabulary:
    """Of the head in an engine folder, whose output layer has so many rows."""
    from trtspec.drafters.head_engine import HEAD_FOLDER
    from trtspec.drafters.pair_engine import VOCABULARY
    from trtspec.engines.info import EngineInfo

    file = engine / HEAD_FOLDER / VOCABULARY
    known = EngineInfo.read(engine).spec.tokenizer_vocab_size
    return Vocabulary(known, np.load(file) if file.is_file() else None, rows)


def growth_of(speculation: Mapping[str, Any], vocabulary: Vocabulary, spec: DrafterSpec) -> OpenGrowth:
    """How the drafts of a config grow."""
    least = float(speculation.get("min_path_probability", 0.0))
    if spec.shape == "chain":
        return lambda nodes, depth, branches: DynamicGrowth(vocabulary, nodes, depth, 1, least=least)
    if spec.method == "eagle":
        choices = speculation.get("choices") or EAGLE_CHOICES
        shape = fixed_shape(choices, max(map(len, choices)))
        return lambda nodes, depth, branches: StaticGrowth(vocabulary, nodes, depth, branches, shape)
    width = int(speculation.get("top_k", 4))
    return lambda nodes, depth, branches: DynamicGrowth(
        vocabulary, nodes, depth, branches, width=width, least=least
    )
