"""Seconds of one decode step, by term: from the roofline and the attention staircase, or from measurements.

A step of B sequences at draft length D runs rows = B·(D+1). `StepTimes` is what the search asks; which of the
two implementations answers is the plan's only difference between prediction and measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

from trtspec.checkpoints.attention import AttentionGroup
from trtspec.plan.deployment import Deployment
from trtspec.plan.roofline import (
    allreduce_s,
    attention_exp_s,
    attention_memory_s,
    attention_mma_s,
    distinct_experts,
    linear_s,
)
from trtspec.plan.step_table import StepTable

# Kernels (or executor nodes) of one decoder layer of a fused implementation.
KERNELS_PER_LAYER = 10


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step by term. draft: all of the drafter's work; the other terms are the target's."""

    linear: float = 0.0
    attention: float = 0.0
    recurrent: float = 0.0
    communication: float = 0.0
    launch: float = 0.0
    draft: float = 0.0
    measured: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, f.name) for f in fields(self))

    def terms(self) -> dict[str, float]:
        """Term name → seconds, zero terms left out."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}


class StepTimes(Protocol):
    """Target step times; the drafter's are added by the search."""

    source: str

    def step(self, batch: int, draft_length: int, context: int) -> StepCost:
        """Cost of one step that verifies `draft_length` drafts for each of `batch` sequences."""


@dataclass(frozen=True, slots=True)
class RooflineStepTimes:
    """The model: weights read once a step, FLOP by rows, attention by tiles, KV traffic, launches, all-reduce.

    Steps are remembered: a search asks for the same ones for every mechanism.
    """

    deployment: Deployment
    source: str = "roofline model"
    _steps: dict[tuple[int, int, int], StepCost] = field(default_factory=dict, compare=False, repr=False)

    def step(self, batch: int, draft_length: int, context: int) -> StepCost:
        """See `StepTimes.step`."""
        key = (batch, draft_length, context)
        if key not in self._steps:
            self._steps[key] = self._step(batch, draft_length, context)
        return self._steps[key]

    def _step(self, batch: int, draft_length: int, context: int) -> StepCost:
        d = self.deployment
        draft_length = max(draft_length, -(-d.least_rows // batch) - 1)  # a padded row costs like a real one
        rows = batch * (draft_length + 1)
        return StepCost(
            linear=self._linear(rows, d.sequences(batch) * (draft_length + 1)),
            attention=sum(self._attention(shape, batch, draft_length, context) for shape in d.attention),
            recurrent=self._recurrent(batch, draft_length),
            communication=self._communication(rows),
            launch=(d.facts.layers or 0) * KERNELS_PER_LAYER * d.device.launch_s,
        )

    def _linear(self, rows: int, own_rows: int) -> float:
        """own_rows: of the rank's own sequences; the routed experts see the rows of all ranks."""
        d, device = self.deployment, self.deployment.device
        experts, per_token = d.mixture
        total = 0.0
        for w in d.weights:
            if w.kind == "embedding":
                continue
            share = (
                distinct_experts(experts, per_token, rows) / experts
                if w.kind == "expert" and experts
                else 1.0
            )
            # A visited expert multiplies its own share of the rows: k/E of the parameters times all rows in sum.
            active = w.parameters * (per_token / experts if w.kind == "expert" and experts else 1.0)
            tile = 1 if w.kind == "expert" else None
            flops, ranks = device.achieved_flops(w.compute), d.ranks_of(w.kind)
            seen = rows if w.kind == "expert" else own_rows
            args = (active / ranks, w.bytes * share / ranks, seen, flops, device.achieved_bw, device.overlap)
            total += linear_s(*args) if tile is None else linear_s(*args, row_tile=tile)
        return total

    def _attention(self, shape: AttentionGroup, batch: int, draft_length: int, context: int) -> float:
        d, device = self.deployment, self.deployment.device
        heads, batch = shape.per_rank(d.head_ranks), d.sequences(batch)
        if heads is None or shape.head_dim is None:
            return 0.0
        keys = float(min(context, shape.window) if shape.window else context) + draft_length + 1
        value_dim = shape.value_dim or shape.head_dim
        stored = shape.head_dim + (0 if shape.kind == "mla" else value_dim)
        cache = heads[1] * stored * keys * d.kv_moved_bytes * batch
        memory = attention_memory_s(cache, device.achieved_bw)
        _, tile_rows, tiles = d.tile_of(shape, draft_length)
        padded = heads[0] // heads[1] * (draft_length + 1) if not device.overlap else tiles * tile_rows
        flops = device.achieved_flops("bf16")
        mma = attention_mma_s(padded, keys, shape.head_dim, value_dim, heads[1] * batch, flops)
        if not device.overlap:
            return shape.layers * (memory + mma)
        exp = attention_exp_s(padded, keys, heads[1] * batch, device.sms, device.clock_hz)
        return shape.layers * max(memory, mma, exp)

    def _recurrent(self, batch: int, draft_length: int) -> float:
        """State of recurrent layers: read once, written after every token so that a rejected tail can roll back."""
        d = self.deployment
        state = d.facts.recurrent_state_elements
        if not state:
            return 0.0
        return d.sequences(batch) * state * 4.0 * (1 + draft_length + 1) / d.head_ranks / d.device.achieved_bw

    def _communication(self, rows: int) -> float:
        """Two all-reduces a layer of rows × hidden activations in 16 bit. With attention-DP the rows are gathered and
        scattered around the experts alone, which moves as much as one all-reduce."""
        d, ranks = self.deployment, self.deployment.tensor_parallel
        message = rows * (d.facts.hidden_size or 0) * 2.0
        once = allreduce_s(message, ranks, d.device.link_bw_bytes_per_s, d.device.allreduce_latency_s)
        return (1 if d.attention_dp else 2) * (d.facts.layers or 0) * once


@dataclass(frozen=True, slots=True)
class MeasuredStepTimes:
    """Step times of a probe or a run, interpolated."""

    table: StepTable

    @property
    def source(self) -> str:
        """Where the table was measured."""
        return self.table.source

    def step(self, batch: int, draft_length: int, context: int) -> StepCost:
        """See `StepTimes.step`."""
        return StepCost(measured=self.table.ms(batch, draft_length + 1, context) / 1e3)
