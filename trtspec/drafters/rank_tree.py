"""Draft trees by rank: which of a head's likeliest tokens are tried after which.

A *rank tree* is a `TokenTree` that has ranks where a draft has tokens: a node of depth d with token r stands for the
r-th likeliest candidate (from 0) of the head for position d. Published Medusa trees are lists of such paths.

*Searched trees.* hits[d][r] is how often the candidate of rank r at depth d + 1 was the right one on text of the
target. Taking the ranks of different depths as independent, a node is accepted with the product of the hits along
its path, and the expected acceptance length is one more than the sum over all nodes. The tree with the largest sum
under a number of nodes is found by adding the likeliest node again and again (2401.10774, section 2.3.3: no node is
likelier than its parent, so what is added is always a tree).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heappop, heappush

from trtspec.checkpoints.heads import medusa_tree
from trtspec.verify.tree import ROOT, TokenTree

Hits = Sequence[Sequence[float]]

# A tree of at most `nodes` nodes, `depth` deep, with at most `branches` leaves.
TreeShape = Callable[[int, int, int], TokenTree]


def searched_shape(hits: Hits) -> TreeShape:
    """The rank tree with the longest expected acceptance for every room there is. hits: see the module."""
    return lru_cache(maxsize=256)(lambda nodes, depth, branches: search_tree(hits, nodes, depth, branches))


def fixed_shape(choices: Sequence[Sequence[int]], heads: int) -> TreeShape:
    """The tree of `choices` (see `medusa_tree`), its shallowest nodes where it does not fit whole.

    Raises ConfigError for choices deeper than there are heads.
    """
    whole = TokenTree.merge(medusa_tree(choices, heads))
    return lru_cache(maxsize=256)(lambda nodes, depth, branches: _cut(whole, nodes, depth, branches))


def search_tree(hits: Hits, nodes: int, depth: int, branches: int) -> TokenTree:
    """The likeliest nodes, in the order they were found. One that would need a path too many is left out with all
    below it, and so is one that was never right.
    """
    ranks: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    inner: set[int] = set()
    leaves = offered = 0
    heap: list[tuple[float, int, int, int]] = []

    def offer_children(parent: int, likelihood: float, level: int) -> None:
        nonlocal offered
        for rank, hit in enumerate(hits[level]):
            if hit > 0:
                heappush(heap, (-likelihood * hit, offered, parent, rank))
                offered += 1

    if depth > 0 and hits:
        offer_children(ROOT, 1.0, 0)
    while heap and len(ranks) < nodes:
        likelihood, _, parent, rank = heappop(heap)
        forks = parent in inner or parent == ROOT
        if forks and leaves == branches:
            continue
        leaves += forks
        inner.add(parent)
        node, level = len(ranks), 1 if parent == ROOT else depths[parent] + 1
        ranks.append(rank)
        parents.append(parent)
        depths.append(level)
        if level < min(depth, len(hits)):
            offer_children(node, -likelihood, level)
    return TokenTree(tuple(ranks), tuple(parents))


def expected_acceptance(hits: Hits, tree: TokenTree) -> float:
    """Expected tokens of a step that verifies a rank tree, the target's own token counted."""
    reached: list[float] = []
    for node, (rank, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = 1.0 if parent == ROOT else reached[parent]
        reached.append(above * hits[tree.depths[node] - 1][rank])
    return 1.0 + sum(reached)


def _cut(tree: TokenTree, nodes: int, depth: int, branches: int) -> TokenTree:
    """The first nodes of a tree in its own order, as far as they fit."""
    place = {ROOT: ROOT}
    inner: set[int] = set()
    leaves = 0
    for node, parent in enumerate(tree.parents):
        if len(place) > nodes:
            break
        if parent not in place or tree.depths[node] > depth:
            continue
        forks = parent in inner or parent == ROOT
        if forks and leaves == branches:
            continue
        leaves += forks
        inner.add(parent)
        place[node] = len(place) - 1
    kept = [node for node in place if node != ROOT]
    return TokenTree(
        tuple(tree.tokens[node] for node in kept), tuple(place[tree.parents[node]] for node in kept)
    )
