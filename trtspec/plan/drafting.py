"""What drafting costs, by mechanism: passes, weights read per pass, cache, host work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.heads import HeadFacts
from trtspec.plan.deployment import HIERARCHICAL, Deployment, deploy
from trtspec.plan.drafter import Drafter, Shape

# How each mechanism produces D drafts.
SHAPES: dict[str, Shape] = {
    "none": "none",
    **dict.fromkeys(("ngram", "suffix", "rest", "lookahead"), "lookup"),
    **dict.fromkeys(
        ("draft_model", "specinfer", "quantspec", "eagle", "eagle2", "eagle3", "mtp", "hydra"), "serial"
    ),
    **dict.fromkeys(("p_eagle", "dflash", "dspark", "pard"), "block"),
    "medusa": "heads",
}
# Vocabulary of a head that is assumed because none is given (the size every published EAGLE-3 head uses).
ASSUMED_DRAFT_VOCAB = 32_000
# Decoder layers of a head that is assumed; 1 where not named.
_ASSUMED_LAYERS = {"dflash": 5, "dspark": 5, "p_eagle": 4}
# Tree nodes that are worth planning for, for each head: its lower-ranked candidates are hardly ever right.
_CANDIDATES_PER_HEAD = 4
# Of QuantSpec's draft where it is not the configured method.
_FOUR_BITS = ("int4_weight_only", True)

Draft = ArchitectureFacts | HeadFacts


def runtime_costs(backend: str) -> Mapping[str, Any]:
    """The overheads of a backend from runtimes.yaml."""
    return _runtimes()[backend]


def drafter_for(
    method: str,
    deployment: Deployment,
    draft: Draft | None,
    *,
    quantization: str | None = None,
    quantize_lm_head: bool = False,
    kv_group: int = 64,
) -> Drafter:
    """The drafter of `method` beside this deployment; where no draft is given, a typical one, and `notes` say so.

    quantization, quantize_lm_head: of the weights of a draft model; None takes what is usual for the method.
    kv_group: of a hierarchical cache.
    """
    shape = SHAPES[method]
    costs = runtime_costs(deployment.backend)
    if shape == "none":
        return Drafter(method, shape)
    if shape == "lookup":
        return Drafter(
            method, shape, step_s=costs["step_s"], host_s_per_sequence=costs["lookup_s_per_sequence"]
        )
    if method == "quantspec":
        quantized = _FOUR_BITS if quantization is None else (quantization, quantize_lm_head)
        return _self_draft(deployment, quantized, kv_group, costs)
    if method in ("draft_model", "specinfer", "pard"):
        model = _draft_model(method, deployment, draft, (quantization or "none", quantize_lm_head), costs)
        # PARD's model runs inside the target's step, as heads do, and once.
        return replace(model, shape=shape, pass_s=costs["pass_s"]) if method == "pard" else model
    if method == "mtp" and not isinstance(draft, HeadFacts):
        return _mtp(deployment, costs)
    if method in ("medusa", "hydra"):
        return _token_heads(method, shape, deployment, draft, costs, int8=quantization == "int8_weight_only")
    return _head(method, shape, deployment, draft, costs, int8=quantization == "int8_weight_only")


def several(drafters: Sequence[Drafter]) -> Drafter:
    """SpecInfer's drafts as one drafter."""
    return replace(
        drafters[0],
        parts=tuple(drafters),
        memory_bytes=sum(d.memory_bytes for d in drafters),
        kv_bytes_per_token=sum(d.kv_bytes_per_token for d in drafters),
        notes=tuple(dict.fromkeys(note for d in drafters for note in d.notes)),
    )


def _common(costs: Mapping[str, Any], separate: bool = False) -> dict[str, float]:
    """Overheads of one pass and one step."""
    return {"pass_s": costs["model_pass_s" if separate else "pass_s"], "step_s": costs["step_s"]}


def _element(deployment: Deployment) -> tuple[str, float]:
    """(dtype, bytes) of unquantized draft weights and caches: drafts stay 16 bit on a GPU, float32 on a CPU."""
    return ("bfloat16", 2.0) if deployment.device.kind == "gpu" else ("float32", 4.0)


def _draft_model(
    method: str,
    deployment: Deployment,
    draft: Draft | None,
    quantized: tuple[str, bool],
    costs: Mapping[str, Any],
) -> Drafter:
    """quantized: the format, and whether the output layer is quantized too."""
    if not isinstance(draft, ArchitectureFacts):
        return _assumed_model(method, deployment, costs)
    ranks, notes = _draft_ranks(draft, deployment.head_ranks)
    served = deploy(
        draft,
        deployment.device,
        backend=deployment.backend,
        quantization=quantized[0],
        quantize_lm_head=quantized[0] != "none" and quantized[1],
        tensor_parallel=ranks,
    )
    dense = [w for w in served.weights if w.kind not in ("embedding", "expert")]
    return Drafter(
        method,
        "serial",
        parameters=sum(w.parameters for w in dense),
        bytes=sum(w.bytes for w in dense),
        compute=dense[0].compute,
        layers=draft.layers or 0,
        kv_bytes_per_token=draft.kv_bytes_per_token(served.kv_dtype) or 0.0,
        kv_dtype=served.kv_dtype,
        memory_bytes=served.stored_bytes,
        ranks=ranks,
        mixture=served.mixture,
        expert_parameters=sum(w.parameters for w in served.weights if w.kind == "expert"),
        notes=notes,
        **_common(costs, separate=True),
    )


def _assumed_model(method: str, deployment: Deployment, costs: Mapping[str, Any]) -> Drafter:
    """A typical draft model, where none is given."""
    dtype, size = _element(deployment)
    parameters = sum(w.parameters for w in deployment.weights if w.kind != "embedding") / 16
    return Drafter(
        method,
        "serial",
        parameters=parameters,
        bytes=parameters * size,
        layers=max(1, (deployment.facts.layers or 4) // 4),
        kv_bytes_per_token=(deployment.facts.kv_bytes_per_token(dtype) or 0.0) / 8,
        kv_dtype=dtype,
        memory_bytes=parameters * size,
        ranks=deployment.head_ranks,
        notes=(
            "no draft model given: a sixteenth of the target's weights in a quarter of its layers is assumed",
        ),
        **_common(costs, separate=True),
    )


def _draft_ranks(facts: ArchitectureFacts, target_ranks: int) -> tuple[int, tuple[str, ...]]:
    """The draft runs at the target's tensor-parallel size where its heads divide, otherwise on one rank."""
    if target_ranks == 1 or facts.group_per_rank(target_ranks) is not None:
        return target_ranks, ()
    return 1, (f"the draft's heads do not split over {target_ranks} ranks: it runs at tensor parallel 1",)


def _self_draft(
    deployment: Deployment, quantized: tuple[str, bool], kv_group: int, costs: Mapping[str, Any]
) -> Drafter:
    """QuantSpec (2502.10424): the target itself with weights of its own and a 4-bit view of the cache.

    On trtspec's own engines that is the target's cache; elsewhere a 4-bit one beside it is assumed.
    """
    model = _draft_model("quantspec", deployment, deployment.facts, quantized, costs)
    notes = ("the draft's weights are kept beside the target's own",)
    elements = (deployment.facts.kv_bytes_per_token("float32") or 0.0) / 4
    if deployment.kv_dtype != HIERARCHICAL:
        cache: dict[str, Any] = {"kv_bytes_per_token": elements / 2, "kv_dtype": "int4"}
    else:
        on_cpu = deployment.device.kind == "cpu"
        full, share = (
            (4, 1.0) if on_cpu else (2, 0.5)
        )  # bytes of an element; of the cache that a draft's pass moves
        cache = {
            "kv_bytes_per_token": 0.0,
            "kv_dtype": None,
            "shared_kv_bytes_per_token": elements * deployment.kv_moved_bytes * share,
            "sequence_bytes": elements * full * (3 * kv_group + 1),
        }
        notes += (
            "the target's own cache has 8 bits: its text, with drafts or without, is that of this cache",
        )
        if on_cpu:
            notes += (
                "on a CPU the cache is expanded to float32 at every pass: it saves memory and costs time",
            )
    return replace(model, pass_s=costs["pass_s"], notes=notes, **cache)


def _mtp(deployment: Deployment, costs: Mapping[str, Any]) -> Drafter:
    """The MTP module shares the target's embedding and output layer; its own layer stays 16 bit."""
    facts = deployment.facts
    classes = facts.weights.mtp if facts.weights else ()
    lm_head = next((w for w in deployment.weights if w.kind == "lm_head"), None)
    dense = sum(c.parameters for c in classes if c.kind != "expert")
    experts = float(sum(c.parameters for c in classes if c.kind == "expert"))
    shape = facts.binding
    cached = (shape.cache_elements_per_token or 0) / max(1, shape.layers) if shape else 0.0
    size = _element(deployment)[1]
    return Drafter(
        "mtp",
        "serial",
        parameters=dense + (lm_head.parameters if lm_head else 0),
        bytes=dense * size + (lm_head.bytes if lm_head else 0.0),
        layers=1,
        kv_bytes_per_token=cached * deployment.kv_element_bytes,
        kv_dtype=deployment.kv_dtype,
        memory_bytes=(dense + experts / deployment.shares) * size * max(1, facts.mtp_layers),
        ranks=deployment.head_ranks,
        mixture=deployment.mixture if experts else (0, 0),
        expert_parameters=experts,
        **_common(costs),
    )


def _token_heads(
    method: str,
    shape: Shape,
    deployment: Deployment,
    draft: Draft | None,
    costs: Mapping[str, Any],
    *,
    int8: bool = False,
) -> Drafter:
    """Medusa and Hydra: for every future position some residual layers and a full output layer."""
    hidden, vocab = deployment.facts.hidden_size or 0, deployment.facts.vocab_size or 0
    stated = draft if isinstance(draft, HeadFacts) else None
    heads = (stated.draft_limit if stated else None) or 5
    layers = stated.medusa_layers if stated and stated.medusa_layers is not None else 1
    each = float(hidden * hidden * layers + hidden * vocab)
    size = 1.0 if int8 else _element(deployment)[1]
    notes = (
        ()
        if stated
        else ("no heads given: 5 heads of one residual layer and a full output layer each are assumed",)
    )
    return Drafter(
        method,
        shape,
        each,
        each * size,
        memory_bytes=each * size * heads,
        limit=heads * _CANDIDATES_PER_HEAD,
        depth=heads,
        notes=notes,
        **_common(costs),
    )


def _head(
    method: str,
    shape: Shape,
    deployment: Deployment,
    draft: Draft | None,
    costs: Mapping[str, Any],
    *,
    int8: bool = False,
) -> Drafter:
    """EAGLE-like and block heads: a few decoder layers, a fusing layer, an output layer over the draft vocabulary."""
    hidden = deployment.facts.hidden_size or 0
    dtype, size = _element(deployment)
    head = draft if isinstance(draft, HeadFacts) else None
    decoder = head.decoder if head else draft if isinstance(draft, ArchitectureFacts) else None
    if decoder is not None and decoder.weights is not None:
        body = sum(c.parameters for c in decoder.weights.classes if c.kind not in ("embedding", "lm_head"))
        width, layers = decoder.hidden_size or hidden, decoder.layers or 1
        cache = decoder.kv_bytes_per_token(dtype) or 0.0
        vocab = (head.draft_vocab_size if head else None) or decoder.vocab_size or ASSUMED_DRAFT_VOCAB
        ranks, notes = _draft_ranks(decoder, deployment.head_ranks)
    else:
        ranks = deployment.head_ranks
        width, layers = hidden, _ASSUMED_LAYERS.get(method, 1)
        body = layers * (4 * hidden * hidden + 3 * hidden * (deployment.facts.ffn_size or 4 * hidden))
        cache = layers * _cache_width(deployment) * size
        vocab = min(ASSUMED_DRAFT_VOCAB, deployment.facts.vocab_size or ASSUMED_DRAFT_VOCAB)
        plural = "s" if layers > 1 else ""
        notes = (
            f"no head given: {layers} layer{plural} of the target's widths and {vocab:,} output tokens assumed",
        )
    if method in ("eagle3", "p_eagle"):
        body += width * width  # queries, keys and values of the first layer take 2 × hidden
    fused = {"eagle3": 3, "p_eagle": 3, "dflash": 5, "dspark": 5}.get(method, 2)
    stored = head.stored_bytes if head and not int8 else None
    each = 1.0 if int8 else size
    return Drafter(
        method,
        shape,
        parameters=float(body + width * vocab),
        bytes=(body + width * vocab) * each,
        once_parameters=float(fused * hidden * width),
        layers=layers,
        kv_bytes_per_token=cache,
        kv_dtype=dtype,
        memory_bytes=stored or (body + width * (vocab + fused * hidden)) * each,
        ranks=ranks,
        limit=head.draft_limit if head else None,
        notes=notes,
        **_common(costs),
    )


def _cache_width(deployment: Deployment) -> int:
    """Cached elements per token of one layer like the target's binding one; heads never use MLA."""
    shape = deployment.facts.binding
    if shape is None or shape.kind == "mla" or not shape.kv_heads or not shape.head_dim:
        return 2 * (deployment.facts.hidden_size or 0)
    return 2 * shape.kv_heads * shape.head_dim


@cache
def _runtimes() -> Mapping[str, Mapping[str, Any]]:
    text = files("trtspec.plan").joinpath("runtimes.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["runtimes"]
