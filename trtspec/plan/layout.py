"""How a deployment lies over its ranks, and why: memory and a plain step of this layout and of its neighbours.

Tensor parallelism splits every matrix and every head. With attention-DP each rank keeps attention, dense layers, shared
experts and the output layer whole and serves sequences of its own; only the routed experts are shared out
(TensorRT-LLM's parallel-strategy page for attention; unconfirmed that every model does so with the rest). That pays
where the cache cannot be split, as MLA's one latent head, and where enough sequences fill each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from trtspec.errors import PlanInfeasible
from trtspec.plan.deployment import Deployment
from trtspec.plan.drafter import Drafter
from trtspec.plan.memory import MemoryPlan, plan_memory
from trtspec.plan.request import PlanRequest
from trtspec.plan.step_time import RooflineStepTimes

# (tensor-parallel size, whether attention is data-parallel) → that deployment.
Lay = Callable[[int, bool], Deployment]

# Methods whose draft keeps a KV pool of its own, which TensorRT-LLM does not run beside attention-DP.
SEPARATE_POOL = ("draft_model", "pard")
_LARGEST_BATCH = 4096


def choose_layout(request: PlanRequest, lay: Lay) -> tuple[Deployment, dict[str, str]]:
    """The deployment that is planned, and setting → why it has its value; none off TensorRT-LLM.

    Raises PlanInfeasible for a demanded attention-DP that cannot be.
    """
    if request.backend != "tensorrt_llm":
        return lay(request.tensor_parallel, False), {}
    data_parallel, why = _attention_dp(request, lay)
    deployment = lay(request.tensor_parallel, data_parallel)
    return deployment, {
        "tensor_parallel": _tensor_parallel(request, lay, deployment),
        "pipeline_parallel": _pipeline_parallel(request),
        "attention_dp": why,
    }


def _attention_dp(request: PlanRequest, lay: Lay) -> tuple[bool, str]:
    """Whether attention is data-parallel, and why."""
    ranks = request.tensor_parallel
    against = None
    if ranks == 1:
        against = "one rank serves all sequences"
    elif request.method in SEPARATE_POOL:
        against = f"{request.method}'s draft has a KV pool of its own, which attention-DP does not run with"
    if against and request.attention_dp == "always":
        raise PlanInfeasible(against, where="engine.attention_dp", hint="engine.attention_dp: auto")
    if against or request.attention_dp == "never":
        return False, against or "as configured"
    whole = lay(ranks, True)
    if request.attention_dp == "always":
        return True, f"as configured; {_each_rank(request, whole)}"
    if not whole.mixture[0]:
        return False, (
            "no routed experts: every rank would hold the whole model, which serving.instances has without waiting "
            "for each other"
        )
    split = lay(ranks, False)
    batch = request.batch_sizes[-1]
    slower, faster = _step_ms(split, batch, request), _step_ms(whole, batch, request)
    times = f"a plain step at batch {batch} takes {faster:.1f} ms with attention-DP, {slower:.1f} without"
    first = next((b for b in _doublings() if _step_ms(whole, b, request) < _step_ms(split, b, request)), None)
    times += f"; it pays from batch {first}" if first else "; it pays at no batch size"
    ratio = prod(_step_ms(whole, b, request) / _step_ms(split, b, request) for b in request.batch_sizes)
    fits, others = _memory(request, whole), _memory(request, split)
    if fits.fits and (ratio < 1 or not others.fits):
        return True, f"{times}; {_each_rank(request, whole)}, {_each_rank(request, split)} without"
    if not fits.fits:
        return False, f"with attention-DP {fits.max_batch} sequences would fit, {fits.batch} are asked for"
    return False, times


def _tensor_parallel(request: PlanRequest, lay: Lay, deployment: Deployment) -> str:
    """Weights and cache of a rank, the step, and both of the next smaller and larger size."""
    ranks, batch = request.tensor_parallel, request.batch_sizes[-1]
    memory = _memory(request, deployment)
    said = [
        f"as configured: {_gb(memory.weight_bytes)} of weights and {_gb(memory.kv_bytes)} of cache at batch {batch} on "
        f"each of {ranks} rank(s) of {_gb(memory.device_bytes)}"
    ]
    for size in (ranks // 2, ranks * 2):
        if size and all(g.heads is None or g.per_rank(size) for g in deployment.facts.attention):
            other = lay(size, deployment.attention_dp and size > 1)
            fits = "" if _memory(request, other).fits else ", which do not hold it"
            said.append(f"{_step_ms(other, batch, request):.1f} on {size}{fits}")
    return f"{said[0]}; a plain step takes {', '.join([f'{_step_ms(deployment, batch, request):.1f} ms', *said[1:]])}"


def _pipeline_parallel(request: PlanRequest) -> str:
    if request.pipeline_parallel == 1:
        return "one stage: speculation excludes more, and they would not shorten a step"
    return f"as configured: the layers in {request.pipeline_parallel} stages, one after the other"


def _each_rank(request: PlanRequest, deployment: Deployment) -> str:
    memory = _memory(request, deployment)
    return f"{_gb(memory.weight_bytes)} of weights and {_gb(memory.kv_bytes)} of cache a rank"


def _memory(request: PlanRequest, deployment: Deployment) -> MemoryPlan:
    """Memory without a drafter, which is the same in every layout."""
    return plan_memory(
        deployment,
        Drafter("none", "none"),
        batch=request.batch_sizes[-1],
        sequence_tokens=request.context + request.output_length,
        draft_length=0,
    )


def _step_ms(deployment: Deployment, batch: int, request: PlanRequest) -> float:
    return RooflineStepTimes(deployment).step(batch, 0, request.context).total * 1e3


def _doublings() -> list[int]:
    return [1 << power for power in range(_LARGEST_BATCH.bit_length())]


def _gb(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"
