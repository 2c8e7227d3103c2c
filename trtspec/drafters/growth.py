"""How a draft tree grows out of a head's scores, level by level, and which of its nodes are proposed.

*Dynamic* (EAGLE-2, 2406.16858, section 4): at each level the `width` nodes of highest confidence are expanded, each
into its `width` likeliest tokens; in the end the nodes of highest confidence are kept. A node's confidence is the
product of the head's probabilities along its path, which estimates how likely it is accepted. A chain is width 1.

*Static* (EAGLE-1, 2401.15077, section 3.3): a tree of fixed ranks (see rank_tree.py), whatever the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtspec.drafters.rank_tree import TreeShape
from trtspec.verify.tree import ROOT, TokenTree

# The tree of EAGLE-1's own code: up to four candidates in the first position, fewer behind unlikely ones.
_RANKS = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
EAGLE_CHOICES = tuple(tuple(map(int, path)) for path in _RANKS.split())


class Vocabulary:
    """Which target tokens a head's output rows stand for. d2t: see `Head`; ids from vocab_size on are never drafted."""

    def __init__(self, vocab_size: int, d2t: npt.NDArray[np.int64] | None, rows: int) -> None:
        self.ids = np.arange(rows) if d2t is None else np.arange(rows) + d2t
        self._excluded = np.flatnonzero(self.ids >= vocab_size)

    def likeliest(
        self, logits: npt.NDArray[np.float32], count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The `count` likeliest target ids of each row, likeliest first, and the log-probabilities the head gives them.

        logits: float32 [n, Vd]. Returns int64 [n, count], float64 [n, count]; ties fall to the lowest id.
        """
        logits = logits.astype(np.float64)
        if len(self._excluded):
            logits[:, self._excluded] = -np.inf
        count = min(count, logits.shape[1] - len(self._excluded))
        if count == 1:
            best = logits.argmax(axis=1)[:, None]
        else:
            best = np.sort(np.argpartition(-logits, count - 1, axis=1)[:, :count], axis=1)
            order = np.argsort(-np.take_along_axis(logits, best, axis=1), axis=1, kind="stable")
            best = np.take_along_axis(best, order, axis=1)
        top = logits.max(axis=1, keepdims=True)
        normaliser = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        return self.ids[best], np.take_along_axis(logits, best, axis=1) - normaliser


class Tree:
    """Nodes found so far; parents come before children. confidence: log of the product along the path."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.confidence: list[float] = []

    def add(self, token: int, parent: int, log_probability: float) -> int:
        """A new node below `parent`; its index."""
        above = 0.0 if parent == ROOT else self.confidence[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.confidence.append(above + log_probability)
        return len(self.tokens) - 1


class Growth(Protocol):
    """One draft's growth within its room: at most `nodes` nodes on `branches` paths of `depth`."""

    tree: Tree

    def extend(self, expanded: Sequence[int], logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the scores after `expanded` nodes, float32 [n, Vd]; the nodes whose scores are wanted next."""

    def proposal(self) -> TokenTree:
        """What is proposed in the end."""


class DynamicGrowth:
    """See the module. least: nodes of lower confidence (a probability) are never proposed."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        nodes: int,
        depth: int,
        branches: int,
        *,
        width: int = 1,
        least: float = 0.0,
    ) -> None:
        self.tree = Tree()
        self._vocabulary = vocabulary
        self._nodes, self._depth, self._branches = nodes, depth, branches
        self._width = min(width, branches)
        self._least = math.log(least) if least > 0 else -math.inf

    def extend(self, expanded: Sequence[int], logits: npt.NDArray[np.float32]) -> list[int]:
        tree, first = self.tree, len(self.tree.tokens)
        ids, scores = self._vocabulary.likeliest(logits, self._width)
        for node, tokens, log_probabilities in zip(expanded, ids.tolist(), scores.tolist(), strict=True):
            for token, log_probability in zip(tokens, log_probabilities, strict=True):
                tree.add(token, node, log_probability)
        if tree.depths[first] == self._depth:
            return []
        kept = self._kept()
        # A child is never more confident than its parent: below a node that is not kept now nothing ever will be.
        floor = tree.confidence[kept[-1]] if len(kept) == self._nodes else -math.inf
        return [node for node in kept if node >= first and tree.confidence[node] > floor][: self._width]

    def proposal(self) -> TokenTree:
        tree, kept = self.tree, self._kept()
        place = {ROOT: ROOT, **{node: index for index, node in enumerate(kept)}}
        return TokenTree(
            tuple(tree.tokens[node] for node in kept), tuple(place[tree.parents[node]] for node in kept)
        )

    def _kept(self) -> list[int]:
        """The most confident nodes, in that order; without those that would need a path too many, and all below."""
        tree, found, forked, leaves = self.tree, [], {ROOT}, 0
        for node in sorted(range(len(tree.tokens)), key=lambda n: (-tree.confidence[n], n)):
            if len(found) == self._nodes or tree.confidence[node] < self._least:
                break
            parent = tree.parents[node]
            forks = parent in forked
            if (parent != ROOT and parent not in found) or (forks and leaves == self._branches):
                continue
            leaves += forks
            forked.add(parent)
            found.append(node)
        return found


class StaticGrowth:
    """See the module. shape: gives the rank tree for a room."""

    def __init__(
        self, vocabulary: Vocabulary, nodes: int, depth: int, branches: int, shape: TreeShape
    ) -> None:
        self.tree = Tree()
        self._vocabulary = vocabulary
        self._ranks = shape(nodes, depth, branches)
        self._rank_node = {ROOT: ROOT}  # node of the draft → node of the rank tree

    def extend(self, expanded: Sequence[int], logits: npt.NDArray[np.float32]) -> list[int]:
        ranks, wanted = self._ranks, []
        below = [ranks.children.get(self._rank_node[node], ()) for node in expanded]
        most = max((ranks.tokens[child] for children in below for child in children), default=0)
        ids, scores = self._vocabulary.likeliest(logits, most + 1)
        for row, (node, children) in enumerate(zip(expanded, below, strict=True)):
            for child in children:
                rank = ranks.tokens[child]
                if rank >= ids.shape[1]:
                    continue
                added = self.tree.add(int(ids[row, rank]), node, float(scores[row, rank]))
                self._rank_node[added] = child
                if child in ranks.children:
                    wanted.append(added)
        return wanted

    def proposal(self) -> TokenTree:
        return TokenTree(tuple(self.tree.tokens), tuple(self.tree.parents))
