"""The target's distribution p of one request: logits → penalties → temperature → top-k → top-p.

That is the order of Hugging Face `generate` and vLLM. Repetition penalty comes first (CTRL, 1909.05858), then
frequency and presence (OpenAI). All of it in float64 on the tokenizer's own ids: rows past its vocabulary are
padding and have probability zero. Every tie falls to the lowest id, and temperature 0 is the one-hot limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from trtspec.values import SamplingParams

Probabilities = npt.NDArray[np.float64]

_UNFILTERED = SamplingParams(temperature=1.0)


class NotFinite(ValueError):
    """The logits of a position hold NaN or +inf, or no finite value at all."""


class TargetDistribution:
    """p for the next token of one request, position after position.

    A position's penalties depend on the tokens before it, drafts included. Verification asks for p at a
    draft's row only once every draft before it has been accepted and `append`ed; a rejected draft never gets
    here, so there is nothing to roll back.

    sampling: the request's parameters. vocab_size: the tokenizer's, V below. prompt: for the repetition
    penalty.
    """

    __slots__ = ("_counts", "_penalised", "_seen", "_token", "greedy", "sampling", "vocab_size")

    def __init__(self, sampling: SamplingParams, vocab_size: int, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.greedy = sampling.temperature == 0
        self._penalised = (
            sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
            or sampling.repetition_penalty != 1
        )
        if self._penalised:
            self._counts = np.zeros(vocab_size, np.int64)  # of generated tokens
            self._seen = np.zeros(vocab_size, np.bool_)  # prompt and generated
            self._seen[np.asarray(prompt, np.int64)] = True

    def append(self, token: int) -> None:
        """Count an emitted token."""
        if self._penalised:
            self._counts[token] += 1
            self._seen[token] = True

    def after(self, token: int) -> TargetDistribution:
        """The distribution once `token` is emitted; this one stays as it is. For looking down several branches."""
        if not self._penalised:
            return self  # it does not depend on the tokens before
        later = copy(self)
        later._counts, later._seen = self._counts.copy(), self._seen.copy()
        later.append(token)
        return later

    def best(self, logits: npt.NDArray[np.floating]) -> int:
        """The greedy token, lowest id on ties. logits: float [≥ V]. Raises NotFinite."""
        scores = self._penalise(logits)
        token = int(scores.argmax())
        if not np.isfinite(scores[token]):  # argmax prefers NaN, then +inf: this one look finds either
            raise NotFinite(f"the best logit is {scores[token]}")
        return token

    def probabilities(self, logits: npt.NDArray[np.floating]) -> Probabilities:
        """p, float64 [V], sum 1. logits: float [≥ V]. Raises NotFinite."""
        if self.greedy:
            p = np.zeros(self.vocab_size)
            p[self.best(logits)] = 1.0
            return p
        return probs(self._penalise(logits), self.sampling)

    def softmax(self, logits: npt.NDArray[np.floating]) -> Probabilities:
        """p as it would be at temperature 1 and without filtering: how sure the target is, also of a greedy request.
        Raises NotFinite.
        """
        return probs(self._penalise(logits), _UNFILTERED)

    def draw(self, logits: npt.NDArray[np.floating], uniform: float) -> int:
        """F⁻¹(uniform) for the distribution function F of p; the argmax at temperature 0."""
        return self.best(logits) if self.greedy else inverse_cdf(self.probabilities(logits), uniform)

    def logprob(self, logits: npt.NDArray[np.floating], token: int) -> float:
        """ln of the model's own probability of `token`: before penalties, temperature and filtering.

        At temperature 0 the filtered p is one-hot and its logarithm would always be 0, which says nothing.
        """
        scores = logits[: self.vocab_size].astype(np.float64)
        peak = scores.max()
        return float(scores[token] - peak - np.log(np.exp(scores - peak).sum()))

    def _penalise(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        scores = logits[: self.vocab_size]
        if not self._penalised:
            return scores
        s = self.sampling
        scores = scores.astype(np.float64)
        if s.repetition_penalty != 1:
            seen = scores[self._seen]
            scores[self._seen] = np.where(seen < 0, seen * s.repetition_penalty, seen / s.repetition_penalty)
        if s.frequency_penalty:
            scores -= s.frequency_penalty * self._counts
        if s.presence_penalty:
            scores -= s.presence_penalty * (self._counts > 0)
        return scores


def probs(logits: npt.NDArray[np.floating], sampling: SamplingParams) -> Probabilities:
    """Softmax of logits [V] under temperature, top-k and top-p; float64 [V]. Raises NotFinite.

    top_k keeps exactly k ids. top_p keeps the fewest ids, most probable first, whose mass reaches it,
    measured after top-k. Equal logits at either border: lower ids are kept first.
    """
    scores = logits.astype(np.float64)
    peak = scores.max()
    if not np.isfinite(peak):
        raise NotFinite(f"the largest logit is {peak}")
    if sampling.temperature == 0:
        p = np.zeros(len(scores))
        p[scores.argmax()] = 1.0
        return p
    dropped = ~_largest(scores, sampling.top_k) if 0 < sampling.top_k < len(scores) else None
    scores -= peak
    scores /= sampling.temperature
    p = np.exp(scores, out=scores)
    if dropped is not None:
        p[dropped] = 0.0
    p /= p.sum()
    if sampling.top_p < 1:
        p[~_nucleus(p, sampling.top_p)] = 0.0
        p /= p.sum()
    return p


def inverse_cdf(p: Probabilities, uniform: float) -> int:
    """The id at which the running sum of p, in id order, first exceeds uniform ∈ [0, 1); never one of
    probability 0.
    """
    cdf = p.cumsum()
    token = int(cdf.searchsorted(uniform * cdf[-1], side="right"))
    if token == len(p):  # uniform · total rounded up to the total
        token = int(p.nonzero()[0][-1])
    return token


def _largest(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.bool_]:
    border = np.partition(scores, len(scores) - count)[len(scores) - count]
    keep = scores > border
    keep[np.flatnonzero(scores == border)[: count - int(keep.sum())]] = True
    return keep


def _nucleus(p: Probabilities, top_p: float) -> npt.NDArray[np.bool_]:
    # Sorting a whole vocabulary takes milliseconds. The leading bits of a float64 ≥ 0 sort like the number:
    # count the mass of each class of values, 16 to an octave, and sort only the class in which the mass
    # passes top_p.
    classes = p.view(np.int64) >> 48
    mass = np.bincount(classes, weights=p)[::-1].cumsum()  # of the largest class, the two largest, …
    passing = min(int(mass.searchsorted(top_p, side="left")), len(mass) - 1)
    border = len(mass) - 1 - passing
    keep = classes > border
    missing = top_p - (mass[passing - 1] if passing else 0.0)
    ids = np.flatnonzero(classes == border)
    ids = ids[np.argsort(-p[ids], kind="stable")]
    keep[ids[: int(p[ids].cumsum().searchsorted(missing, side="left")) + 1]] = True
    return keep
