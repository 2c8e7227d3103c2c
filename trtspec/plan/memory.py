"""Where the memory goes: weights, drafter, KV blocks with draft tokens, recurrent state, and the largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

from trtspec.checkpoints.attention import AttentionGroup
from trtspec.errors import PlanInfeasible
from trtspec.plan.deployment import Deployment
from trtspec.plan.drafter import Drafter

# Share of what weights leave free that the cache may take; the rest is activations, graphs, workspaces.
KV_FRACTION = 0.9
KV_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one rank. kv_bytes, draft_kv_bytes: the two pools, split so that both hold the same tokens.

    sequence_tokens: cache tokens of one sequence, draft tokens included, in whole blocks. max_batch: sequences
    that fit. batch: what was asked for. fits: whether it does.
    """

    device_bytes: float
    weight_bytes: float
    draft_bytes: float
    sequence_bytes: float
    sequence_tokens: int
    kv_bytes: float
    draft_kv_bytes: float
    kv_dtype: str
    draft_kv_dtype: str | None
    max_batch: int
    batch: int

    @property
    def fits(self) -> bool:
        """Whether the weights and the asked-for batch fit."""
        return self.max_batch >= self.batch

    def as_json(self) -> dict[str, object]:
        """Rounded bytes, and the verdict."""
        return {
            "device_bytes": round(self.device_bytes),
            "weight_bytes": round(self.weight_bytes),
            "draft_bytes": round(self.draft_bytes),
            "kv_bytes": round(self.kv_bytes),
            "draft_kv_bytes": round(self.draft_kv_bytes),
            "kv_dtype": self.kv_dtype,
            "draft_kv_dtype": self.draft_kv_dtype,
            "sequence_bytes": round(self.sequence_bytes),
            "sequence_tokens": self.sequence_tokens,
            "max_batch": self.max_batch,
            "batch": self.batch,
            "fits": self.fits,
        }


def split_kv_budget(
    budget_bytes: float, target_per_token: float, draft_per_token: float
) -> tuple[float, float]:
    """Divide one KV budget so that target and draft hold the same number of tokens."""
    total = target_per_token + draft_per_token
    return (
        (budget_bytes, 0.0)
        if not total
        else (budget_bytes * target_per_token / total, budget_bytes * draft_per_token / total)
    )


def plan_memory(
    deployment: Deployment, drafter: Drafter, *, batch: int, sequence_tokens: int, draft_length: int
) -> MemoryPlan:
    """Memory of one rank for `batch` sequences of `sequence_tokens` (prompt and output) at a draft length."""
    d, weights = deployment, deployment.rank_bytes
    draft = drafter.memory_bytes / drafter.ranks
    tokens = -(-(sequence_tokens + draft_length + 1) // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    target_kv = sum(_cache_bytes(d, shape, tokens) for shape in d.attention) / d.pipeline_parallel
    # Recurrent state is kept once per position of the step, so that a rejected tail can be rolled back.
    state = (d.facts.recurrent_state_elements or 0) * 4.0 * (draft_length + 1) / (
        d.head_ranks * d.pipeline_parallel
    ) + drafter.sequence_bytes
    draft_kv = drafter.kv_bytes_per_token * tokens / drafter.ranks
    per_sequence = target_kv + draft_kv + state
    free = (d.device.memory_bytes - weights - draft) * KV_FRACTION
    fitting = max(0, floor(free / per_sequence)) * d.shares if per_sequence else 1_000_000
    own = d.sequences(batch)
    pool = max(0.0, min(free, per_sequence * own) - state * own)
    kv, kv_draft = split_kv_budget(pool, target_kv, draft_kv)
    return MemoryPlan(
        device_bytes=d.device.memory_bytes,
        weight_bytes=weights,
        draft_bytes=draft,
        sequence_bytes=per_sequence,
        sequence_tokens=tokens,
        kv_bytes=kv,
        draft_kv_bytes=kv_draft,
        kv_dtype=d.kv_dtype,
        draft_kv_dtype=drafter.kv_dtype,
        max_batch=fitting,
        batch=batch,
    )


def _cache_bytes(deployment: Deployment, shape: AttentionGroup, tokens: int) -> float:
    """Cache of one sequence and one shape on one rank; a windowed layer keeps its window."""
    heads = shape.per_rank(deployment.head_ranks)
    per_token = shape.cache_elements_per_token
    if heads is None or per_token is None or not shape.kv_heads:
        return 0.0
    kept = min(tokens, shape.window + KV_BLOCK_TOKENS) if shape.window else tokens
    return per_token * heads[1] / shape.kv_heads * kept * deployment.kv_element_bytes


def refuse_misfit(
    memory: MemoryPlan, deployment: Deployment, *, must_fit: bool, max_batch_size: int
) -> list[str]:
    """Raise PlanInfeasible with the nearest change where the workload does not fit; without `must_fit` say so."""
    if memory.fits:
        if memory.max_batch >= max_batch_size:
            return []
        return [
            f"engine.max_batch_size {max_batch_size} is more than the {memory.max_batch} sequences of "
            f"{memory.sequence_tokens} tokens that fit: the rest will wait"
        ]
    name, resident = deployment.device.name, memory.weight_bytes + memory.draft_bytes
    if resident > memory.device_bytes:
        fault = f"{resident / 1e9:.1f} GB of weights do not fit {memory.device_bytes / 1e9:.0f} GB on {name}"
    else:
        fault = (
            f"only {memory.max_batch} sequences of {memory.sequence_tokens} tokens fit beside {resident / 1e9:.1f} GB "
            f"of weights on {name}, batch {memory.batch} is asked for"
        )
    hint = "; or ".join(_nearest_changes(memory, deployment)) or "a device with more memory"
    if must_fit:
        raise PlanInfeasible(fault, hint=hint)
    return [f"{fault}; {hint}"]


def _nearest_changes(memory: MemoryPlan, deployment: Deployment) -> Iterator[str]:
    if deployment.device.kind == "gpu":
        ranks = deployment.tensor_parallel
        need = (memory.weight_bytes + memory.sequence_bytes * memory.batch / KV_FRACTION) * ranks
        for size in (2, 4, 8, 16, 32, 64):
            divides = all(g.heads is None or g.per_rank(size) for g in deployment.facts.attention)
            if size > ranks and divides and need / size + memory.draft_bytes < memory.device_bytes:
                yield f"engine.tensor_parallel: {size}"
                break
    if memory.max_batch:
        yield f"workload.batch_sizes up to {memory.max_batch}"
    if deployment.device.kind == "gpu" and deployment.quantization == "none":
        yield "target.quantization: fp8"
    if deployment.device.kind == "gpu" and deployment.kv_element_bytes >= 2:
        yield "target.kv_cache: fp8"
