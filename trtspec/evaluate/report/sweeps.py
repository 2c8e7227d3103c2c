"""What several runs show together: speed-up by load and by context length, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from trtspec.evaluate.bootstrap import Estimate
from trtspec.evaluate.metrics import (
    Distribution,
    acceptance_length_per_request,
    acceptance_length_token_weighted,
    inter_token_latency_ms,
    request_speedup,
    ttft_ms,
)
from trtspec.evaluate.record import RequestRecord, RunRecord
from trtspec.evaluate.report.charts import Series, rows
from trtspec.evaluate.report.groups import Deployment, Load
from trtspec.evaluate.report.page import figure, pair, section, table
from trtspec.evaluate.report.words import interval, setting_rows
from trtspec.evaluate.summary import context_bucket
from trtspec.evaluate.text import NOT_MEASURED, count, number, ratio

LOAD_COLUMNS = (
    *("Load", "Tokens/s", "without", "ms per token", "without"),
    *("Length", "Speed-up", "95 % interval"),
)
CONTEXT_COLUMNS = (
    *("Prompt tokens", "Load", "Requests", "TTFT, ms", "ms per token"),
    *("Length", "per request", "Speed-up", "95 % interval"),
)
_SERIES_AT_MOST = 6


def load_rows(deployment: Deployment) -> list[list[str]]:
    """Rows under LOAD_COLUMNS, one for each load; none where there is but one."""
    if len(deployment.loads) == 1:
        return []
    return [
        [
            load.short,
            *(number(load.tokens_per_s(arm), 1) for arm in ("speculative", "baseline")),
            *(_median(inter_token_latency_ms(load.requests(arm))) for arm in ("speculative", "baseline")),
            number(acceptance_length_token_weighted(load.requests("speculative"))),
            *_gain(load.gain()),
        ]
        for load in deployment.loads
    ]


def by_load(found: Sequence[Deployment]) -> str | None:
    """The section of the page; None without several loads."""
    body = [[deployment.label, *row] for deployment in found for row in load_rows(deployment)]
    if not body:
        return None
    sizes = {load.short: load.size for deployment in found for load in deployment.loads}
    labels = sorted(sizes, key=lambda name: sizes[name])
    series = []
    for deployment in found:
        gains = {load.short: gain.value for load in deployment.loads if (gain := load.gain())}
        series.append(Series(deployment.label, [gains.get(label) for label in labels]))
    chart = rows("Speed-up by load", labels, series, spell=ratio, x_title="speed-up, ×", origin=1)
    names = [deployment.label for deployment in found]
    return section(
        "Speed-up by load",
        figure("Speed-up against the same load without speculation (left of 1: slower)", chart, names),
        table("By load", ("Deployment", *LOAD_COLUMNS), body),
        note="The more requests share a step, the less room is left in it for drafts. Times: median of requests. "
        "Length: acceptance length, token-weighted. Speed-up: of throughput, in an open loop of request times.",
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of one load whose prompts have about one length, with speculation."""

    bucket: str
    load: Load
    requests: Sequence[RequestRecord]
    gain: Estimate | None

    @property
    def length(self) -> float | None:
        return acceptance_length_token_weighted(self.requests)


def context_rows(deployment: Deployment) -> list[list[str]]:
    """Rows under CONTEXT_COLUMNS, shortest prompts first; none where all are of about one length."""
    parts = _parts(deployment)
    if len({part.bucket for part in parts}) < 2:
        return []
    return [
        [
            part.bucket,
            part.load.short,
            count(len(part.requests)),
            _median(ttft_ms(part.requests)),
            _median(inter_token_latency_ms(part.requests)),
            number(part.length),
            number(acceptance_length_per_request(part.requests)),
            *_gain(part.gain),
        ]
        for part in parts
    ]


def by_context(found: Sequence[Deployment]) -> str | None:
    """The section of the page; None where all prompts are of about one length."""
    body = [[deployment.label, *row] for deployment in found for row in context_rows(deployment)]
    if not body:
        return None
    lines = [(deployment, load) for deployment in found for load in deployment.loads]
    if len(lines) > _SERIES_AT_MOST:  # the table has them all
        lines = [(deployment, deployment.loads[0]) for deployment in found]
    several = any(len(deployment.loads) > 1 for deployment in found)
    names = [
        f"{deployment.label}, {load.short}" if several else deployment.label for deployment, load in lines
    ]
    parts = [
        {part.bucket: part for part in _parts(deployment) if part.load is load} for deployment, load in lines
    ]
    buckets = sorted({bucket for own in parts for bucket in own}, key=_upper_end)

    def chart(
        title: str, value: Callable[[_Part], float | None], spell: Callable[[float], str], axis: str
    ) -> str:
        series = [
            Series(n, [value(own[b]) if b in own else None for b in buckets]) for n, own in zip(names, parts)
        ]
        return rows(title, buckets, series, spell=spell, x_title=axis, origin=1)

    lengths = chart(
        "Acceptance length by context length", lambda part: part.length, number, "tokens per step"
    )
    charts = [figure("Acceptance length, token-weighted (1 is no draft accepted)", lengths, names)]
    if any(part.gain for own in parts for part in own.values()):
        gains = chart(
            "Speed-up by context length", lambda part: part.gain and part.gain.value, ratio, "speed-up, ×"
        )
        charts.append(figure("Speed-up of a request (left of 1: slower than without)", gains, names))
    return section(
        "Acceptance and speed-up by context length",
        pair(*charts),
        table("By context length", ("Deployment", *CONTEXT_COLUMNS), body),
        note="A request counts where the length of its prompt lies. Times: median of requests, with speculation. "
        "Length: acceptance length, token-weighted; beside it the mean over requests.",
    )


def _parts(deployment: Deployment) -> list[_Part]:
    """By context length, then by load."""
    parts = []
    for load in deployment.loads:
        plain = _in_buckets(load.requests("baseline"))
        for bucket, ours in _in_buckets(load.requests("speculative")).items():
            parts.append(_Part(bucket, load, ours, request_speedup(ours, plain.get(bucket, ()))))
    return sorted(parts, key=lambda part: (_upper_end(part.bucket), part.load.size))


def _in_buckets(requests: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    buckets: dict[str, list[RequestRecord]] = {}
    for request in requests:
        buckets.setdefault(context_bucket(request), []).append(request)
    return buckets


def _upper_end(bucket: str) -> int:
    """Most prompt tokens of a bucket."""
    return int(bucket.rpartition("–")[2])


def differences(runs: Sequence[RunRecord], labels: Sequence[str]) -> str | None:
    """The section with every setting and config field in which runs differ; None where there is none."""
    body = difference_rows(runs)
    if not body:
        return None
    return section(
        "What differs between the runs",
        table("Settings and config fields that differ", ["", *labels], body, words=True),
        note="Everything else was the same, as far as the runs record it.",
    )


def difference_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Name and each run's value, of the settings and of the config's fields that are not the same in all runs."""
    settings = [dict(setting_rows(run)) for run in runs]
    fields = [dict(_fields(yaml.safe_load(run.config or "") or {})) for run in runs]
    found = []
    for each in (settings, fields):
        for name in dict.fromkeys(name for one in each for name in one):
            values = [one.get(name, NOT_MEASURED) for one in each]
            if len(set(values)) > 1 and name != "Date":
                found.append([name, *values])
    return found


def _fields(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a config as (a.b, value)."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value if isinstance(value, str) else json.dumps(value)


def _median(found: Distribution | None) -> str:
    return number(found.p50, 0 if found.p50 >= 100 else 1) if found else NOT_MEASURED


def _gain(found: Estimate | None) -> tuple[str, str]:
    return ratio(found.value if found else None), interval(asdict(found) if found else None)
