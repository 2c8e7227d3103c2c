"""The deploy folder, and what the exporter really exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trtspec.package.metrics import ModelMetrics, RequestOutcome

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


class _Families:
    """Triton's metrics API, recording sample names and their labels."""

    def __init__(self) -> None:
        self.samples: dict[str, set[str]] = {}
        recorded = self.samples

        class Metric:
            def __init__(self, names: list[str], labels: Mapping[str, str]) -> None:
                for name in names:
                    extra = {"le"} if name.endswith("_bucket") else set()
                    recorded.setdefault(name, set()).update(labels, extra)

            def increment(self, amount: float) -> None: ...
            def observe(self, value: float) -> None: ...
            def set(self, value: float) -> None: ...

        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, name: str, description: str, kind: str) -> None:
                ends = ("_bucket", "_sum", "_count") if kind == self.HISTOGRAM else ("",)
                self.names = [f"{name}{end}" for end in ends]

            def Metric(self, labels: Mapping[str, str], buckets: Any = None) -> Metric:
                return Metric(self.names, labels)

        self.MetricFamily = MetricFamily


@pytest.fixture(scope="session")
def exported() -> dict[str, set[str]]:
    """Sample name → its labels, of a served model that has ended one request and refused one."""
    families = _Families()
    metrics = ModelMetrics(families, {"model": "m", "version": "1"}, "m_0_0")
    metrics.finished(RequestOutcome("stop", 3, 5, [(3, 2), (3, 0)], 0.1, 0.2))
    metrics.refused()
    return families.samples
