"""Token trees against the plainest possible definitions of the same things."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.verify.tree import ROOT, TokenTree


@st.composite
def trees(draw):
    count = draw(st.integers(0, 24))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(count))
    tokens = tuple(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    return TokenTree(tokens, parents)


def ancestors(tree, node):
    found = set()
    while node != ROOT:
        found.add(node)
        node = tree.parents[node]
    return found


@given(trees())
def test_mask_depth_path_and_leaves_follow_the_parent_links(tree):
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        above = ancestors(tree, node)
        assert set(np.flatnonzero(mask[node])) == above
        assert tree.depths[node] == len(above)
        assert tree.path(node) == tuple(sorted(above))  # parents come first, so a path ascends
    assert tree.depth == max((len(ancestors(tree, n)) for n in range(len(tree))), default=0)
    assert set(tree.leaves()) == {n for n in range(len(tree)) if n not in tree.parents}
    assert sorted(child for nodes in tree.children.values() for child in nodes) == list(range(len(tree)))
    assert tree.is_chain == all(len(ancestors(tree, n)) == n + 1 for n in range(len(tree)))


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8))
def test_merging_chains_keeps_each_beginning_once(chains):
    tree = TokenTree.merge(chains)
    beginnings = {tuple(chain[:n]) for chain in chains for n in range(1, len(chain) + 1)}
    paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    assert len(paths) == len(set(paths))
    assert set(paths) == beginnings


def test_a_chain_is_a_tree():
    tree = TokenTree.chain([7, 7, 8])
    assert tree.is_chain
    assert tree == TokenTree((7, 7, 8), (ROOT, 0, 1))
    assert (tree.ancestor_mask() == np.tri(3, dtype=bool)).all()
    assert TokenTree((), ()).depth == 0


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((1,), (0,)), ((1, 2), (ROOT, 1)), ((1, 2), (ROOT, -2)), ((1, 2), (ROOT,))],
    ids=["its own", "a later one", "below the root", "missing"],
)
def test_parents_that_do_not_come_first_are_refused(tokens, parents):
    with pytest.raises(ValueError, match="parent"):
        TokenTree(tokens, parents)


def test_two_trees_stand_beside_each_other_below_one_root():
    first, second = TokenTree.merge([[1, 2], [3]]), TokenTree.merge([[4, 5], [4, 6]])
    both = first.beside(second)
    assert both.tokens == first.tokens + second.tokens
    assert [[both.tokens[n] for n in both.path(leaf)] for leaf in both.leaves()] == [
        [1, 2], [3], [4, 5], [4, 6],
    ]  # fmt: skip
    empty = TokenTree((), ())
    assert first.beside(empty) == empty.beside(first) == first
