"""What is planned: a model as it will be served on a device, sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.checkpoints.attention import AttentionGroup
from trtspec.checkpoints.facts import ArchitectureFacts, element_bytes
from trtspec.checkpoints.weights import WeightFacts
from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.plan.devices import Device
from trtspec.plan.roofline import distinct_experts, ridge_tokens
from trtspec.plan.tiles import TileKernel, select_kernel, select_tile

_COMPUTE = {"none": "bf16", "fp8": "fp8", "int8": "int8", "nvfp4": "fp4"}
# Bytes per weight of ONNX Runtime's kernels (8 bit in blocks of 64 with a float scale) and their arithmetic.
_CPU = {"int8 kernel": (1 + 4 / 64, "int8"), "int4 kernel": (0.5 + 4 / 32, "int4")}
HIERARCHICAL = "hierarchical_int8"  # the KV dtype of QuantSpec's target
# The CPU engine expands such a cache to float32 at every pass: as much time as this traffic for one element.
_EXPANDED_BYTES = 25.0
# A format covers these; embedding, output layer and routers stay as they are unless asked for.
_QUANTIZED = frozenset({"attention", "linear_attention", "ffn", "expert", "shared_expert"})


@dataclass(frozen=True, slots=True)
class ServedClass:
    """Weights of one class as served: bytes over all ranks, and the precision their matrix multiply runs in."""

    kind: str
    parameters: int
    bytes: float
    compute: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model as served. context: tokens in the cache while decoding. kv_dtype: of the cache.

    backend: engine backend. weights: by class, routed experts with all copies. mixture: (experts, experts per token).
    attention_dp: each rank keeps everything but the routed experts whole, and serves its own share of the sequences.
    least_rows: rows a step has at least; the exact CPU engine pads a single row, whose kernels round differently.
    """

    facts: ArchitectureFacts
    device: Device
    backend: str
    weights: tuple[ServedClass, ...]
    kv_dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_dp: bool = False
    mixture: tuple[int, int] = (0, 0)
    quantization: str = "none"
    least_rows: int = 1

    @property
    def head_ranks(self) -> int:
        """Ranks that share out the attention heads of one sequence."""
        return 1 if self.attention_dp else self.tensor_parallel

    @property
    def shares(self) -> int:
        """Groups of ranks that serve sequences of their own."""
        return self.tensor_parallel // self.head_ranks

    def sequences(self, batch: int) -> int:
        """Sequences of a batch whose attention one rank runs, of the rank that has most."""
        return -(-batch // self.shares)

    def ranks_of(self, kind: str) -> int:
        """Ranks that share out the weights of one class."""
        return self.tensor_parallel if kind == "expert" else self.head_ranks

    @property
    def attention(self) -> tuple[AttentionGroup, ...]:
        """Attention shapes with a cache."""
        return tuple(
            g for g in self.facts.attention if g.kind not in ("linear", "none") and g.heads and g.kv_heads
        )

    @property
    def stored(self) -> tuple[ServedClass, ...]:
        """Classes that take memory: a tied output layer is the embedding."""
        return tuple(w for w in self.weights if not (w.kind == "lm_head" and self.facts.tied_embeddings))

    @property
    def stored_bytes(self) -> float:
        """Weights of one copy of the model, all ranks together."""
        return sum(w.bytes for w in self.stored)

    @property
    def rank_bytes(self) -> float:
        """Weights that one rank stores."""
        return sum(w.bytes / self.ranks_of(w.kind) for w in self.stored) / self.pipeline_parallel

    @property
    def read_parameters(self) -> int:
        """Parameters a single token multiplies with (embedding lookups excluded, routed experts by the visit)."""
        experts, per_token = self.mixture
        share = per_token / experts if experts else 1.0
        return round(
            sum(
                w.parameters * (share if w.kind == "expert" else 1)
                for w in self.weights
                if w.kind != "embedding"
            )
        )

    def read_bytes(self, tokens: float) -> float:
        """Weight bytes that a step of `tokens` rows reads on one rank: experts by how many are visited."""
        experts, per_token = self.mixture
        visited = distinct_experts(experts, per_token, tokens) / experts if experts else 1.0
        return sum(
            w.bytes * (visited if w.kind == "expert" else 1) / self.ranks_of(w.kind)
            for w in self.weights
            if w.kind != "embedding"
        )

    @property
    def ridge_rows(self) -> float:
        """M*: rows of a step at which the heaviest linear layers turn compute-bound; a mixture's experts share them."""
        heaviest = max(self.weights, key=lambda w: w.bytes if w.kind != "embedding" else 0.0)
        size = heaviest.bytes / max(1, heaviest.parameters)
        rows = ridge_tokens(self.device.achieved_flops(heaviest.compute), self.device.achieved_bw, size)
        experts, per_token = self.mixture
        return rows * experts / per_token if heaviest.kind == "expert" and per_token else rows

    @property
    def kv_element_bytes(self) -> float:
        """Bytes of one cached element."""
        return element_bytes(self.kv_dtype)

    @property
    def kv_moved_bytes(self) -> float:
        """Bytes a step moves for one cached element: those it has, and where it is expanded first, all that takes."""
        expanded = self.kv_dtype == HIERARCHICAL and self.device.kind == "cpu"
        return _EXPANDED_BYTES if expanded else self.kv_element_bytes

    def kernel_of(self, shape: AttentionGroup) -> TileKernel:
        """The verify-attention kernel this backend uses for a shape."""
        return select_kernel(self.backend, self.device.arch, shape.head_dim, shape.kind == "mla")

    def tile_of(self, shape: AttentionGroup, draft_length: int) -> tuple[TileKernel, int, int]:
        """(kernel, tile rows M, tiles per KV head) of one shape on one rank at a draft length."""
        heads = shape.per_rank(self.head_ranks)
        group = heads[0] // heads[1] if heads else (shape.group or 1)
        kernel = self.kernel_of(shape)
        rows = select_tile(kernel, group, draft_length, self.kv_element_bytes, "bf16")
        return kernel, rows, kernel.count(group, draft_length, rows)


def deploy(
    facts: ArchitectureFacts,
    device: Device,
    *,
    backend: str,
    quantization: str = "none",
    quantize_lm_head: bool = False,
    kv_cache: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    attention_dp: bool = False,
    exact: bool = False,
) -> Deployment:
    """Lay a model out on a device. exact: rows must not influence each other (`numerics: exact`).

    Raises ConfigError where the file lacks sizes, PlanInfeasible where heads do not divide or the device has no
    kernel for the format.
    """
    weights = known_weights(facts)
    if not attention_dp:
        check_division(facts, tensor_parallel)
    _check_format(quantization, device)
    return Deployment(
        facts=facts,
        device=device,
        backend=backend,
        weights=_served(facts, weights, device, quantization, quantize_lm_head),
        kv_dtype=_kv_dtype(facts, device, kv_cache),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        attention_dp=attention_dp,
        mixture=(weights.experts, weights.experts_per_token),
        quantization=quantization if quantization != "none" else (facts.quantization.algorithm or "none"),
        least_rows=2 if exact and backend == "onnxruntime" else 1,
    )


def known_weights(facts: ArchitectureFacts) -> WeightFacts:
    """The model's sizes. Raises ConfigError naming the missing key: a plan without weights would be a guess."""
    if facts.weights is None:
        said = next(
            (w for w in facts.warnings if w.endswith("sizes are not known")), "its sizes are not known"
        )
        hint = "a plan needs the full config.json of the model, or its weight files beside it"
        raise ConfigError(said, where=facts.source, hint=hint)
    return facts.weights


def check_division(facts: ArchitectureFacts, tensor_parallel: int) -> None:
    """Raise PlanInfeasible, naming the division that fails and the sizes that work."""
    for shape in facts.attention:
        if shape.heads is None or shape.kv_heads is None or shape.per_rank(tensor_parallel) is not None:
            continue
        works = [
            str(size)
            for size in range(1, 65)
            if all(g.heads is None or g.per_rank(size) for g in facts.attention)
        ]
        if shape.heads % tensor_parallel:
            fault = (
                f"{shape.heads} query heads do not split over {tensor_parallel} ranks ({shape.heads} % "
                f"{tensor_parallel} = {shape.heads % tensor_parallel})"
            )
        else:
            larger, smaller = max(shape.kv_heads, tensor_parallel), min(shape.kv_heads, tensor_parallel)
            fault = (
                f"{shape.kv_heads} KV heads neither split over nor replicate to {tensor_parallel} ranks "
                f"({larger} % {smaller} = {larger % smaller})"
            )
        raise PlanInfeasible(
            fault, where=facts.source, hint=f"engine.tensor_parallel: one of {', '.join(works)}"
        )


def _served(
    facts: ArchitectureFacts, weights: WeightFacts, device: Device, quantization: str, quantize_lm_head: bool
) -> tuple[ServedClass, ...]:
    """Classes as served: stored bytes where nothing is quantized here, the format's bytes where it is."""
    served = [
        _served_class(facts, c.kind, c.parameters, c.bytes, device, quantization, quantize_lm_head)
        for c in weights.classes
    ]
    if facts.tied_embeddings:  # the output layer multiplies with the embedding table
        table = weights.of("embedding")
        served.append(
            _served_class(
                facts, "lm_head", table.parameters, table.bytes, device, quantization, quantize_lm_head
            )
        )
    return tuple(served)


def _served_class(
    facts: ArchitectureFacts,
    kind: str,
    parameters: int,
    stored: float,
    device: Device,
    quantization: str,
    quantize_lm_head: bool,
) -> ServedClass:
    covered = kind in _QUANTIZED or (kind == "lm_head" and quantize_lm_head)
    if quantization != "none" and covered:
        from trtspec.quantize.formats import get_format

        chosen = get_format(quantization)
        if device.kind == "cpu":
            size, compute = _CPU.get(chosen.onnxruntime, (4.0, "fp32"))
            return ServedClass(kind, parameters, parameters * size, compute)
        return ServedClass(
            kind, parameters, parameters * chosen.bits_per_weight / 8, _COMPUTE[chosen.activations]
        )
    if device.kind == "cpu":
        return ServedClass(kind, parameters, parameters * 4.0, "fp32")
    quantized = stored < parameters * 1.9  # stored below 16 bits
    return ServedClass(kind, parameters, stored, facts.quantization.compute if quantized else "bf16")


def _kv_dtype(facts: ArchitectureFacts, device: Device, kv_cache: str) -> str:
    if kv_cache != "auto":
        return kv_cache
    if device.kind == "cpu":
        return "float32"
    return (
        facts.kv_dtype
        if facts.quantization.kv_dtype or facts.dtype in ("float16", "bfloat16")
        else "bfloat16"
    )


def _check_format(quantization: str, device: Device) -> None:
    if quantization == "none" or device.kind == "cpu":
        return
    from trtspec.quantize.formats import FORMATS, get_format

    capability = int(device.arch.removeprefix("sm_"))
    if get_format(quantization).min_sm > capability:
        works = [name for name, item in FORMATS.items() if item.min_sm <= capability and name != "none"]
        raise PlanInfeasible(
            f"{quantization} has no kernels on {device.name} ({device.arch}); it needs "
            f"sm_{get_format(quantization).min_sm} or newer",
            hint=f"on this device: {', '.join(works)}",
        )
