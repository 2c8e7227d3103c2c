"""What a token tree of D nodes emits, where acceptance is known for the likeliest candidate of each position alone.

How often the further candidates of a position are right is an assumption: what was published for heads and drafts
whose likeliest candidate is right as often (RANK_ACCURACY). Ranks of different depths count as independent, and the
acceptance length is one more than the sum over all nodes of the product along their paths (2401.10774, section 2.3.3).
With Medusa's published accuracies that gives 2.38 for its tree of 63 nodes, measured elsewhere at 2.32.

Static trees are the config's or the authors' own, cut to D nodes; searched trees are found as the drafter finds them
(drafters/rank_tree.py). A dynamic tree (EAGLE-2, -3) is judged by the best static one, which it beats as far as its
confidence tells contexts apart.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from trtspec.plan.acceptance import AcceptanceCurve

# Methods whose trees are made of the ranked candidates of each position. Retrieved text makes trees of its own.
RANK_TREES = ("medusa", "hydra", "eagle", "eagle2", "eagle3")
# Most leaves of a drafted token tree. The CPU engine verifies each in a lane with a copy of the sequence's KV
# of its own: one more lane a slot is one more time the KV memory, and rows that all lanes share are copied.
MAX_BRANCHES = 4
# How often the target's token is among the 1, 2, … 5 likeliest: heads 5 to 1 of Medusa for Vicuna-7B (medusa_acc.csv of
# its authors), and a 68M draft for LLaMA-7B (2305.09781, table 1, greedy, the mean of its five data sets).
RANK_ACCURACY = (
    (0.1175, 0.1866, 0.2346, 0.2721, 0.2998),
    (0.1474, 0.2250, 0.2737, 0.3109, 0.3397),
    (0.2010, 0.2879, 0.3475, 0.3834, 0.4169),
    (0.3164, 0.4236, 0.4851, 0.5282, 0.5625),
    (0.5604, 0.6717, 0.7271, 0.7599, 0.7799),
    (0.6640, 0.7680, 0.8100, 0.8420, 0.8560),
)
# Nodes of the largest tree that is looked at.
MAX_NODES = 64
_RANKS = 10  # what the paths of a static tree may name
Choices = tuple[tuple[int, ...], ...]


def rank_hits(rate: float) -> tuple[float, ...]:
    """How often each candidate of a position is right, likeliest first, where that one is at `rate`.

    Between the rows of RANK_ACCURACY a straight line; candidates past those that were published are never right.
    """
    rows = [
        (0.0,) * 5,
        *((top[0], *(b - a for a, b in pairwise(top))) for top in RANK_ACCURACY),
        (1.0, 0, 0, 0, 0),
    ]
    upper = max(1, bisect_left([row[0] for row in rows], rate))
    low, high = rows[upper - 1], rows[upper]
    share = (rate - low[0]) / (high[0] - low[0])
    further = [a + share * (b - a) for a, b in zip(low[1:], high[1:], strict=True)]
    return (rate, *further, *(0.0,) * (_RANKS - 1 - len(further)))


@dataclass(frozen=True, slots=True)
class TreeModel:
    """The trees a mechanism drafts. branches: most paths. depth: the deepest it can be, None for no limit.

    choices: paths of ranks of a static tree, whose first nodes are taken; None searches the best tree.
    """

    branches: int
    depth: int | None = None
    choices: Choices | None = None

    def expected(self, curve: AcceptanceCurve, nodes: int) -> tuple[float, int]:
        """(acceptance length, depth) of a tree of at most `nodes` nodes, never deeper than the acceptance data."""
        grown = _grown(
            curve.rates(min(curve.measured_to, self.depth or curve.measured_to)), self.branches, self.choices
        )
        return grown[min(nodes, len(grown) - 1)]

    def said(self, curve: AcceptanceCurve, nodes: int) -> str:
        """The tree in words, with what was assumed."""
        return (
            f"a tree of {nodes} nodes, {self.expected(curve, nodes)[1]} deep on at most {self.branches} paths: "
            "acceptance is known for the likeliest candidate of a position, and further ones are taken to be right as "
            "often as Medusa and SpecInfer published (an assumption)"
        )


def likeliest_rate(acceptance_length: float, nodes: int, depth: int) -> float:
    """The likeliest candidate's constant rate, from the acceptance length of a whole tree of `nodes` nodes."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        found = _grown((middle,) * depth, nodes, None)[: nodes + 1][-1][0]
        low, high = (middle, high) if found < acceptance_length else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=512)
def _grown(rates: tuple[float, ...], branches: int, choices: Choices | None) -> tuple[tuple[float, int], ...]:
    """(acceptance length, depth) of the tree's first 0, 1, 2, … nodes: each tree begins with the smaller ones."""
    from trtspec.drafters.rank_tree import fixed_shape, search_tree
    from trtspec.verify.tree import ROOT

    hits = [rank_hits(rate) for rate in rates]
    if choices is None:
        tree = search_tree(hits, MAX_NODES, len(rates), branches)
    else:
        tree = fixed_shape(choices, max(map(len, choices)))(MAX_NODES, len(rates), branches)
    length, depth, reached, grown = 1.0, 0, list[float](), [(1.0, 0)]
    for rank, parent, level in zip(tree.tokens, tree.parents, tree.depths, strict=True):
        reached.append(hits[level - 1][rank] * (1.0 if parent == ROOT else reached[parent]))
        length, depth = length + reached[-1], max(depth, level)
        grown.append((length, depth))
    return tuple(grown)
