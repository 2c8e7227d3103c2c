"""Do the models that a TensorRT-LLM deployment names fit together, and fit what its settings say of them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.heads import HeadFacts
from trtspec.checkpoints.pairing import CapturedLayers, captured_layers, check_head
from trtspec.checkpoints.vocabulary import check_draft_pair
from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.trtllm.check import Finding
from trtspec.trtllm.checks import Written
from trtspec.trtllm.contract import Contract, DecodingType, contract_for

# Decoding type → methods whose heads it runs. EAGLE-1 and EAGLE-2 checkpoints load as none.
_HEADS = {"Eagle3": ("eagle3",), "DFlash": ("dflash",), "DSpark": ("dspark",), "MTP": ("mtp",)}


def check_pair(target: ArchitectureFacts, draft: ArchitectureFacts | HeadFacts) -> tuple[Finding, ...]:
    """Findings of a draft model or head against its target, whatever runs them."""
    try:
        found = (
            check_head(target, draft)[0] if isinstance(draft, HeadFacts) else check_draft_pair(target, draft)
        )
    except ConfigError as error:
        return (Finding("pair", "error", "", error.where or draft.source, error.message, error.hint),)
    said = [(f.level, f.text) for f in found] + [("warning", text) for text in draft.warnings]
    return tuple(Finding("pair", level, "", draft.source, text) for level, text in said)


def check_models(
    settings: Mapping[str, Any],
    version: str,
    target: ArchitectureFacts | None,
    draft: ArchitectureFacts | HeadFacts | None,
) -> tuple[Finding, ...]:
    """Findings of settings against the models they name. settings: `LLM()` keywords; None: a model that is not read."""
    contract = contract_for(version)
    speculative = settings.get("speculative_config")
    name = speculative.get("decoding_type") if isinstance(speculative, Mapping) else None
    decoding = contract.type_called(str(name))
    written = Written(contract, settings, decoding)
    found: list[Finding] = []
    if target is not None:
        found += _of_target(written, target, draft)
    if decoding is not None and isinstance(draft, HeadFacts):
        found += head_faults(contract, decoding, draft)
        found += _cache_dtypes(written, draft)
        if target is not None:
            found += _captured(written, target, draft)
    if decoding is not None and isinstance(draft, ArchitectureFacts) and decoding.name in _HEADS:
        message = f"{decoding.name} needs a head, {draft.source} is a whole model"
        found.append(_fault("head", "speculative_model", message, "decoding_type: Draft_Target, or a head"))
    return tuple(found)


def head_faults(contract: Contract, decoding: DecodingType, head: HeadFacts) -> Iterator[Finding]:
    """What this version of a decoding type does not run of a head."""
    wanted = _HEADS.get(decoding.name)
    if head.method is not None and wanted is not None and head.method not in wanted:
        other = next((n for n, methods in _HEADS.items() if head.method in methods), None)
        spelled = contract.types[other].spellings[0].name if other in contract.types else None
        message = f"{decoding.name} runs {' and '.join(wanted)} heads, this is one of {head.method}"
        hint = (
            f"decoding_type: {spelled}"
            if spelled
            else "a head of that method; this version runs none of yours"
        )
        yield _fault("head", "decoding_type", message, hint)
    if decoding.name == "Eagle3" and head.norms and not contract.has("eagle_norms"):
        message = f"TensorRT-LLM {contract.version} ignores the head's {', '.join(head.norms)} (PR 14988)"
        message += " (unconfirmed: the first release that has them)"
        yield _fault("head-norms", "speculative_model", message, "1.3.0rc20 or newer, or a head without them")


def _of_target(
    written: Written, target: ArchitectureFacts, draft: ArchitectureFacts | HeadFacts | None
) -> Iterator[Finding]:
    from trtspec.plan.deployment import check_division

    ranks = written.whole("tensor_parallel_size") or 1
    if written.get("enable_attention_dp") is not True:
        try:
            check_division(target, ranks)
        except PlanInfeasible as error:
            hint = (error.hint or "").replace("engine.tensor_parallel", "tensor_parallel_size")
            yield Finding(
                "tensor-parallel", "error", "tensor_parallel_size", target.source, error.message, hint
            )
    decoding, base = written.decoding, "speculative_config"
    if decoding is None:
        return
    if decoding.name == "MTP" and draft is None:
        layers, length = target.mtp_layers or 0, written.draft_length
        if not layers:
            message = f"{target.model_type} at {target.source} has no MTP layers"
            yield _fault("mtp-layers", "decoding_type", message, "another decoding type")
        elif length > layers:
            message = f"{layers} MTP layer(s) are run {length} times: the layer is reused"
            yield Finding("mtp-layers", "note", f"{base}.{decoding.length}", target.source, message)
    kinds = {group.kind for group in target.attention}
    windows = kinds & {"mla", "sliding"}
    if written.get(f"{base}.use_dynamic_tree") is True and windows:
        message = f"a dynamic tree does not run with {' and '.join(sorted(windows))} attention"
        yield _fault("dynamic-tree", "use_dynamic_tree", message, "use_dynamic_tree: false")
    if "linear" in target.layer_kinds and written.get("kv_cache_config.enable_block_reuse") is not False:
        message = "recurrent layers keep a state that reused blocks do not hold"
        path = "kv_cache_config.enable_block_reuse"
        yield Finding("kv-reuse", "warning", path, target.source, message, "enable_block_reuse: false")


def _cache_dtypes(written: Written, head: HeadFacts) -> Iterator[Finding]:
    """One engine with two cache dtypes: the target's FP8, and 16 bit of a head that is not quantized."""
    path, decoding = "kv_cache_config.dtype", written.decoding
    if (
        decoding is None
        or decoding.name != "Eagle3"
        or written.get(path) != "fp8"
        or head.quantization.algorithm
    ):
        return
    version, instead = written.contract.version, "kv_cache_config: {dtype: auto}, or a quantized head"
    message = (
        f"the target's cache is FP8, that of the 16-bit head is not (issue 7842): TensorRT-LLM {version} "
    )
    if written.contract.has("mixed_kv_dtypes"):
        yield Finding("kv-dtype", "note", path, path, f"{message}keeps both", None)
    elif written.get("enable_chunked_prefill") is True:
        message += "runs that wrongly with chunked prefill (unconfirmed: the first release that does not)"
        yield Finding(
            "kv-dtype", "error", path, path, message, f"enable_chunked_prefill: false, or {instead}"
        )
    else:
        message += "failed on it in some builds (unconfirmed: which)"
        yield Finding("kv-dtype", "warning", path, path, message, instead)


def _captured(written: Written, target: ArchitectureFacts, head: HeadFacts) -> Iterator[Finding]:
    """`eagle3_layers_to_capture` counts layers from 0; a head's own config may count finished blocks."""
    path = "speculative_config.eagle3_layers_to_capture"
    given = written.get(path)
    if not isinstance(given, list) or not target.layers or head.method != "eagle3":
        return
    try:
        right: CapturedLayers = captured_layers(head.captured, target.layers)
    except ConfigError:
        return  # the pair's own finding
    if sorted(map(str, given)) != sorted(map(str, right.zero_based)):
        message = f"the file captures {given}, the head was trained on layers {list(right.zero_based)}"
        instead = f"eagle3_layers_to_capture: {list(right.zero_based)}"
        yield Finding("captured-layers", "error", path, head.source, message, instead)


def _fault(rule: str, key: str, message: str, instead: str) -> Finding:
    path = f"speculative_config.{key}"
    return Finding(rule, "error", path, path, message, instead)
