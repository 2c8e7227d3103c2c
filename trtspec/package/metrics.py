"""Prometheus metrics of one served model, through Triton's metrics endpoint.

Counters and histograms are updated once per request, before its last response is sent, so that a client that
scrapes afterwards sees its own request. Gauges carry an `instance` label, since each instance has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Finished requests the acceptance gauges look back on.
ROLLING_REQUESTS = 64

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
_TOKEN_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64]
_TOKENS_PER_STEP = [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 32]

_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were decoded",
    "generated_tokens": "Tokens generated",
    "drafted_tokens": "Tokens drafted in verify steps",
    "accepted_tokens": "Drafted tokens accepted in verify steps",
    "verify_steps": "Verify steps; the prefill of a request is not one",
}
_HISTOGRAMS = {
    "acceptance_length": ("Tokens per verify step, mean of one request", _TOKENS_PER_STEP),
    "time_to_first_token_seconds": ("From the request's arrival to its first token", _SECONDS),
    "inter_token_latency_seconds": ("Time per token after the first, mean of one request", _TOKEN_SECONDS),
    "request_duration_seconds": ("From the request's arrival to its last token", _SECONDS),
}
_GAUGES = {
    "trtspec_active_requests": "Requests being decoded",
    "trtspec_queued_requests": "Requests waiting for a slot",
    # The two names that AIPerf's speed-bench-report reads.
    "trtllm:spec_accept_length": f"Tokens per verify step over the last {ROLLING_REQUESTS} requests",
    "trtllm:spec_accept_rate": f"Accepted per drafted token over the last {ROLLING_REQUESTS} requests",
}


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What one finished request adds. Times in seconds since it arrived; steps are (drafted, accepted) pairs.

    first_token_s: None when the request ended before a token. generated: tokens, the prefill token included.
    """

    finish_reason: str
    prompt_tokens: int
    generated: int
    steps: Sequence[tuple[int, int]]
    first_token_s: float | None
    duration_s: float

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.steps)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.steps)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per verify step; None without a step. The prefill token belongs to no step."""
        return (self.generated - 1) / len(self.steps) if self.steps else None


class ModelMetrics:
    """Registers every family once per model instance. `backend` is Triton's `triton_python_backend_utils`."""

    def __init__(self, backend: Any, labels: Mapping[str, str], instance: str) -> None:
        self._backend = backend
        self._labels = dict(labels)
        family = backend.MetricFamily
        # Families must outlive their metrics, so both are kept.
        self._requests = self._family(
            "trtspec_requests_total", "Finished requests by finish reason", family.COUNTER
        )
        self._by_accepted = self._family(
            "trtspec_verify_steps_by_accepted_total", "Verify steps by tokens accepted", family.COUNTER
        )
        self._labelled: dict[tuple[str, str], Any] = {}
        self._families = []
        self._metrics: dict[str, Any] = {}
        for name, text in _COUNTERS.items():
            self._register(name, f"trtspec_{name}_total", text, family.COUNTER, self._labels)
        for name, (text, buckets) in _HISTOGRAMS.items():
            self._register(name, f"trtspec_{name}", text, family.HISTOGRAM, self._labels, buckets=buckets)
        for name, text in _GAUGES.items():
            self._register(name, name, text, family.GAUGE, {**self._labels, "instance": instance})
        self._recent: deque[RequestOutcome] = deque(maxlen=ROLLING_REQUESTS)
        self.load(0, 0)

    def load(self, active: int, queued: int) -> None:
        """Set the gauges of requests being decoded and waiting."""
        self._metrics["trtspec_active_requests"].set(active)
        self._metrics["trtspec_queued_requests"].set(queued)

    def finished(self, outcome: RequestOutcome) -> None:
        """Account for one request that ended, however it ended."""
        self._count(self._requests, "finish_reason", outcome.finish_reason, 1)
        tally: dict[int, int] = {}
        for _, accepted in outcome.steps:
            tally[accepted] = tally.get(accepted, 0) + 1
        for accepted, steps in tally.items():
            self._count(self._by_accepted, "accepted", str(accepted), steps)
        for name, amount in (
            ("prompt_tokens", outcome.prompt_tokens if outcome.generated else 0),
            ("generated_tokens", outcome.generated),
            ("drafted_tokens", outcome.drafted),
            ("accepted_tokens", outcome.accepted),
            ("verify_steps", len(outcome.steps)),
        ):
            self._metrics[name].increment(amount)
        self._metrics["request_duration_seconds"].observe(outcome.duration_s)
        if outcome.first_token_s is not None:
            self._metrics["time_to_first_token_seconds"].observe(outcome.first_token_s)
            if outcome.generated > 1:
                mean = (outcome.duration_s - outcome.first_token_s) / (outcome.generated - 1)
                self._metrics["inter_token_latency_seconds"].observe(mean)
        if outcome.steps:
            self._metrics["acceptance_length"].observe(outcome.acceptance_length)
            self._recent.append(outcome)
            self._acceptance_gauges()

    def refused(self) -> None:
        """Account for a request that found the queue full."""
        self._count(self._requests, "finish_reason", "refused", 1)

    def _acceptance_gauges(self) -> None:
        steps = sum(len(outcome.steps) for outcome in self._recent)
        emitted = sum(outcome.generated - 1 for outcome in self._recent)
        drafted = sum(outcome.drafted for outcome in self._recent)
        accepted = sum(outcome.accepted for outcome in self._recent)
        self._metrics["trtllm:spec_accept_length"].set(emitted / steps)
        self._metrics["trtllm:spec_accept_rate"].set(accepted / drafted if drafted else 0.0)

    def _family(self, name: str, text: str, kind: Any) -> Any:
        return self._backend.MetricFamily(name=name, description=text, kind=kind)

    def _register(
        self, key: str, name: str, text: str, kind: Any, labels: Mapping[str, str], **options: Any
    ) -> None:
        family = self._family(name, text, kind)
        self._families.append(family)
        self._metrics[key] = family.Metric(labels=dict(labels), **options)

    def _count(self, family: Any, label: str, value: str, amount: int) -> None:
        """Increment the counter of one label value, made when it is first seen."""
        key = (label, value)
        if key not in self._labelled:
            self._labelled[key] = family.Metric(labels={**self._labels, label: value})
        self._labelled[key].increment(amount)
