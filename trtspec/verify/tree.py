"""Token trees: what a verify step checks in one forward pass (SpecInfer, 2305.09781, section 4).

A tree hangs below the sequence's last committed token, the *root*, which is no node of it. Node i has token
tokens[i] and parent parents[i]: another node, or -1 for the root. Parents come before children. A chain is
the tree whose node i has parent i - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """Candidate continuations sharing their common beginnings. Raises ValueError when a parent does not come
    first.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents come before their children")

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """One path."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(ROOT, len(tokens) - 1)))

    @classmethod
    def merge(cls, chains: Iterable[Sequence[int]]) -> TokenTree:
        """The prefix tree of several chains: nodes in order of first appearance, siblings distinct."""
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for chain in chains:
            node = ROOT
            for token in chain:
                child = known.setdefault((node, token), len(tokens))
                if child == len(tokens):
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def beside(self, other: TokenTree) -> TokenTree:
        """Both trees below the same root: this one's nodes, then the other's."""
        first = len(self)
        moved = (parent if parent == ROOT else parent + first for parent in other.parents)
        return TokenTree(self.tokens + other.tokens, (*self.parents, *moved))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root: 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Length of the longest path, 0 for the empty tree."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Child nodes by parent, ascending; leaves are absent."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in found.items()}

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from a child of the root down to `node`; empty for the root."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))

    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, ascending."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self)) if node not in inner)

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """bool [n, n]: entry (i, j) says whether node i sees node j, its ancestors and itself."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                mask[node] |= mask[parent]
        return mask
