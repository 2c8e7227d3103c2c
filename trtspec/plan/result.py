"""The plan: what was decided, from what, and what it is expected to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtspec.checkpoints.attention import AttentionGroup
from trtspec.plan.acceptance import AcceptanceCurve
from trtspec.plan.deployment import Deployment
from trtspec.plan.drafter import Drafter
from trtspec.plan.memory import MemoryPlan
from trtspec.plan.request import DraftLengthPolicy
from trtspec.plan.schedule import Schedule
from trtspec.plan.search import Point


@dataclass(frozen=True, slots=True)
class Roofline:
    """Where plain decoding of the first batch size stands. Bytes and milliseconds of one step, peaks not derated.

    ideal_ms: weights and cache once at peak bandwidth. ridge_rows: rows at which the linear layers turn
    compute-bound; rows: what a plain step has. free_query_rows: R*, padded query rows per KV head that attention
    multiplies in the time it takes to read the cache.
    """

    weight_bytes: float
    cache_bytes: float
    ideal_ms: float
    ideal_tokens_per_s: float
    rows: int
    ridge_rows: float
    free_query_rows: float
    attention_share: float

    def as_json(self) -> dict[str, object]:
        """Rounded."""
        return {
            "weight_bytes": round(self.weight_bytes),
            "cache_bytes": round(self.cache_bytes),
            "ideal_ms": round(self.ideal_ms, 4),
            "ideal_tokens_per_s": round(self.ideal_tokens_per_s, 2),
            "rows": self.rows,
            "ridge_rows": round(self.ridge_rows, 1),
            "free_query_rows": round(self.free_query_rows, 1),
            "attention_share": round(self.attention_share, 4),
        }


@dataclass(frozen=True, slots=True)
class Ranked:
    """One mechanism at its best draft length for the first batch size. available: nothing has to be supplied.

    speedup is None where no acceptance is known; reason says what speaks for or against it.
    """

    method: str
    available: bool
    draft_length: int | None
    acceptance_length: float | None
    speedup: float | None
    draft_ms: float | None
    memory_bytes: float | None
    training: str
    reason: str

    def as_json(self) -> dict[str, object]:
        """All fields, rounded."""

        def rounded(value: float | None, digits: int) -> float | None:
            return None if value is None else round(value, digits)

        return {
            "method": self.method,
            "available": self.available,
            "draft_length": self.draft_length,
            "acceptance_length": rounded(self.acceptance_length, 4),
            "speedup": rounded(self.speedup, 4),
            "draft_ms": rounded(self.draft_ms, 4),
            "memory_bytes": rounded(self.memory_bytes, 0),
            "training": self.training,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The best point of one batch size and every point around it."""

    batch: int
    best: Point
    points: tuple[Point, ...]

    def at(self, draft_length: int) -> Point:
        """The point of one draft length."""
        return self.points[draft_length]


@dataclass(frozen=True, slots=True)
class Plan:
    """A decided deployment.

    method, draft_length: what is built ("none" and 0 where speculation does not pay); configured_method: what was
    asked for. candidates, binding: for the first batch size. schedule: over batch sizes. crossover: smallest batch
    from which plain decoding is at least as fast, None within max_batch_size. changes: what would change the decision.
    verify_step_ms: target milliseconds of a step with 1, 2, … rows of one sequence at the workload's context.
    draft_ms: milliseconds that drafting 0, 1, … tokens for it adds. draft_length_policy: whether the running system
    keeps draft_length, follows the schedule, or adapts to acceptance. version_reason: why backend_version was taken
    where the request names none. parallelism: setting of the layout over ranks → why it has its value.
    """

    method: str
    configured_method: str
    draft_length: int
    candidates: tuple[Point, ...]
    binding: str
    schedule: Schedule
    memory: MemoryPlan
    warnings: tuple[str, ...]
    deployment: Deployment
    drafter: Drafter
    curve: AcceptanceCurve | None
    batches: tuple[BatchPlan, ...]
    roofline: Roofline
    ranking: tuple[Ranked, ...]
    crossover: int | None
    notes: tuple[str, ...]
    changes: tuple[str, ...]
    step_source: str
    verify_step_ms: tuple[float, ...]
    draft_ms: tuple[float, ...]
    draft_length_policy: DraftLengthPolicy
    quantization: dict[str, Any]
    runtime_schedule: dict[int, int] | None
    backend_version: str | None
    captured_layers: tuple[int, ...] | None = None
    version_reason: str | None = None
    parallelism: Mapping[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> Point:
        """The planned point at the first batch size."""
        return self.batches[0].at(self.draft_length)

    def as_json(self) -> dict[str, Any]:
        """The result object of `trtspec plan`: the stable fields first."""
        chosen, d = self.chosen, self.deployment
        return {
            "method": self.method,
            "draft_length": self.draft_length,
            "candidates": [p.as_json() for p in self.candidates],
            "binding": self.binding,
            "schedule": self.schedule.as_json(),
            "memory": self.memory.as_json(),
            "warnings": list(self.warnings),
            "configured_method": self.configured_method,
            "speedup": round(chosen.speedup, 4),
            "tokens_per_s": round(chosen.tokens_per_s, 2),
            "acceptance": {
                "source": self.curve.source if self.curve else None,
                "kind": self.curve.kind if self.curve else None,
                "measured_to": self.curve.measured_to if self.curve else None,
                "rates": [round(rate, 4) for rate in self.curve.conditional] if self.curve else [],
            },
            "batches": [{"batch": b.batch, **b.best.as_json()} for b in self.batches],
            "crossover_batch": self.crossover,
            "roofline": self.roofline.as_json(),
            "ranking": [r.as_json() for r in self.ranking],
            "quantization": self.quantization,
            "step_time_source": self.step_source,
            "verify_step_ms": [round(ms, 4) for ms in self.verify_step_ms],
            "draft_ms": [round(ms, 4) for ms in self.draft_ms],
            "draft_length_policy": self.draft_length_policy,
            "device": {
                "name": d.device.name,
                "source": d.device.source,
                "assumed": list(d.device.assumed),
                "unconfirmed": list(d.device.unconfirmed),
            },
            "engine": {
                "backend": d.backend,
                "version": self.backend_version,
                "version_reason": self.version_reason,
                "tensor_parallel": d.tensor_parallel,
                "pipeline_parallel": d.pipeline_parallel,
                "attention_dp": d.attention_dp,
                "kv_dtype": d.kv_dtype,
                "draft_kv_dtype": self.drafter.kv_dtype,
            },
            "parallelism": dict(self.parallelism),
            "kernels": [self._kernel(shape) for shape in d.attention],
            "draft_len_schedule": (
                {str(k): v for k, v in self.runtime_schedule.items()} if self.runtime_schedule else None
            ),
            "captured_layers": list(self.captured_layers) if self.captured_layers is not None else None,
            "notes": list(self.notes),
            "changes": list(self.changes),
        }

    def _kernel(self, shape: AttentionGroup) -> dict[str, object]:
        d = self.deployment
        kernel, tile_rows, _ = d.tile_of(shape, self.draft_length)
        return {
            "kind": shape.kind,
            "group": shape.group_per_rank(d.head_ranks),
            "kernel": kernel.name,
            "tile_rows": tile_rows,
            "assumed": kernel.assumed,
        }
