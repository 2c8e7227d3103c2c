"""Trees by rank: the searched one is the best there is, a fixed one is cut to the room, paths are bounded."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.drafters.rank_tree import expected_acceptance, fixed_shape, search_tree, searched_shape
from trtspec.errors import ConfigError
from trtspec.verify.tree import TokenTree

HITS = ((0.6, 0.2, 0.1), (0.5, 0.25, 0.05), (0.4, 0.3, 0.0))


def best_by_trying(hits: tuple[tuple[float, ...], ...], nodes: int, depth: int) -> float:
    """The longest expected acceptance of any tree with so many nodes."""
    paths = [
        path
        for length in range(1, depth + 1)
        for path in product(range(len(hits[0])), repeat=length)
        if length <= len(hits)
    ]
    likelihood = dict.fromkeys(paths, 1.0)
    for path in paths:
        for level, rank in enumerate(path):
            likelihood[path] *= hits[level][rank]
    found = 1.0
    for chosen in combinations(paths, min(nodes, len(paths))):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            found = max(found, 1 + sum(likelihood[p] for p in chosen))
    return found


@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (3, 2), (4, 2), (5, 2), (4, 1)])
def test_no_tree_of_that_size_expects_more(nodes: int, depth: int) -> None:
    hits = HITS[:2]
    tree = search_tree(hits, nodes, depth, branches=nodes)
    assert expected_acceptance(hits, tree) == pytest.approx(best_by_trying(hits, nodes, depth))


def test_the_tree_by_hand() -> None:
    # .6, .6·.5, .2 (a second path), .6·.25 (a third), .6·.5·.4 below the first
    tree = search_tree(HITS, 5, 3, branches=4)
    assert tree == TokenTree((0, 0, 1, 1, 0), (-1, 0, -1, 0, 1))
    assert expected_acceptance(HITS, tree) == pytest.approx(1 + 0.6 + 0.3 + 0.2 + 0.15 + 0.12)


def test_one_branch_is_the_chain_of_first_candidates() -> None:
    assert search_tree(HITS, 8, 8, branches=1) == TokenTree.chain((0, 0, 0))


def test_candidates_that_were_never_right_are_not_drafted() -> None:
    assert search_tree(((0.0, 0.0), (0.9, 0.1)), 4, 2, branches=4) == TokenTree((), ())
    assert search_tree(HITS, 100, 3, branches=100).tokens.count(2) < len(search_tree(HITS, 100, 3, 100)) / 3


@settings(max_examples=100, deadline=None)
@given(
    hits=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4),
    nodes=st.integers(0, 12),
    depth=st.integers(0, 5),
    branches=st.integers(1, 5),
    choices=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8),
)
def test_every_tree_fits_the_room(hits, nodes, depth, branches, choices) -> None:
    for shape in (searched_shape(hits), fixed_shape(choices, 4)):
        tree = shape(nodes, depth, branches)
        assert len(tree) <= nodes
        assert tree.depth <= depth
        assert not len(tree) or len(tree.leaves()) <= branches


def test_a_fixed_tree_keeps_its_shallow_nodes() -> None:
    shape = fixed_shape([[0, 0, 0], [1], [2, 0]], 3)
    assert shape(6, 3, 4) == TokenTree((0, 1, 2, 0, 0, 0), (-1, -1, -1, 0, 2, 3))
    assert shape(4, 3, 4) == TokenTree((0, 1, 2, 0), (-1, -1, -1, 0))
    assert shape(6, 2, 2) == TokenTree((0, 1, 0), (-1, -1, 0))
    with pytest.raises(ConfigError, match="4 deep, there are 3 heads"):
        fixed_shape([[0, 0, 0, 0]], 3)
