"""Does speculation change the output? Every evaluation answers by comparing both arms token for token.

Greedy output of an exact engine must be equal, always. On an engine whose rows influence each other in the last
bits, two candidates can lie within rounding of each other, and either is a right answer. Such a difference is
judged by feeding the speculative arm's own tokens to the plain target (teacher forcing): each must be the
target's best token, or lie within a few units in the last place of it. Anything more is a mismatch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trtspec.evaluate.record import RequestRecord

Floats = npt.NDArray[np.float32]
Score = Callable[[Sequence[int], Sequence[int]], Floats | None]
"""(prompt ids, continuation ids) → target logits [len(continuation), vocab] that predicted them, or None."""

LogitsDtype = Literal["float32", "float16", "bfloat16"]

ALLOWED_ULPS = 2.0
_FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one request's arms part: the first differing position, both tokens there (None: that arm had ended).

    gap, ulps: the largest distance of a speculative token below the target's best, in logits and in units in the
    last place of `LogitsDtype`; None when it could not be judged.
    """

    question_id: str
    turn: int
    position: int
    speculative_token: int | None
    baseline_token: int | None
    verdict: Literal["mismatch", "near tie"]
    gap: float | None = None
    ulps: float | None = None


@dataclass(frozen=True, slots=True)
class LosslessReport:
    """checked: requests compared. mismatches, near_ties: of them. not_checked: why the others were not, if any.

    acceptance: the rule drafts were judged by. Under a lossy one mismatches are expected, and count what it changed.
    """

    checked: int
    mismatches: int
    near_ties: int
    differences: tuple[Difference, ...] = ()
    not_checked: str | None = None
    acceptance: str = "exact"

    @property
    def lossy(self) -> bool:
        """The output was allowed to differ."""
        return self.acceptance != "exact"

    @property
    def passed(self) -> bool:
        """Something was checked and nothing differed beyond a near tie."""
        return self.checked > 0 and self.mismatches == 0


def ulp(value: float, dtype: LogitsDtype) -> float:
    """Distance between neighbouring numbers of `dtype` at `value`: 0.125 for bfloat16 between 16 and 32."""
    exponent = math.frexp(value)[1] - 1 if value else -126
    return math.ldexp(1.0, exponent - _FRACTION_BITS[dtype])


def judge(logits: Floats, tokens: Sequence[int], dtype: LogitsDtype) -> tuple[float, float]:
    """(gap, ulps): how far the worst of `tokens` lies below the best of its row of `logits` [len(tokens), vocab]."""
    worst = (0.0, 0.0)
    for row, token in zip(logits, tokens):
        best = float(row.max())
        gap = best - float(row[token])
        worst = max(worst, (gap, gap / ulp(best, dtype)), key=lambda pair: pair[1])
    return worst


def compare(
    speculative: RequestRecord,
    baseline: RequestRecord,
    *,
    exact: bool,
    dtype: LogitsDtype,
    logits: Callable[[], Floats | None],
    by_text: bool = False,
) -> Difference | None:
    """None when both arms gave the same tokens and ended for the same reason; else where and how they differ.

    by_text: the speculative arm's ids were made from its text, so equal texts are enough.

    logits: target logits for the speculative arm's tokens, computed only when a near tie is possible
    (the engine is not exact).
    """
    ours, theirs = speculative.token_ids, baseline.token_ids
    equal = speculative.text == baseline.text if by_text else ours == theirs
    if equal and speculative.finish_reason == baseline.finish_reason:
        return None
    position = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))

    def difference(verdict: Literal["mismatch", "near tie"], *judged: float) -> Difference:
        mine = ours[position] if position < len(ours) else None
        other = theirs[position] if position < len(theirs) else None
        return Difference(speculative.question_id, speculative.turn, position, mine, other, verdict, *judged)

    # A near tie replaces one token by another. An arm that merely goes on or ends early has another fault.
    if exact or position >= len(ours) or position >= len(theirs):
        return difference("mismatch")
    scores = logits()
    if scores is None:
        return difference("mismatch")
    gap, ulps = judge(scores, ours, dtype)
    return difference("near tie" if ulps <= ALLOWED_ULPS else "mismatch", gap, ulps)


def check(
    speculative: Sequence[RequestRecord],
    baseline: Sequence[RequestRecord],
    *,
    exact: bool,
    dtype: LogitsDtype,
    score: Callable[[RequestRecord], Floats | None],
    acceptance: str = "exact",
    by_text: bool = False,
) -> LosslessReport:
    """Compare every request both arms finished.

    A later turn is compared only while its conversation was equal: after a difference the prompts are no longer
    the same. score: target logits for a speculative request's tokens, or None where the target cannot give them.
    acceptance: the rule drafts were judged by. by_text: see `compare`.
    """
    plain = {(r.question_id, r.turn): r for r in baseline}
    differences: list[Difference] = []
    parted: set[str] = set()
    reasons: Counter[str] = Counter()
    checked = 0
    for request in sorted(speculative, key=lambda r: r.turn):
        other = plain.get((request.question_id, request.turn))
        if request.question_id in parted:
            reasons["follow a difference in an earlier turn"] += 1
        elif other is None:
            reasons["failed on the baseline"] += 1
        elif not _same_prompt(request, other):
            reasons["had another prompt on the baseline: the conversation was rendered differently"] += 1
        else:
            checked += 1
            found = compare(
                request, other, exact=exact, dtype=dtype, logits=lambda r=request: score(r), by_text=by_text
            )
            if found:
                differences.append(found)
                parted.add(request.question_id)
    near = sum(d.verdict == "near tie" for d in differences)
    why = "; ".join(f"{number} requests {reason}" for reason, number in reasons.items()) or None
    return LosslessReport(checked, len(differences) - near, near, tuple(differences), why, acceptance)


def _same_prompt(one: RequestRecord, other: RequestRecord) -> bool:
    hashes = (one.prompt_sha256, other.prompt_sha256)
    return one.prompt_tokens == other.prompt_tokens and (None in hashes or hashes[0] == hashes[1])
