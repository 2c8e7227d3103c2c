"""The seam between the decode loop and whatever guesses the next tokens: specs, drafts and the `Drafter`
protocol.

A drafter only proposes. Nothing it does can change a request's output; it can only make it arrive sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trtspec.values import GenerationRequest
from trtspec.verify.tree import TokenTree

State = Any  # what a drafter keeps for one sequence; only the drafter looks inside


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """What a mechanism is and needs, for planning; reading it imports nothing heavy.

    method: its name in a config. paper: where it comes from. shape: of its proposals. deterministic:
    proposals are functions of the context, not draws from a distribution q. hidden_states: it reads the
    target's: "none", the "last" layer's, or "several" layers' (EngineSpec.taps). own_engine: it runs a model
    of its own with its own KV cache. trained_head: it needs weights trained for this target. backends: engine
    backends that run it. tensorrt_llm: `decoding_type` of TensorRT-LLM ≥ 1.3, None where it has none.
    """

    method: str
    title: str
    paper: str | None
    shape: Literal["chain", "tree"]
    deterministic: bool
    backends: tuple[str, ...]
    tensorrt_llm: str | None = None
    hidden_states: Literal["none", "last", "several"] = "none"
    own_engine: bool = False
    trained_head: bool = False


NO_TREE = TokenTree((), ())


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposal. q: None for a deterministic one; else float [n, V], the distribution each node's token
    was drawn from, given its parent and its earlier siblings: for draws without replacement their tokens have
    q = 0 there, for draws with replacement every draw is a node of its own, equal tokens included, or a row of q of
    its own that `draws` assigns.

    draws: the node that each row of q drew, children of one parent in the order they are judged; empty where row i
    drew node i. Several independent drafts that agree then share their nodes (SpecInfer, 2305.09781, section 3).

    probe: a tree below the same root that is run in the same step and never judged, committed or counted: what the
    target would say after each of its nodes is given back to `Probing.learn`.
    """

    tree: TokenTree
    q: npt.NDArray[np.floating] | None = None
    draws: tuple[int, ...] = ()
    probe: TokenTree = NO_TREE

    @classmethod
    def chain(cls, tokens: Sequence[int], q: npt.NDArray[np.floating] | None = None) -> Draft:
        return cls(TokenTree.chain(tokens), q)


NOTHING = Draft(NO_TREE)


@dataclass(frozen=True, slots=True)
class Ask:
    """Room for one sequence's proposal in the coming step: at most `nodes` tokens on at most `branches`
    paths, none of them longer than `depth`. A probe has as many tokens as are left of `rows`, and paths as are left
    of `branches`. slot: the sequence's in the target's engine, for a drafter that shares its KV."""

    state: State
    nodes: int
    depth: int
    branches: int = 1
    rows: int = 0
    slot: int = -1


def check_draft(draft: Draft, ask: Ask, vocab_size: int) -> None:
    """Raise ValueError when a drafter's answer to `ask` does not keep its contract."""
    tree, q = draft.tree, draft.q
    branches = 1 if tree.is_chain else len(tree.leaves())
    if len(tree) > ask.nodes or tree.depth > ask.depth or branches > ask.branches:
        raise ValueError(
            f"the drafter proposed {len(tree)} tokens on {branches} paths, {tree.depth} deep, "
            f"where at most {ask.nodes} on {ask.branches}, {ask.depth} deep, were asked for"
        )
    if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
        raise ValueError(f"the drafter proposed a token outside the vocabulary of {vocab_size}")
    if draft.probe:
        both = tree.beside(draft.probe)
        if len(both) > ask.rows or (not both.is_chain and len(both.leaves()) > ask.branches):
            raise ValueError(
                f"the drafter's proposal and probe have {len(both)} tokens on {len(both.leaves())} paths, "
                f"where at most {ask.rows} on {ask.branches} were asked for"
            )
        if not 0 <= min(draft.probe.tokens) <= max(draft.probe.tokens) < vocab_size:
            raise ValueError(f"the drafter probes a token outside the vocabulary of {vocab_size}")
    drawn = draft.draws or range(len(tree))
    if q is not None and (q.ndim != 2 or len(q) != len(drawn) or q.shape[1] < vocab_size):
        raise ValueError(
            f"the drafter gave q of shape {q.shape} for {len(drawn)} draws of {vocab_size} tokens"
        )
    if set(drawn) != set(range(len(tree))):
        raise ValueError(f"the drafter's draws name nodes {sorted(set(drawn))} of a tree of {len(tree)}")


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for many sequences at once.

    The loop calls `open` when a request gets its slot, `observe` after every engine step that stored rows of
    it, `propose` before every step that can take drafts, and `release` when it leaves.
    """

    spec: DrafterSpec

    def open(self, request: GenerationRequest, seed: int) -> State:
        """Start a sequence. Its known tokens are request.prompt[:1]; `observe` brings all others in order."""

    def observe(self, state: State, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        """Committed tokens, each following a row the target has just run.

        hidden: float32 [len(tokens), taps·hidden_size], the target's states at those rows: state i is the one
        tokens[i] was predicted from. Valid during the call only; empty where the engine captures none.
        """

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        """One draft for each ask, possibly empty. rows: rows the step runs without any draft, all sequences
        together.

        Asking again before the next `observe` gives the same answer.
        """

    def release(self, state: State) -> None:
        """The sequence has ended."""

    def close(self) -> None:
        """Release what the drafter holds; calling it twice is harmless."""


@runtime_checkable
class Probing(Protocol):
    """What a drafter has besides when its drafts carry probes."""

    def learn(self, state: State, following: Sequence[int]) -> None:
        """The target's most likely token after the last known one and after each node of the probe that was run.

        Called before the `observe` of the same step, and not for a sequence that ends with it.
        """
