"""The deploy folder, what the exporters really export, and the chart as Helm renders it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gotpl.exts.helm import HelmTemplateEngine

from trtspec.package.metrics import ModelMetrics, RequestOutcome

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm/trtspec"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
TEMPLATES = {path.name: path.read_text("utf-8") for path in (CHART / "templates").iterdir()}
RELEASE = "demo"


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
    """Sample name → its labels: trtllm-serve's, and those of a model of ours that ended a request and refused one."""
    families = _Families()
    metrics = ModelMetrics(families, {"model": "m", "version": "1"}, "m_0_0")
    metrics.finished(RequestOutcome("stop", 3, 5, [(3, 2), (3, 0)], 0.1, 0.2))
    metrics.refused()
    return {**families.samples, **_trtllm_samples()}


def _trtllm_samples() -> dict[str, set[str]]:
    table = yaml.safe_load(Path(__file__).with_name("trtllm_exporter.yaml").read_text("utf-8"))
    samples = {
        name: {*table["labels"], *labels}
        for kind in ("counters", "gauges")
        for name, labels in table[kind].items()
    }
    for name in table["histograms"]:
        samples |= {f"{name}_{end}": set(table["labels"]) for end in ("sum", "count")}
        samples[f"{name}_bucket"] = {*table["labels"], "le"}
    return samples


def merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A chart's values with a user's laid over them, mapping by mapping, as Helm does."""
    result = copy.deepcopy(dict(values))
    for name, value in given.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else copy.deepcopy(value)
    return result


@pytest.fixture(scope="session")
def render() -> Callable[..., dict[str, dict[str, Any]]]:
    """A function from values to the chart's objects by kind. The templates run without Helm: see the test beside it."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    engine = HelmTemplateEngine.from_sources(TEMPLATES)

    def make(**values: Any) -> dict[str, dict[str, Any]]:
        data = {
            "Values": merged(VALUES, values),
            "Release": {"Name": RELEASE, "Service": "Helm", "Namespace": "default"},
            "Chart": {name[0].upper() + name[1:]: value for name, value in chart.items()},
        }
        texts = engine.render({name: data for name in TEMPLATES if not name.startswith("_")})
        return by_kind(texts.values())

    return make


def by_kind(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    documents = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {document["kind"]: document for document in documents}
