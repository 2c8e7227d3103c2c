"""What Medusa and Hydra share: heads that each offer ranked candidates for one future position, combined into a tree.

The state that the target predicted its last token from is kept for each sequence; the heads are read from it. The
tree's ranks are fixed or searched (see rank_tree.py), its tokens are the candidates of those ranks. Proposals have no
q: the target compares them with its own draws, which keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import NOTHING, Ask, Draft, DrafterSpec
from trtspec.drafters.rank_tree import TreeShape, fixed_shape, searched_shape
from trtspec.values import GenerationRequest
from trtspec.verify.tree import TokenTree


class TokenHeads(Protocol):
    """The candidates of a method's heads."""

    def __call__(
        self, hidden: npt.NDArray[np.float32], last: Sequence[int], ranks: Sequence[TokenTree]
    ) -> list[list[int]]:
        """The token of every node of each rank tree.

        hidden: float32 [n, H], captured states; last: the tokens they gave; ranks: one rank tree for each.
        """


@dataclass(slots=True, eq=False)
class _State:
    """last: the last known token. hidden: float32 [H], the target's state it was predicted from; None before a step."""

    last: int
    hidden: npt.NDArray[np.float32] | None = None


class TokenHeadDrafter:
    """The `Drafter` of such a method. shape: of the tree for the room there is; tree: whether it may branch."""

    def __init__(self, spec: DrafterSpec, heads: TokenHeads, shape: TreeShape, *, tree: bool = True) -> None:
        self.spec = replace(spec, shape="tree" if tree else "chain")
        self._heads = heads
        self._shape = shape

    def open(self, request: GenerationRequest, seed: int) -> _State:
        return _State(request.prompt[0])

    def observe(self, state: _State, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        if len(tokens):
            state.last, state.hidden = int(tokens[-1]), hidden[-1].copy()

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        known = [ask for ask in asks if ask.state.hidden is not None]
        if not known:
            return [NOTHING for _ in asks]
        chain = self.spec.shape == "chain"
        ranks = [self._shape(ask.nodes, ask.depth, 1 if chain else ask.branches) for ask in known]
        hidden = np.stack([ask.state.hidden for ask in known])
        tokens = self._heads(hidden, [ask.state.last for ask in known], ranks)
        drafts = {
            id(ask): Draft(TokenTree(tuple(chosen), tree.parents))
            for ask, chosen, tree in zip(known, tokens, ranks, strict=True)
        }
        return [drafts.get(id(ask), NOTHING) for ask in asks]

    def release(self, state: _State) -> None:
        """Nothing is shared: the state goes with its last reference."""

    def close(self) -> None:
        """Nothing to release: the graphs go with their last reference."""


def open_token_heads(
    spec: DrafterSpec, heads: TokenHeads, speculation: Mapping[str, Any], info: Mapping[str, Any]
) -> TokenHeadDrafter:
    """The drafter a config asks for. info: head.json: its `hits` were measured at build for the heads that are
    compiled, of the `trained` ones as many as are ever drafted.
    """
    choices = speculation.get("choices")
    shape = fixed_shape(choices, info["trained"]) if choices else searched_shape(info["hits"])
    return TokenHeadDrafter(spec, heads, shape, tree=speculation.get("shape", "tree") == "tree")
