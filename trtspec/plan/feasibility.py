"""What a plan must respect, said with the nearest feasible change; and what would change its decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.heads import HeadFacts, head_of
from trtspec.checkpoints.pairing import check_head
from trtspec.checkpoints.vocabulary import check_draft_pair
from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.plan.deployment import Deployment, deploy, known_weights
from trtspec.plan.devices import Device
from trtspec.plan.request import PlanRequest
from trtspec.plan.result import Ranked
from trtspec.plan.roofline import linear_s
from trtspec.plan.schedule import ngram_auto, version_tuple
from trtspec.plan.search import Point, Workpoint, curve_points


def check_request(request: PlanRequest, facts: ArchitectureFacts, *, has_draft: bool = False) -> None:
    """Refuse what no draft length can mend. has_draft: a draft model or head is given beside the target."""
    known_weights(facts)
    if not facts.rope.known and request.must_fit:
        raise ConfigError(
            f"rope_type {facts.rope.kind!r} is unknown",
            where=facts.source,
            hint="it is never treated as the default schedule",
        )
    tokens = request.context + request.output_length
    limit = facts.max_position_embeddings
    if limit is not None and tokens > limit and request.must_fit:
        raise PlanInfeasible(
            f"workload.context {request.context} and output_length {request.output_length} make {tokens} "
            f"tokens; the model knows {limit} positions",
            hint=f"workload.context: {max(1, limit - request.output_length)}",
        )
    if request.max_seq_len is not None and tokens > request.max_seq_len:
        raise PlanInfeasible(
            f"workload.context and output_length make {tokens} tokens, engine.max_seq_len is {request.max_seq_len}",
            hint=f"engine.max_seq_len: {tokens}",
        )
    speculates = request.method != "none"
    if request.backend == "tensorrt_llm" and request.pipeline_parallel > 1 and speculates:
        raise PlanInfeasible(
            "TensorRT-LLM does not speculate over pipeline-parallel ranks",
            hint=(
                "engine.pipeline_parallel: 1 and tensor_parallel: "
                f"{request.tensor_parallel * request.pipeline_parallel}"
            ),
        )
    if request.method == "mtp" and facts.mtp_layers == 0 and not has_draft:
        raise PlanInfeasible(
            "the checkpoint has no MTP layers",
            where=facts.source,
            hint="name a folder of MTP modules in speculation.draft.model, or take speculation.method: ngram",
        )


def format_plan(request: PlanRequest, facts: ArchitectureFacts, notes: list[str]) -> dict[str, Any]:
    """Fit the quantization format to the model's widths; raises PlanInfeasible naming what works."""
    stored = facts.quantization.algorithm
    if request.quantization == "none":
        return {"format": "none", "stored": stored, "block_size": None, "excluded": [], "execution": None}
    if stored is not None:
        raise PlanInfeasible(
            f"the checkpoint is {stored} already; it cannot be quantized again",
            where=facts.source,
            hint="target.quantization: none, or name the unquantized checkpoint",
        )
    from trtspec.quantize.formats import check_format, get_format

    widths = {
        name: width
        for name, width in known_weights(facts).widths
        if name != "lm_head" or request.quantize_lm_head
    }
    fitted = check_format(request.quantization, widths, request.block_size)
    notes.extend(fitted.notes)
    execution = get_format(fitted.name).onnxruntime if request.backend == "onnxruntime" else None
    if execution is not None:
        notes.append(f"{fitted.name} weights run on the CPU engine as: {execution}")
    return {
        "format": fitted.name,
        "stored": stored,
        "block_size": fitted.block_size,
        "excluded": list(fitted.excluded),
        "execution": execution,
    }


def check_draft(
    request: PlanRequest,
    facts: ArchitectureFacts,
    draft: ArchitectureFacts | HeadFacts | None,
    warnings: list[str],
    notes: list[str],
) -> tuple[int, ...] | None:
    """Check the draft against the target; returns the target layers it captures (0-based)."""
    captured = None
    if isinstance(draft, HeadFacts):
        if (
            draft.method is not None
            and request.method != "auto"
            and head_of(draft.method) != head_of(request.method)
        ):
            raise ConfigError(
                f"speculation.method is {request.method}, the draft is a {draft.method} head",
                where=draft.source,
                hint=f"speculation.method: {draft.method}",
            )
        _check_head_format(request)
        found, layers = check_head(facts, draft)
        captured = layers.zero_based if layers else None
        warnings.extend(draft.warnings)
    elif draft is not None:
        found = check_draft_pair(facts, draft)
    else:
        found = []
    warnings.extend(f.text for f in found if f.level == "warning")
    notes.extend(f.text for f in found if f.level == "note")
    _check_kv_dtypes(request, draft, warnings)
    return captured


def _check_head_format(request: PlanRequest) -> None:
    """The CPU engine's heads run in float32 or int8."""
    formats = ("none", "int8_weight_only")
    if request.backend == "onnxruntime" and (request.draft_quantization or "none") not in formats:
        raise PlanInfeasible(
            f"the onnxruntime backend does not run heads of {request.method} in {request.draft_quantization}",
            where="speculation.draft.quantization",
            hint=f"it runs {', '.join(formats)}",
        )


def _check_kv_dtypes(
    request: PlanRequest, draft: ArchitectureFacts | HeadFacts | None, warnings: list[str]
) -> None:
    """FP8 targets with 16-bit EAGLE-3 heads: one engine with two cache dtypes, broken before TensorRT-LLM 1.2."""
    if not isinstance(draft, HeadFacts) or request.backend != "tensorrt_llm" or draft.quantization.algorithm:
        return
    if request.kv_cache != "fp8" or request.method not in ("eagle3", "p_eagle"):
        return
    if request.version is not None and version_tuple(request.version) < (1, 2):
        raise PlanInfeasible(
            f"TensorRT-LLM {request.version} cannot run an FP8 KV cache beside a 16-bit EAGLE-3 head",
            hint="target.kv_cache: auto, a quantized head, or engine.version: 1.2.1",
        )
    warnings.append(
        "target KV cache FP8, head KV cache 16 bit: two cache dtypes in one engine; keep chunked prefill off "
        "before TensorRT-LLM 1.2.1"
    )


def choose_method(
    request: PlanRequest,
    ranking: Sequence[Ranked],
    facts: ArchitectureFacts,
    warnings: list[str],
    notes: list[str],
) -> str:
    """The configured mechanism, or the best ranked one for `auto`."""
    if request.method != "auto":
        if (
            request.method == "mtp"
            and facts.mtp_layers
            and request.draft_length != "auto"
            and int(request.draft_length) > facts.mtp_layers
        ):
            notes.append(
                f"draft length {request.draft_length} over {facts.mtp_layers} MTP layer(s): the last layer is "
                "reused for the further positions"
            )
        if request.method == "ngram" and request.backend == "tensorrt_llm":
            auto = ngram_auto(request.max_batch_size)
            state = (
                f"draft length {auto.draft_length}, {auto.max_ngram}-grams" if auto.mode == "on" else "off"
            )
            notes.append(
                f"TensorRT-LLM's own AUTO choice at max_batch_size {request.max_batch_size}: {state}"
            )
        return request.method
    usable = [r for r in ranking if r.speedup is not None and (r.available or not request.only_free)]
    if not request.only_free:
        usable = [r for r in usable if r.method != "mtp" or facts.mtp_layers]
    if not usable or (usable[0].speedup or 0.0) <= 1.0:
        warnings.append("no mechanism is predicted to beat plain decoding here: none is used")
        return "none"
    if not usable[0].available:
        notes.append(f"{usable[0].method} is the best by prediction; {usable[0].reason}")
    return usable[0].method


def smallest_fitting(facts: ArchitectureFacts, device: Device, quantization: str) -> int:
    """The smallest tensor-parallel size whose ranks hold the weights with room for a cache; 8 where none does."""
    known_weights(facts)
    stored = deploy(facts, device, backend="tensorrt_llm", quantization=quantization).stored_bytes
    for size in (1, 2, 4, 8, 16):
        fits = device.kind == "cpu" or stored / size < 0.85 * device.memory_bytes
        if fits and all(g.heads is None or g.per_rank(size) for g in facts.attention):
            return size
    return 1


def check_latency(
    request: PlanRequest, at: Callable[[str, int], Workpoint], method: str, chosen: Sequence[Point]
) -> None:
    """Refuse a plan whose latency limits are not kept at some batch size. chosen: the planned point of each."""
    limit = request.max_itl_ms
    for point in chosen:
        if limit is None or point.itl_ms <= limit:
            continue
        usable = [
            b for b in _batches_below(point.batch) if _fastest_itl_ms(at, method, b, request.context) <= limit
        ]
        change = f"workload.batch_sizes up to {usable[0]}, or " if usable else ""
        raise PlanInfeasible(
            f"max_itl_ms {limit:g} cannot be kept at batch {point.batch}: draft length {point.draft_length} gives "
            f"{point.itl_ms:.1f} ms between tokens",
            hint=f"{change}more tensor_parallel ranks, a quantized target or a higher workload.max_itl_ms",
        )
    if request.max_ttft_ms is not None:
        ttft_ms = prefill_s(at(method, 1).deployment, request.context) * 1e3
        if ttft_ms > request.max_ttft_ms:
            raise PlanInfeasible(
                f"max_ttft_ms {request.max_ttft_ms:g} cannot be kept: a prompt of {request.context} tokens "
                f"takes at least {ttft_ms:.0f} ms",
                hint=f"workload.max_ttft_ms: {ttft_ms * 1.2:.0f}, a shorter context or more tensor_parallel ranks",
            )


def _batches_below(batch: int) -> list[int]:
    """Smaller batch sizes, the largest first: all of few, every sixteenth of many."""
    return list(range(batch - 1, 0, -max(1, batch // 16)))


def _fastest_itl_ms(at: Callable[[str, int], Workpoint], method: str, batch: int, context: int) -> float:
    return min(p.itl_ms for p in curve_points(at(method, batch), batch, context) if not p.extrapolated)


def prefill_s(deployment: Deployment, tokens: int) -> float:
    """Seconds to run a prompt alone: all its rows through the linear layers, and causal attention over itself."""
    d, device = deployment, deployment.device
    compute = max(d.weights, key=lambda w: w.bytes if w.kind != "embedding" else 0.0).compute
    flops = device.achieved_flops(compute) * d.tensor_parallel
    linear = linear_s(
        d.read_parameters,
        d.read_bytes(tokens),
        tokens,
        flops,
        device.achieved_bw,
        device.overlap,
    )
    pairs = sum(
        s.layers * (s.heads or 0) * (s.head_dim or 0) * tokens * min(tokens, s.window or tokens)
        for s in d.attention
    )
    return linear + 2 * pairs / (device.achieved_flops("bf16") * d.tensor_parallel)
