"""Published acceptance, from priors.yaml: what a plan starts from when nothing was measured or declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trtspec.plan.acceptance import AcceptanceCurve, curve_from_points
from trtspec.plan.measured import measured_curve
from trtspec.plan.tree import likeliest_rate


@dataclass(frozen=True, slots=True)
class Prior:
    """One published row. points: (draft length, AL), or rates: conditional ones, or runs: (drafted, accepted, steps)
    of a lookup up to `draft_length`. drafts: chain or tree; nodes: of its tree of ranked candidates, 0 where that is
    not one; categories: AL by category; device: kind it ran on."""

    method: str
    source: str
    target: str
    drafts: str
    batch: int
    temperature: float
    device: str
    points: tuple[tuple[int, float], ...]
    rates: tuple[float, ...]
    runs: tuple[tuple[int, int, int], ...]
    draft_length: int
    nodes: int
    categories: tuple[tuple[str, float], ...]

    @property
    def label(self) -> str:
        """What a reader needs to judge it."""
        value = ", ".join(f"AL {al} at D = {d}" for d, al in self.points)
        if self.rates:
            value = f"rates {list(self.rates)}"
        if self.runs:
            value = f"{sum(n for _, _, n in self.runs)} recorded steps"
        return f"published: {self.source}; {self.target}, {self.drafts}, T = {self.temperature:g}: {value}"

    def curve(self) -> AcceptanceCurve:
        """Acceptance by position: the printed rates, or rates fitted to the printed AL."""
        return _curve(self)


@cache
def _curve(prior: Prior) -> AcceptanceCurve:
    if prior.runs:
        steps = [(drafted, accepted) for drafted, accepted, count in prior.runs for _ in range(count)]
        curve = measured_curve(steps, draft_length=prior.draft_length, retrieval=True, source=prior.label)
        return replace(curve or AcceptanceCurve((0.0,), prior.label, prior.draft_length), kind="published")
    if prior.rates:
        return AcceptanceCurve(prior.rates, prior.label, len(prior.rates))
    if prior.nodes:
        ((depth, length),) = prior.points
        rate = likeliest_rate(length, prior.nodes, depth)
        source = (
            f"{prior.label} (a tree of {prior.nodes} nodes; of the likeliest candidate {rate:.2f}, fitted)"
        )
        return AcceptanceCurve((rate,) * depth, source, depth)
    return curve_from_points(prior.points, prior.label)


def priors(method: str) -> tuple[Prior, ...]:
    """All published rows of a method, in the order of the file."""
    table = _table()
    return tuple(_prior(method, entry, table["sources"]) for entry in table["methods"].get(method, ()))


def stand_in(method: str) -> str | None:
    """The method whose published acceptance stands in for one that has none; None where nothing is close."""
    return _table()["stand_ins"].get(method)


def choose_prior(
    method: str, *, target: str, temperature: float, batch: int, device: str = "gpu"
) -> Prior | None:
    """The row nearest to a request: kind of device and model family first, then temperature, then batch size.

    Chain rows before tree rows (a tree's AL at the same depth is higher). None where nothing is published:
    acceptance is never invented.
    """
    rows = priors(method)
    if not rows:
        return None
    family = _family(target)
    return min(
        rows,
        key=lambda row: (
            row.drafts != "chain",
            row.device != device,
            _family(row.target) != family,
            abs((row.temperature > 0) - (temperature > 0)),
            abs(_magnitude(row.batch) - _magnitude(batch)),
        ),
    )


def _magnitude(batch: int) -> int:
    return batch.bit_length()


def _family(name: str) -> str:
    """`Llama-3.3-70B`, `meta-llama/…`, `llama` → llama; `qwen3_moe` → qwen3; empty where nothing is recognised."""
    text = name.lower().replace("-", "").replace("_", "").replace(".", "")
    known = (
        "llama",
        "vicuna",
        "gptoss",
        "deepseek",
        "kimi",
        "qwen3next",
        "qwen35",
        "qwen3",
        "qwen2",
        "minimax",
    )
    found = next((family for family in known if family in text), "")
    return {"vicuna": "llama", "kimi": "deepseek"}.get(found, found)


def _prior(method: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> Prior:
    return Prior(
        method=method,
        source=sources[entry["source"]],
        target=entry["target"],
        drafts=entry["drafts"],
        batch=int(entry["batch"]),
        temperature=float(entry["temperature"]),
        device=entry.get("device", "gpu"),
        points=_points(entry),
        runs=tuple((int(d), int(a), int(n)) for d, a, n in entry.get("runs", ())),
        draft_length=int(entry.get("draft", 0)),
        nodes=int(entry.get("nodes", 0)),
        rates=tuple(float(rate) for rate in entry.get("rates", ())),
        categories=tuple((name, float(value)) for name, value in entry.get("categories", {}).items()),
    )


def _points(entry: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    if "rates" in entry or "runs" in entry:
        return ()
    return tuple((int(d), float(al)) for d, al in entry.get("points") or [[entry["draft"], entry["al"]]])


@cache
def _table() -> Mapping[str, Any]:
    text = files("trtspec.plan").joinpath("priors.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
