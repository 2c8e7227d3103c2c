"""Metrics of the served model: totals, and means that count the prefill token as no step."""

from __future__ import annotations

import pytest

from trtspec.package.metrics import ModelMetrics, RequestOutcome


class Backend:
    """Triton's metrics API, recording."""

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
        samples: dict[tuple, list[float]] = {}  # noqa: RUF012 - reset by each test

        def __init__(self, name, description, kind):
            self.name = name

        def Metric(self, labels, buckets=None):
            values = self.samples.setdefault((self.name, *sorted(labels.items())), [])
            return Backend.Metric(values)

    class Metric:
        def __init__(self, values):
            self.values = values

        def increment(self, amount):
            self.values.append(amount)

        observe = increment

        def set(self, value):
            self.values[:] = [value]


@pytest.fixture
def recorded():
    Backend.MetricFamily.samples = {}

    def total(name: str, **labels: str) -> float:
        found = [
            values
            for (sample, *its), values in Backend.MetricFamily.samples.items()
            if sample == name and set(labels.items()) <= set(its)
        ]
        assert len(found) == 1, (name, labels)
        return sum(found[0])

    return ModelMetrics(Backend, {"model": "m", "version": "1"}, "m_0"), total


def outcome(steps, reason="length", generated=None) -> RequestOutcome:
    emitted = 1 + sum(accepted + 1 for _, accepted in steps) if generated is None else generated
    return RequestOutcome(reason, 10, emitted, steps, 0.5 if emitted else None, 2.5)


def test_the_prefill_token_is_no_step():
    one = outcome([(3, 2), (3, 0), (3, 3)])
    assert one.generated == 9
    assert one.acceptance_length == pytest.approx(8 / 3)
    assert outcome([]).acceptance_length is None


def test_totals_and_means_of_requests(recorded):
    metrics, total = recorded
    metrics.finished(outcome([(3, 2), (3, 0), (3, 3)]))
    metrics.finished(outcome([(3, 0)] * 3))
    assert total("trtspec_drafted_tokens_total") == 18
    assert total("trtspec_accepted_tokens_total") == 5
    assert total("trtspec_verify_steps_total") == 6
    assert total("trtspec_generated_tokens_total") == 9 + 4
    assert total("trtspec_verify_steps_by_accepted_total", accepted="0") == 4
    assert total("trtspec_inter_token_latency_seconds") == pytest.approx(2 / 8 + 2 / 3)
    # Token-weighted over recent requests: 8 + 3 tokens in 6 steps.
    assert total("trtllm:spec_accept_length", instance="m_0") == pytest.approx(11 / 6)
    assert total("trtllm:spec_accept_rate", instance="m_0") == pytest.approx(5 / 18)


def test_a_request_cancelled_in_the_queue_counts_no_tokens(recorded):
    metrics, total = recorded
    metrics.finished(outcome([], reason="cancelled", generated=0))
    assert total("trtspec_requests_total", finish_reason="cancelled") == 1
    assert total("trtspec_prompt_tokens_total") == 0
    assert total("trtspec_time_to_first_token_seconds") == 0


def test_undrafted_steps_have_an_acceptance_rate_of_zero(recorded):
    metrics, total = recorded
    metrics.finished(outcome([(0, 0), (0, 0)]))
    assert total("trtllm:spec_accept_length", instance="m_0") == 1
    assert total("trtllm:spec_accept_rate", instance="m_0") == 0


def test_load_gauges_follow_the_last_value(recorded):
    metrics, total = recorded
    metrics.load(3, 2)
    metrics.load(1, 0)
    assert total("trtspec_active_requests", instance="m_0") == 1
    assert total("trtspec_queued_requests", instance="m_0") == 0
