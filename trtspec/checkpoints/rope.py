"""Rotary position embedding parameters in all their spellings, and when two of them are the same schedule.

Spellings in the field: `rope_theta` + `rope_scaling {type | rope_type, factor, …}`, `rope_parameters` (one
object), and `rope_parameters` per layer type. `mrope` sections keep the default frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.checkpoints.config_view import ConfigView

# Schedules whose frequencies are known. Anything else is refused where the schedule matters, never "default".
KNOWN_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "ntk"})
_SYNONYMS = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "none": "default"}
# Keys that change the frequencies; names and bookkeeping (rope_type, mrope_section, truncate) do not.
_NUMERIC = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """One rotary schedule. theta: base, None where the file does not say. scaling: sorted (key, number) pairs."""

    kind: str
    theta: float | None
    scaling: tuple[tuple[str, float], ...] = ()
    partial: float | None = None

    @property
    def known(self) -> bool:
        """Whether the schedule's formula is known."""
        return self.kind in KNOWN_TYPES

    @property
    def original_max_position(self) -> int | None:
        """Positions up to which a scaled schedule was pretrained, where stated."""
        value = dict(self.scaling).get("original_max_position_embeddings")
        return None if value is None else int(value)

    def same_schedule(self, other: RopeFacts) -> bool:
        """Whether both give the same frequencies at every position."""
        same_theta = self.theta is None or other.theta is None or self.theta == other.theta
        return self.kind == other.kind and same_theta and _comparable(self) == _comparable(other)

    def describe(self) -> str:
        """One line: type, base and the numbers that matter."""
        numbers = ", ".join(f"{name} {value:g}" for name, value in self.scaling)
        base = f"theta {self.theta:g}" if self.theta is not None else "theta not stated"
        return f"{self.kind} ({base}{', ' + numbers if numbers else ''})"


def read_rope(view: ConfigView) -> RopeFacts:
    """The schedule of the (full-attention) layers. An unknown type is kept as it is spelled; `known` says so."""
    scaling = view.get("rope_scaling")
    parameters = view.get("rope_parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get("full_attention"), Mapping):
        parameters = parameters["full_attention"]
    source: Mapping[str, Any] = {}
    for candidate in (scaling, parameters):
        if isinstance(candidate, Mapping):
            source = {**source, **candidate}
    stated = source.get("rope_type") or source.get("type") or "default"
    kind = _SYNONYMS.get(str(stated), str(stated))
    theta = source.get("rope_theta")
    if not _is_number(theta):
        theta = view.number("rope_theta", "rotary_emb_base", "rope_base")
    numbers = {name: float(source[name]) for name in _NUMERIC if _is_number(source.get(name))}
    if kind != "default" and "original_max_position_embeddings" not in numbers:
        original = view.integer("original_max_position_embeddings")
        if original is not None:
            numbers["original_max_position_embeddings"] = float(original)
    partial = source.get("partial_rotary_factor")
    if not _is_number(partial):
        partial = view.number("partial_rotary_factor", "rotary_pct")
    return RopeFacts(
        kind=kind,
        theta=None if theta is None else float(theta),
        scaling=tuple(sorted(numbers.items())) if kind != "default" else (),
        partial=None if partial is None else float(partial),
    )


def _comparable(rope: RopeFacts) -> dict[str, float]:
    return {name: value for name, value in rope.scaling if _DEFAULTS.get(name) != value}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
