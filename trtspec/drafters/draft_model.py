"""An independent draft model (Leviathan et al., 2211.17192; Chen et al., 2302.01318): a small model with the
target's tokenizer writes the next tokens one by one, and the target judges them together.

The draft runs in an engine of its own, with one slot for each sequence. Its KV holds committed tokens first and
drafted ones behind them. Whatever the target rejects is never rolled back: of what was drafted, the rows the text
went on with stay, and the next step writes over the others.

**Sampling.** A greedy draft is a function of the context and has no q: the target compares it with its own draw.
A sampled one is drawn from q, the draft's distribution under the request's own top-k and top-p, at draft position
t by the random number of (seed, t, draw), and carries q for the rejection rule (see verify/acceptance.py). When to stop
drafting is decided before a token is drawn, never by which one it was: dropping unlikely draws would make q a lie.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.pairing import last_draft_length
from trtspec.drafters.base import NOTHING, Ask, Draft
from trtspec.drafters.catalog import spec_of
from trtspec.engines.base import Engine, SlotStep
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.probabilities import inverse_cdf, probs
from trtspec.verify.randomness import PositionRandom, Stream

DRAFT_FOLDER = "draft"  # of the draft's engine, inside the target's

Scores = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class DraftState:
    """One sequence. sampling: of the draft, None when it is greedy. tokens: all that are known.

    stored: rows of `tokens` in the draft's KV. speculated: drafted tokens whose rows follow them there. asked: for a
    draft since tokens last came.
    """

    slot: int
    prompt_length: int
    sampling: SamplingParams | None
    random: PositionRandom
    tokens: list[int]
    stored: int = 0
    speculated: list[int] = field(default_factory=list)
    asked: bool = False

    def take(self, tokens: Sequence[int]) -> None:
        """Committed tokens: rows of drafts that equal them are theirs."""
        kept = 0
        while kept < min(len(tokens), len(self.speculated)) and tokens[kept] == self.speculated[kept]:
            kept += 1
        self.stored += kept
        self.speculated.clear()
        self.tokens.extend(tokens)


@dataclass(slots=True, eq=False)
class _Proposal:
    """What grows token by token; `room` is the most it may have."""

    state: DraftState
    room: int
    tokens: list[int] = field(default_factory=list)
    q: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def draft(self) -> Draft:
        if not self.tokens:
            return NOTHING
        return Draft.chain(self.tokens, np.array(self.q) if self.q else None)


class DraftModelDrafter:
    """The `Drafter` of method draft_model.

    engine: the draft; owned, and closed with the drafter. vocab_size: ids the target's tokenizer knows; others are
    never proposed, and q is over these. temperature: of the draft, None for each request's own; where either is 0
    the draft is greedy. min_probability: a proposal stops where the draft gives its likeliest token less. special_ids:
    a draft ends with the first of them. draw: its number among drafts whose proposals are verified together and must
    be independent. Penalties of a request do not reach the draft.

    Raises ValueError for a draft that lacks some of the target's ids.
    """

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        *,
        temperature: float | None = None,
        min_probability: float = 0.0,
        special_ids: Collection[int] = (),
        draw: int = 0,
    ) -> None:
        if engine.spec.tokenizer_vocab_size < vocab_size:
            raise ValueError(
                f"the draft knows {engine.spec.tokenizer_vocab_size} token ids, the target's tokenizer {vocab_size}"
            )
        self.spec = replace(spec_of("draft_model"), deterministic=temperature == 0)
        self.engine = engine
        self.draw = draw
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._min_probability = min_probability
        self._special = frozenset(special_ids)
        self._free = list(range(engine.spec.max_batch))  # a heap: the lowest slots are the cheapest
        self._wanted = True  # drafts are being asked for

    def open(self, request: GenerationRequest, seed: int) -> DraftState:
        if not self._free:
            raise ValueError(f"all {self.engine.spec.max_batch} slots of the draft are taken")
        return DraftState(
            slot=heapq.heappop(self._free),
            prompt_length=len(request.prompt),
            sampling=self._draft_sampling(request.sampling),
            random=PositionRandom(seed),
            tokens=list(request.prompt[:1]),
        )

    def observe(self, state: DraftState, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        if len(state.tokens) > state.prompt_length and not state.asked:
            self._wanted = False  # a step that could have taken a draft was plain
        state.asked = False
        state.take(tokens)
        # A long prompt reaches the draft piece by piece, as it reaches the target, and stalls nobody. While drafting is
        # switched off it stays away: what is never asked for must cost nothing.
        prompt_goes_on = len(state.tokens) <= state.prompt_length
        if self._wanted and prompt_goes_on and len(state.tokens) <= self.engine.spec.max_seq_len:
            self._catch_up([state])

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        self._wanted = True
        for ask in asks:
            ask.state.asked = True
        proposals = [_Proposal(ask.state, self._room(ask)) for ask in asks]
        growing = [proposal for proposal in proposals if proposal.room]
        scores = self._catch_up([proposal.state for proposal in growing])
        while growing:
            growing = [p for p, row in zip(growing, scores, strict=True) if self._extend(p, row)]
            scores = self._follow(growing)
        return [proposal.draft() for proposal in proposals]

    def release(self, state: DraftState) -> None:
        heapq.heappush(self._free, state.slot)

    def close(self) -> None:
        self.engine.close()

    def _draft_sampling(self, sampling: SamplingParams) -> SamplingParams | None:
        temperature = sampling.temperature if self._temperature is None else self._temperature
        if 0 in (sampling.temperature, temperature):
            return None
        return replace(sampling, temperature=temperature)

    def _room(self, ask: Ask) -> int:
        limit = self.engine.spec.max_seq_len
        return last_draft_length(len(ask.state.tokens), limit, min(ask.nodes, ask.depth))

    def _catch_up(self, states: Sequence[DraftState]) -> list[Scores]:
        """Bring every state's KV up to its tokens; the draft's scores after the last one, for each."""
        scores: dict[int, Scores] = {}
        for state in states:
            state.speculated.clear()
            state.stored = min(state.stored, len(state.tokens) - 1)  # the last row gives the scores
        behind = list(states)
        while behind:
            steps = [self._piece(state) for state in behind]
            for state, step, output in zip(behind, steps, self.engine.forward(steps), strict=True):
                state.stored += len(step.tokens)
                if len(output.logits):
                    scores[state.slot] = output.logits[-1].copy()
            behind = [state for state in behind if state.slot not in scores]
        return [scores[state.slot] for state in states]

    def _piece(self, state: DraftState) -> SlotStep:
        rows = np.array(state.tokens[state.stored : state.stored + self.engine.spec.max_rows], np.int64)
        last = state.stored + len(rows) == len(state.tokens)
        return SlotStep(state.slot, state.stored, rows, logits_from=len(rows) - last)

    def _follow(self, growing: Sequence[_Proposal]) -> list[Scores]:
        """The draft's scores after each proposal's newest token."""
        if not growing:
            return []
        steps = []
        for proposal in growing:
            state, token = proposal.state, proposal.tokens[-1]
            row = state.stored + len(state.speculated)
            steps.append(SlotStep(state.slot, row, np.array([token], np.int64)))
            state.speculated.append(token)
        return [output.logits[-1] for output in self.engine.forward(steps)]

    def _extend(self, proposal: _Proposal, scores: Scores) -> bool:
        """Add the next token, unless the draft is too unsure of it; whether the proposal goes on."""
        state, scores = proposal.state, scores[: self._vocab_size]
        if state.sampling is None:
            if self._min_probability and _largest_probability(scores) < self._min_probability:
                return False
            token = int(scores.argmax())
        else:
            q = probs(scores, state.sampling)
            if q.max() < self._min_probability:
                return False
            position = len(state.tokens) - state.prompt_length + len(proposal.tokens)
            token = inverse_cdf(q, state.random.uniform(Stream.DRAFT, position, self.draw))
            proposal.q.append(q)
        proposal.tokens.append(token)
        return len(proposal.tokens) < proposal.room and token not in self._special


def _largest_probability(scores: Scores) -> float:
    return float(1 / np.exp(scores - scores.max()).sum())


def draft_folder(number: int | None) -> str:
    """Of a draft, in a build and of its engine in the target's: the one draft, or one of several by number from 0."""
    return DRAFT_FOLDER if number is None else f"{DRAFT_FOLDER}-{number}"


def open_draft_model(
    speculation: Mapping[str, Any],
    target: Path,
    *,
    max_batch: int | None,
    threads: int | None,
    special_ids: Collection[int],
    folder: str = DRAFT_FOLDER,
    draw: int = 0,
) -> DraftModelDrafter:
    """Open the draft in a folder of the engine folder `target`, for at most `max_batch` sequences (None: all its
    slots). draw: as of `DraftModelDrafter`.

    Raises SetupError when it is not there, ConfigError when its tokenizer is not the target's.
    """
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.vocabulary import check_draft_pair
    from trtspec.engines.info import EngineInfo
    from trtspec.engines.opening import open_engine

    place = target / folder
    vocab_size = EngineInfo.read(target).spec.tokenizer_vocab_size
    EngineInfo.read(place)  # says so when there is none
    check_draft_pair(read_facts(target / "config.json"), read_facts(place / "config.json"))
    return DraftModelDrafter(
        open_engine(place, max_batch=max_batch, threads=threads),
        vocab_size,
        temperature=speculation.get("draft_temperature"),
        min_probability=speculation.get("min_token_probability", 0.0),
        special_ids=special_ids,
        draw=draw,
    )
