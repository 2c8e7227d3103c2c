"""REST: draft what followed the last tokens in a datastore of text (2311.08252).

The longest suffix of the text so far that occurs in the datastore is looked up, and the continuations of its
occurrences form a trie weighted by how many of them pass through each node. The draft is the trie's most frequent
part (section 3.2): nodes in order of falling count, which are prefixes of each other's paths because no node counts
more than its parent. The trie is never built: a node's children are counted when it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import Ask, Draft, DrafterSpec
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.datastore import Datastore
from trtspec.drafters.policy import Acceptance, Candidate, DraftPolicy
from trtspec.values import GenerationRequest
from trtspec.verify.tree import ROOT, TokenTree

# One token alone says little of what follows; the paper's own retrieval stops at two as well.
_SHORTEST_MATCH = 2
# Occurrences that are looked at, as in the paper's own code; of more, an even sample.
_MOST_OCCURRENCES = 5000


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a datastore offers after a match of `match` tokens. shares: of all continuations, those through a node."""

    tree: TokenTree
    shares: tuple[float, ...]
    match: int


@dataclass(slots=True)
class _State:
    context: tuple[int, ...]
    acceptance: Acceptance
    retrieved: Retrieved | None = None


class RestDrafter:
    """The `Drafter` of method rest. max_ngram: longest suffix that is looked up. tree_size: most nodes of a draft.
    tree: whether a draft may branch.

    policy: how many of them are worth verifying, by the share of continuations through each and by how often this
    request's retrieved tokens were right before; the default drafts all that is asked for.
    """

    def __init__(
        self,
        datastore: Datastore,
        *,
        max_ngram: int = 16,
        tree_size: int = 64,
        tree: bool = True,
        policy: DraftPolicy | None = None,
    ) -> None:
        self.spec: DrafterSpec = replace(spec_of("rest"), shape="tree" if tree else "chain")
        self._datastore = datastore
        self._max_ngram = max_ngram
        self._tree_size = tree_size
        self._policy = policy or DraftPolicy()

    def open(self, request: GenerationRequest, seed: int) -> _State:
        return _State(request.prompt[:1], Acceptance())

    def observe(self, state: _State, tokens: Sequence[int], hidden: npt.NDArray[np.float32]) -> None:
        if state.retrieved is not None:
            state.acceptance.learn(_judged(state.retrieved, tokens), tokens)
            state.retrieved = None
        state.context = (*state.context, *tokens)[-self._max_ngram :]

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        for ask in asks:
            ask.state.retrieved = self._retrieve(ask)
        offers = [
            (survival, owner, node)
            for owner, ask in enumerate(asks)
            for node, survival in enumerate(_survivals(ask.state))
        ]
        # Stable, and a parent survives at least as often as its child: what is taken is a tree.
        offers.sort(key=lambda offer: -offer[0])
        worth = self._policy.worth([survival for survival, _, _ in offers], len(asks), rows)
        taken: list[list[int]] = [[] for _ in asks]
        for _, owner, node in offers[:worth]:
            taken[owner].append(node)
        return [
            Draft(_part(ask.state.retrieved.tree, sorted(nodes)))
            for ask, nodes in zip(asks, taken, strict=True)
        ]

    def release(self, state: _State) -> None:
        """Nothing is shared: the state goes with its last reference."""

    def close(self) -> None:
        """Nothing to release: the mapped file goes with its last reference."""

    def _retrieve(self, ask: Ask) -> Retrieved:
        shortest = min(_SHORTEST_MATCH, self._max_ngram)
        match, occurrences = self._datastore.longest_suffix(ask.state.context, shortest)
        following = self._datastore.positions(occurrences, _MOST_OCCURRENCES) + match
        nodes = min(ask.nodes, self._tree_size)
        branches = ask.branches if self.spec.shape == "tree" else 1
        tree, counts = most_frequent(self._datastore, following, nodes, ask.depth, branches)
        return Retrieved(tree, tuple(count / len(following) for count in counts), match)


def most_frequent(
    datastore: Datastore, following: npt.NDArray[np.int64], nodes: int, depth: int, branches: int
) -> tuple[TokenTree, tuple[int, ...]]:
    """The tree of the most frequent beginnings of the texts at the positions `following`, and each node's count.

    Nodes come in order of falling count, equal ones as they are found, a parent before its children. A node that
    would need one more path than `branches` is left out with all below it, as is what lies deeper than `depth`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    depths: list[int] = []
    inner: set[int] = set()
    leaves = 0
    heap: list[tuple[int, int, int, int, npt.NDArray[np.int64]]] = []
    offered = 0

    def offer_children(parent: int, positions: npt.NDArray[np.int64]) -> None:
        nonlocal offered
        values, times = np.unique(datastore.tokens[positions], return_counts=True)
        for index in np.argsort(-times, kind="stable")[: nodes + 1]:  # one of them may be END
            if values[index] != datastore.end:
                heappush(heap, (-int(times[index]), offered, parent, int(values[index]), positions))
                offered += 1

    if nodes and depth and len(following):
        offer_children(ROOT, following)
    while heap and len(tokens) < nodes:
        count, _, parent, token, positions = heappop(heap)
        forks = parent in inner or parent == ROOT
        if forks and leaves == branches:
            continue
        leaves += forks
        inner.add(parent)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        counts.append(-count)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        if depths[node] < depth:
            offer_children(node, positions[datastore.tokens[positions] == token] + 1)
    return TokenTree(tuple(tokens), tuple(parents)), tuple(counts)


def _survivals(state: _State) -> list[float]:
    """For each retrieved node the probability that it is accepted with all above it: its share of the continuations,
    if the datastore knows what comes at all, which a request learns by match length as it does for copied drafts.
    """
    retrieved = state.retrieved
    known = [1.0]
    for length in range(retrieved.match, retrieved.match + retrieved.tree.depth):
        known.append(known[-1] * state.acceptance.estimate(length))
    return [share * known[d] for share, d in zip(retrieved.shares, retrieved.tree.depths, strict=True)]


def _judged(retrieved: Retrieved, committed: Sequence[int]) -> Candidate:
    """The retrieved tokens that the committed ones confirm, and where they leave the tree one that they do not."""
    tree, path, node = retrieved.tree, [], ROOT
    for token in committed:
        children = tree.children.get(node, ())
        if not children:
            break
        node = next((child for child in children if tree.tokens[child] == token), children[0])
        path.append(tree.tokens[node])
        if path[-1] != token:
            break
    return Candidate(tuple(path), retrieved.match)


def _part(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The tree of some nodes, ascending, with every parent of one among them."""
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
    return TokenTree(
        tuple(tree.tokens[node] for node in nodes), tuple(place[tree.parents[node]] for node in nodes)
    )
