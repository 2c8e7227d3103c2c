"""Every number of an evaluation, each with its unit, formula and source. All are recounted from raw step records.

The prefill token is never a step. A step without a draft is a step: it verified nothing and emitted one token.
Tokens past a stop are in no record, so they are in no number.

Each is a `Metric`: called with records it gives its value, and it knows its definition, which is its docstring: the
lines `Unit:`, `Formula:` and `Source:` are what reports print. One that can have nothing to measure gives None, never
0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import numpy as np

from trtspec.evaluate.bootstrap import Estimate, ratio_interval
from trtspec.values import StepRecord

if TYPE_CHECKING:
    from trtspec.evaluate.record import BlockRecord, RequestRecord

P, R = ParamSpec("P"), TypeVar("R")

METRICS: list[Metric[..., Any]] = []
"""All of them, as reports list them."""


class Metric(Generic[P, R]):
    """One number of an evaluation, made of the function that computes it.

    name, summary, unit, formula, source: its definition, for readers of a report. Raises ValueError when its docstring
    lacks a line of it.
    """

    def __init__(self, measure: Callable[P, R]) -> None:
        text = measure.__doc__ or ""
        lines = dict(re.findall(r"^\s*(Unit|Formula|Source): (.+)$", text, flags=re.MULTILINE))
        if set(lines) != {"Unit", "Formula", "Source"}:
            raise ValueError(f"{measure.__name__} states {sorted(lines)}, not its unit, formula and source")
        self.name, self.summary = measure.__name__, text.splitlines()[0]
        self.unit, self.formula, self.source = lines["Unit"], lines["Formula"], lines["Source"]
        self._measure = measure
        update_wrapper(self, measure)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._measure(*args, **kwargs)


def metric(measure: Callable[P, R]) -> Metric[P, R]:
    """The function as one of METRICS."""
    METRICS.append(made := Metric(measure))
    return made


@dataclass(frozen=True, slots=True)
class Distribution:
    """Order statistics of one quantity over requests or steps, in that quantity's unit."""

    count: int
    mean: float
    std: float
    min: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """Order statistics (linear interpolation, population standard deviation); None of no values."""
    if not values:
        return None
    data = np.asarray(values, dtype=np.float64)
    low, p25, p50, p75, p90, p99, high = (
        float(q) for q in np.quantile(data, (0, 0.25, 0.5, 0.75, 0.9, 0.99, 1))
    )
    return Distribution(
        len(values), float(data.mean()), float(data.std()), low, p25, p50, p75, p90, p99, high
    )


# Acceptance


@metric
def acceptance_length_per_request(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens one verify step emits, averaged so that every request weighs the same.

    Unit: tokens per step, bonus token included
    Formula: mean over requests of (Σ emitted / steps); requests without a step are left out
    Source: SPEED-Bench, arXiv 2604.09557 (AL), averaged as specdec_bench does but without its prefill step
    """
    lengths = [
        length for request in requests if (length := _ratio(_emitted(request.steps), len(request.steps)))
    ]
    return float(np.mean(lengths)) if lengths else None


@metric
def acceptance_length_token_weighted(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens one verify step emits, over all steps of all requests: what throughput follows.

    Unit: tokens per step, bonus token included
    Formula: Σ emitted / Σ steps
    Source: vLLM mean acceptance length (1 + accepted / drafts); AIPerf token-weighted acceptance length
    """
    steps = all_steps(requests)
    return _ratio(_emitted(steps), len(steps))


@metric
def draft_acceptance_rate(requests: Sequence[RequestRecord]) -> float | None:
    """The part of all drafted tokens that was accepted.

    Unit: fraction
    Formula: Σ accepted / Σ drafted
    Source: vLLM spec_decode draft acceptance rate; a draft cut by a stop counts as drafted
    """
    steps = all_steps(requests)
    return _ratio(sum(s.accepted for s in steps), sum(s.drafted for s in steps))


@metric
def conditional_acceptance(requests: Sequence[RequestRecord], depth: int | None = None) -> list[float | None]:
    """AR_i: how often draft token i is accepted once those before it were.

    Unit: fraction, a list over draft positions i = 1, 2, …
    Formula: steps with accepted ≥ i / steps with accepted ≥ i−1 whose position i was drafted and judged
    Source: SPEED-Bench, arXiv 2604.09557 (AR_i), conditioned on i being drafted as drafts vary in length

    A position is not judged when the text ended inside the accepted draft before it (a stop, or the length
    limit): it was neither accepted nor rejected, and leaves the denominator. None: never judged.
    depth: of the draft trees, whose `drafted` counts nodes and not positions; None for chains.
    """
    return [
        _ratio(accepted, judged) for accepted, judged in zip(*position_counts(all_steps(requests), depth))
    ]


@metric
def joint_acceptance(requests: Sequence[RequestRecord], depth: int | None = None) -> list[float | None]:
    """How often all draft tokens 1 … i are accepted.

    Unit: fraction, a list over draft positions i = 1, 2, …
    Formula: Π_{j≤i} AR_j
    Source: SPEED-Bench, arXiv 2604.09557; with one draft length and no stops it equals P(accepted ≥ i)
    """
    joint: list[float | None] = []
    product: float | None = 1.0
    for rate in conditional_acceptance(requests, depth):
        product = None if product is None or rate is None else product * rate
        joint.append(product)
    return joint


@metric
def acceptance_length_modelled(requests: Sequence[RequestRecord], depth: int | None = None) -> float | None:
    """What every step would emit if it drafted to the last measured position and no text ended.

    Unit: tokens per step, bonus token included
    Formula: 1 + Σ_i Π_{j≤i} AR_j
    Source: SPEED-Bench, arXiv 2604.09557 (AL)
    """
    if not all_steps(requests):
        return None
    return 1.0 + sum(joint for joint in joint_acceptance(requests, depth) if joint is not None)


@metric
def acceptance_histogram(requests: Sequence[RequestRecord]) -> list[int]:
    """How many verify steps accepted 0, 1, 2, … draft tokens.

    Unit: steps, a list whose index is the accepted count, bonus token excluded
    Formula: counts of accepted
    Source: vLLM per-request acceptance_histogram (specdec_bench's own histogram includes the bonus token)
    """
    return np.bincount([s.accepted for s in all_steps(requests)]).tolist() if all_steps(requests) else []


# Time


@metric
def ttft_ms(requests: Sequence[RequestRecord]) -> Distribution | None:
    """Time until a request's first token.

    Unit: milliseconds
    Formula: first token − submit; in an open loop − scheduled arrival, as for every time of a request
    Source: SPEED-Bench, arXiv 2604.09557 (TTFT)
    """
    return distribution([1e3 * request.ttft_s for request in requests])


@metric
def inter_token_latency_ms(requests: Sequence[RequestRecord]) -> Distribution | None:
    """Mean time between two tokens of a request, counted in tokens, never in streamed chunks.

    Unit: milliseconds per token
    Formula: (last token − first token) / (tokens − 1), one value per request
    Source: AIPerf inter-token latency
    """
    return distribution([1e3 * token_gap_s(request) for request in requests if len(request.token_ids) > 1])


@metric
def step_latency_ms(requests: Sequence[RequestRecord]) -> Distribution | None:
    """Time one verify step takes, drafting included, prefill excluded.

    Unit: milliseconds
    Formula: end of step − end of the step before (the first: − first token)
    Source: SPEED-Bench, arXiv 2604.09557 (step latency), without specdec_bench's prefill interval
    """
    return distribution([ms for request in requests for _, ms in step_times_ms(request)])


@metric
def request_latency_ms(requests: Sequence[RequestRecord]) -> Distribution | None:
    """Time of a whole request.

    Unit: milliseconds
    Formula: finished − submit
    Source: specdec_bench E2E Request Time
    """
    return distribution([1e3 * request.total_s for request in requests])


@metric
def send_delay_ms(requests: Sequence[RequestRecord]) -> Distribution | None:
    """How far the client was behind the schedule of an open loop; part of the request's time.

    Unit: milliseconds
    Formula: sent − scheduled arrival, over first turns; nothing is scheduled in a closed loop
    Source: coordinated omission (Tene, How NOT to Measure Latency, 2015)
    """
    return distribution([1e3 * request.late_s for request in requests if request.late_s is not None])


@metric
def requests_in_flight(requests: Sequence[RequestRecord], busy_s: float) -> float | None:
    """How many requests were under way at a time, on average.

    Unit: requests
    Formula: Σ (finished − submit) / wall time the arm was busy
    Source: Little's law (Little, Operations Research 9(3), 1961)
    """
    return _ratio(sum(request.total_s for request in requests), busy_s)


@metric
def user_tokens_per_s(requests: Sequence[RequestRecord]) -> Distribution | None:
    """Decoding speed one user sees.

    Unit: tokens per second
    Formula: (tokens − 1) / (last token − first token), one value per request
    Source: SPEED-Bench, arXiv 2604.09557 (User TPS)
    """
    rates = [_ratio(len(r.token_ids) - 1, _decode_s(r)) for r in requests if len(r.token_ids) > 1]
    return distribution([rate for rate in rates if rate is not None])


@metric
def output_tokens_per_s(tokens: int, busy_s: float) -> float | None:
    """Throughput of the deployment over all concurrent requests.

    Unit: tokens per second
    Formula: all output tokens / wall time the arm was busy
    Source: SPEED-Bench, arXiv 2604.09557 (Output TPS)
    """
    return _ratio(tokens, busy_s)


@metric
def speedup(blocks: Sequence[BlockRecord]) -> Estimate | None:
    """How many times faster the deployment is than the same engine without speculation.

    Unit: ratio of output tokens per second
    Formula: (Σ tokens / Σ s) speculative ÷ (Σ tokens / Σ s) baseline, over blocks both arms served whole
    Source: SPEED-Bench, arXiv 2604.09557 (speed-up); interval: paired bootstrap over blocks

    At concurrency 1 a block is one prompt, so the pairs are prompts.
    """
    pairs = [
        (b.speculative_tokens, b.speculative_s, b.baseline_tokens, b.baseline_s)
        for b in blocks
        if b.whole and b.baseline_tokens and b.baseline_s and b.speculative_tokens
    ]
    return ratio_interval(pairs)


@metric
def request_speedup(
    speculative: Sequence[RequestRecord], baseline: Sequence[RequestRecord]
) -> Estimate | None:
    """How many times sooner a request's tokens arrive than without speculation.

    Unit: ratio of tokens per second of request time
    Formula: (Σ tokens / Σ total) speculative ÷ (Σ tokens / Σ total) baseline, over requests both arms finished
    Source: paired A/B; interval: paired bootstrap over requests
    """
    other = {(r.question_id, r.turn): r for r in baseline}
    both = [(r, other[r.question_id, r.turn]) for r in speculative if (r.question_id, r.turn) in other]
    return ratio_interval([(len(s.token_ids), s.total_s, len(b.token_ids), b.total_s) for s, b in both])


@metric
def decode_speedup(
    speculative: Sequence[RequestRecord], baseline: Sequence[RequestRecord]
) -> Estimate | None:
    """How many times faster tokens follow the first one than without speculation: what a plan's speed-up predicts.

    Unit: ratio of tokens per second between first and last token
    Formula: (Σ (tokens − 1) / Σ decode s) speculative ÷ the same of the baseline, over requests both arms finished
    Source: SPEED-Bench, arXiv 2604.09557 (User TPS) of both arms, paired; interval: paired bootstrap over requests

    Prefill, queueing and transport before the first token are left out; `request_speedup` has them.
    """
    other = {(r.question_id, r.turn): r for r in baseline}
    both = [(r, other[r.question_id, r.turn]) for r in speculative if (r.question_id, r.turn) in other]
    return ratio_interval(
        [(len(s.token_ids) - 1, _decode_s(s), len(b.token_ids) - 1, _decode_s(b)) for s, b in both]
    )


def all_steps(requests: Sequence[RequestRecord]) -> list[StepRecord]:
    return [step for request in requests for step in request.steps]


def _emitted(steps: Sequence[StepRecord]) -> int:
    return sum(step.emitted for step in steps)


def position_counts(steps: Sequence[StepRecord], depth: int | None = None) -> tuple[list[int], list[int]]:
    """For each draft position 1 … max drafted: steps that accepted it, and steps that judged it."""
    positions = max((step.drafted for step in steps), default=0)
    if depth is not None:
        positions = min(positions, depth)
    accepted, judged = [0] * positions, [0] * positions
    for step in steps:
        for i in range(step.accepted):
            accepted[i] += 1
            judged[i] += 1
        # One more token than was accepted came out: the target's own, which overruled the next draft token, if any.
        if step.emitted > step.accepted and min(step.drafted, positions) > step.accepted:
            judged[step.accepted] += 1
    return accepted, judged


def step_times_ms(request: RequestRecord) -> list[tuple[StepRecord, float]]:
    ends = [request.ttft_s, *(step.at_s for step in request.steps)]
    return [(step, 1e3 * (end - before)) for step, before, end in zip(request.steps, ends, ends[1:])]


def token_gap_s(request: RequestRecord) -> float:
    """Mean seconds between two tokens of a request that has at least two."""
    return _decode_s(request) / (len(request.token_ids) - 1)


def _decode_s(request: RequestRecord) -> float:
    """Seconds from the first token to the last; without step records, to the end of the request."""
    return (request.steps[-1].at_s if request.steps else request.total_s) - request.ttft_s


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
