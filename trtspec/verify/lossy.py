"""Acceptance rules that trade exactness for longer drafts. Lossy: output is *not* distributed as the target's own.

- **Typical acceptance** (Medusa, 2401.10774, section 3.3.1), for sampled output: a draft x passes where
  p(x) > min(ε, δ · exp(−H(p))), H the entropy of p in nats. What is plausible to the target is kept, whatever it
  would have drawn: unsure positions take less probable drafts. At temperature 0, p is one-hot, H is 0, and only the
  argmax passes: greedy output stays exact.
- **Relaxed acceptance** (TensorRT-LLM's, for the long reasoning of thinking models), for greedy output: a draft passes
  where it is among the k likeliest tokens and its probability lies at most δ below the likeliest one's. Sampled
  requests are judged by the exact rule.

Both look at every branch of a tree and take the longest accepted path, of equally long ones the likeliest. The token
after it is the target's own. q is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtspec.drafters.base import Draft
from trtspec.verify.acceptance import Logits, Verdict, Verifier, verify
from trtspec.verify.probabilities import Probabilities, TargetDistribution
from trtspec.verify.randomness import PositionRandom, Stream
from trtspec.verify.tree import ROOT

# Which of some tokens pass, given the distribution they are judged by.
_Passing = Callable[[Probabilities, Sequence[int]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Typical:
    """The `Verifier` of typical acceptance. epsilon, delta: ε and δ above; the defaults are Medusa's own."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __call__(
        self, draft: Draft, logits: Logits, target: TargetDistribution, random: PositionRandom, position: int
    ) -> Verdict:
        return _longest(
            draft, logits, target, random, position, TargetDistribution.probabilities, self._passing
        )

    def _passing(self, p: Probabilities, tokens: Sequence[int]) -> Sequence[bool]:
        positive = p[p > 0]
        entropy = -float(positive @ np.log(positive))
        return p[np.asarray(tokens)] > min(self.epsilon, self.delta * math.exp(-entropy))


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The `Verifier` of relaxed acceptance. top_k, delta: k and δ above; the defaults are NVIDIA's for DeepSeek-R1.

    Probabilities are those of temperature 1. The rule holds for the whole text, not for its reasoning part alone.
    """

    top_k: int = 10
    delta: float = 0.6

    def __call__(
        self, draft: Draft, logits: Logits, target: TargetDistribution, random: PositionRandom, position: int
    ) -> Verdict:
        if not target.greedy:
            return verify(draft, logits, target, random, position)
        return _longest(draft, logits, target, random, position, TargetDistribution.softmax, self._passing)

    def _passing(self, p: Probabilities, tokens: Sequence[int]) -> Sequence[bool]:
        return [
            0 < p[token] >= p.max() - self.delta
            and np.count_nonzero(p > p[token]) + np.count_nonzero(p[:token] == p[token]) < self.top_k
            for token in tokens
        ]


def open_verifier(verification: Mapping[str, Any] | None) -> Verifier:
    """The rule an engine folder names: `acceptance` and the rule's own parameters; None is the exact one."""
    if verification is None:
        return verify
    rules = {"typical": Typical, "relaxed": Relaxed}
    return rules[verification["acceptance"]](**{k: v for k, v in verification.items() if k != "acceptance"})


def _longest(
    draft: Draft,
    logits: Logits,
    target: TargetDistribution,
    random: PositionRandom,
    position: int,
    distribution: Callable[[TargetDistribution, Logits], Probabilities],
    passing: _Passing,
) -> Verdict:
    """The longest path of nodes that pass, and the target's own token after it."""
    tree = draft.tree
    best, found = ROOT, (0, 0.0)
    walk = [(ROOT, target, 0.0)]
    for node, here, likelihood in walk:  # grows while it is walked, each node after its parent
        children = tree.children.get(node, ())
        if not children:
            continue
        p = distribution(here, logits[node + 1])
        tokens = [tree.tokens[child] for child in children]
        for child, token, passes in zip(children, tokens, passing(p, tokens), strict=True):
            if not passes:
                continue
            reached = (tree.depths[child], likelihood + math.log(p[token]))
            walk.append((child, here.after(token), reached[1]))
            if reached > found:
                best, found = child, reached
    path = tree.path(best)
    emitted = [tree.tokens[node] for node in path]
    for token in emitted:
        target.append(token)
    uniform = 0.0 if target.greedy else random.uniform(Stream.TARGET, position + len(path))
    emitted.append(target.draw(logits[best + 1], uniform))
    target.append(emitted[-1])
    return Verdict(tuple(emitted), path)
