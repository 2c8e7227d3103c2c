"""Which drafts the target accepts, such that the output is distributed exactly as without them.

p is the target's distribution and q the draft's. Two lossless rules, each for chains and trees alike:

**Draw and compare**, for proposals without a q. At output position t the token is drawn from p alone, x_t =
F_t⁻¹(u_t), with u_t keyed by (seed, t); a draft is accepted if and only if it equals x_t, and the walk goes
on below it. *Why this is rejection sampling with one-hot q:* for a proposal d, q(d) = 1, Leviathan's rule
accepts with probability min(1, p(d)/q(d)) = p(d), which is P(x_t = d); otherwise it draws from norm(max(0, p
− q)), that is p without d, renormalised, which is the law of x_t given x_t ≠ d. *Why the output does not
depend on drafts at all:* x_t is a function of p_t and u_t; p_t is one of the tokens before t; u_t of (seed,
t). By induction the whole text is a function of prompt, sampling parameters and seed. Drafts decide only how
many positions one step covers.

**Multi-draft rejection sampling**, for proposals drawn from q (Leviathan et al. 2211.17192, Algorithm 1; Chen
et al. 2302.01318; several candidates per position: SpecInfer 2305.09781, section 4.3). At each node, with r =
p: child x drawn from q is accepted with probability min(1, r(x)/q(x)); after a rejection r ← norm(max(0, r −
q)) and the next child is tried; when none is left the token is drawn from r. *Unbiased by induction on the
children:* the tokens accepted at the first child have measure min(r, q), and the rest has measure max(0, r −
q), whose normalised law is what the remaining children and the final draw must produce, whatever the rejected
token was. This holds for draws with replacement (q the same) and without (q zero on earlier siblings) alike, and for
draws of several drafts, each from its own q, given that they are independent of one another. Draws of equal tokens are
one node of the tree and are judged one by one all the same: leaving the second one out would make its q a lie.

At temperature 0, p is one-hot and both rules are: accept if and only if the draft is the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import Draft
from trtspec.verify.probabilities import Probabilities, TargetDistribution, inverse_cdf
from trtspec.verify.randomness import PositionRandom, Stream
from trtspec.verify.tree import ROOT

Logits = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Verdict:
    """tokens: to emit, the accepted drafts and one more of the target's. path: the accepted nodes in order."""

    tokens: tuple[int, ...]
    path: tuple[int, ...]


class Verifier(Protocol):
    """Decides one step of one sequence."""

    def __call__(
        self, draft: Draft, logits: Logits, target: TargetDistribution, random: PositionRandom, position: int
    ) -> Verdict:
        """logits: float [1 + n, ≥ V], row 0 after the root, row 1 + i after node i. position: of the first
        token to emit.

        Tokens of the verdict are appended to `target`. Raises NotFinite.
        """


def verify(
    draft: Draft, logits: Logits, target: TargetDistribution, random: PositionRandom, position: int
) -> Verdict:
    """The lossless `Verifier`: draw and compare without q, multi-draft rejection sampling with it."""
    if draft.q is None or target.greedy:
        return draw_and_compare(draft, logits, target, random, position)
    return rejection_sample(draft, logits, target, random, position)


def draw_and_compare(
    draft: Draft, logits: Logits, target: TargetDistribution, random: PositionRandom, position: int
) -> Verdict:
    """Accept the path of drafts that equal the target's own draws. See the module's proof; q is not looked
    at.
    """
    tree, emitted, path, node = draft.tree, [], [], ROOT
    while True:
        uniform = 0.0 if target.greedy else random.uniform(Stream.TARGET, position + len(path))
        token = target.draw(logits[node + 1], uniform)
        target.append(token)
        emitted.append(token)
        node = next((child for child in tree.children.get(node, ()) if tree.tokens[child] == token), ROOT)
        if node == ROOT:
            return Verdict(tuple(emitted), tuple(path))
        path.append(node)


def rejection_sample(
    draft: Draft, logits: Logits, target: TargetDistribution, random: PositionRandom, position: int
) -> Verdict:
    """Accept drafts drawn from draft.q by multi-draft rejection sampling. See the module's proof."""
    tree, emitted, path, node = draft.tree, [], [], ROOT
    below = _draws_below(draft)
    while True:
        here = position + len(path)
        p = target.probabilities(logits[node + 1])
        draws = below.get(node, ())
        node, residual = _first_accepted(draws, draft, p, random, here)
        if node != ROOT:
            token = tree.tokens[node]
        else:
            stream = Stream.RESIDUAL if draws else Stream.TARGET
            token = inverse_cdf(residual, random.uniform(stream, here))
        target.append(token)
        emitted.append(token)
        if node == ROOT:
            return Verdict(tuple(emitted), tuple(path))
        path.append(node)


def _draws_below(draft: Draft) -> dict[int, list[tuple[int, int]]]:
    """By parent the draws of its children, in order: (child, row of q)."""
    below: dict[int, list[tuple[int, int]]] = {}
    for row, node in enumerate(draft.draws or range(len(draft.tree))):
        below.setdefault(draft.tree.parents[node], []).append((node, row))
    return below


def _first_accepted(
    draws: Sequence[tuple[int, int]],
    draft: Draft,
    p: Probabilities,
    random: PositionRandom,
    position: int,
) -> tuple[int, Probabilities]:
    """The accepted child, or ROOT and what is left of p after all draws were rejected."""
    residual = p
    for index, (child, row) in enumerate(draws):
        token, q = draft.tree.tokens[child], draft.q[row, : len(p)]
        if q[token] <= 0:
            raise ValueError(f"draft token {token} was proposed with probability {q[token]}")
        # u·q < r accepts with probability min(1, r/q), and never a token of probability 0
        if random.uniform(Stream.ACCEPT, position, index) * q[token] < residual[token]:
            return child, residual
        left = np.maximum(residual - q, 0.0)
        mass = left.sum()
        if mass <= 0:  # r = q up to rounding: a rejection that exact arithmetic does not have
            return ROOT, residual
        residual = left / mass
    return ROOT, residual
