"""The compile stages of the `tensorrt` backend: a graph that any machine writes, a plan that a GPU machine builds.

A build on a machine without TensorRT or a GPU ends after the graph; `trtspec build --resume` goes on elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import PlanInfeasible
from trtspec.events import Emit
from trtspec.files import sha256_file
from trtspec.models import TARGET
from trtspec.plan.devices import load_device
from trtspec.plan.request import request_from
from trtspec.plan.tiles import key_splits, mma_tiles, step_rows
from trtspec.stage import Job, Stage
from trtspec.stage_requests import (
    NOWHERE,
    drafts_trees,
    drafts_with_head,
    head_model,
    head_request,
    head_taps_of,
    model_name,
    settings_of,
    speculation_of,
)
from trtspec.store import default_root

if TYPE_CHECKING:
    from trtspec.checkpoints.facts import ArchitectureFacts
    from trtspec.compile.tensorrt import TensorRtRequest
    from trtspec.config import Config

FORMATS = ("none", "fp8", "nvfp4")  # of target.quantization


def check_runs(config: Config, method: str) -> None:
    """Raise PlanInfeasible for what the planner knows kernels for and a TensorRT engine does not do."""
    if config.target.quantization not in FORMATS:
        raise PlanInfeasible(
            f"the tensorrt backend has no Q/DQ for {config.target.quantization}",
            where="target.quantization",
            hint=f"it builds {', '.join(FORMATS)}; backend tensorrt_llm runs more",
        )
    draft = getattr(config.speculation, "draft", None)
    if draft is not None and draft.quantization != "none":
        raise PlanInfeasible(
            "TensorRT builds a head's weights in 16 bits",
            where="speculation.draft.quantization",
            hint="quantization: none",
        )
    if drafts_trees(config, method) and config.engine.numerics == "exact":
        chain = "speculation.shape: chain, or " if hasattr(config.speculation, "shape") else ""
        raise PlanInfeasible(
            "TensorRT verifies a token tree under a mask, where rows equal those of plain decoding to rounding only",
            where="speculation.method",
            hint=f"{chain}lossless: false with engine.numerics: fast",
        )


def _request(job: Job) -> TensorRtRequest:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.heads import read_head
    from trtspec.compile.tensorrt import TensorRtRequest

    config, engine, method = job.config, job.config.engine, str(job.plan["method"])
    length = int(job.plan["draft_length"])
    if method == "lookahead":  # its window's rows are verified beside the drafts
        length += request_from(config).probe_rows
    device, kernel = load_device(engine.device), job.plan["kernels"][0]
    group, tile_rows = kernel["group"], kernel["tile_rows"]
    facts = read_facts(job.models[TARGET].config)
    kv_heads = next(shape.kv_heads for shape in facts.attention if shape.kv_heads)
    longest = engine.max_seq_len or facts.max_position_embeddings or config.workload.context
    tiles, batch = mma_tiles(group, length, tile_rows), config.workload.batch_sizes[0]
    _check_head_dim(facts, "target.model", fp8=config.target.kv_cache == "fp8")
    if drafts_with_head(method) and (decoder := read_head(head_model(job).config).decoder):
        _check_head_dim(decoder, "speculation.draft.model")
    # Which piece a key is in depends on the key alone, but whether merging pieces rounds a lone row as it rounds one
    # among others has not been measured on hardware: exact engines take one piece until it has.
    exact = engine.numerics == "exact"
    return TensorRtRequest(
        model=job.artifacts["quantize"].path if "quantize" in job.artifacts else NOWHERE,
        name=model_name(job.models[TARGET]),
        speculation=speculation_of(job),
        rows=step_rows(group, length, tile_rows),
        arch=device.arch,
        splits=1 if exact else key_splits(device.sms, tiles, kv_heads, batch, longest),
        max_batch=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        numerics=engine.numerics,
        taps=head_taps_of(job),
        kv_cache=config.target.kv_cache,
        max_branches=max(2, length) if drafts_trees(config, method) else 1,
    )


def _check_head_dim(facts: ArchitectureFacts, where: str, *, fp8: bool = False) -> None:
    """Raise PlanInfeasible for heads of a size that the attention kernel is not compiled for. fp8: of the KV cache."""
    from trtspec_plugins.variants import variants

    made = [dict(v.constants) for v in variants() if v.kernel == "verify_attention"]
    compiled = {constants["HEAD_DIM"] for constants in made if bool(constants["FP8"]) == fp8}
    kernel = "attention kernel for an FP8 cache" if fp8 else "attention kernel"
    for shape in facts.attention:
        if shape.head_dim not in (None, *compiled):
            sizes = ", ".join(map(str, sorted(compiled)))
            raise PlanInfeasible(
                f"the {kernel} is compiled for heads of {sizes}, this model's have {shape.head_dim}",
                where=where,
                hint="use backend tensorrt_llm",
            )


def _export(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.tensorrt import export_graph

    export_graph(_request(job), into, emit)
    if drafts_with_head(str(job.plan["method"])):
        from trtspec.compile.heads import compile_head

        compile_head(head_request(job, into), into, emit)


def _build(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.tensorrt import build_plan

    # One file for all builds: TensorRT itself refuses measurements of another GPU or version.
    cache, version = default_root() / "tensorrt-timing.cache", job.config.engine.version
    build_plan(job.artifacts["export"].path, into, cache, emit, version=version)


def _lacking() -> str | None:
    from trtspec.compile.tensorrt import lacking

    return lacking()


def _kernels() -> str:
    """What the compiled kernels are, for the plan's key: hex sha256 of their index, or that there is none."""
    from trtspec_plugins.index import COMPILED

    index = COMPILED / "index.json"
    return sha256_file(index) if index.is_file() else "not compiled"


def _gpu() -> str:
    """Architecture of this machine's GPU, or "none": what a plan is for."""
    if _lacking():
        return "none"
    import torch

    from trtspec.engines.tensorrt import current_sm

    return current_sm(torch) if torch.cuda.is_available() else "none"


def _expect_export(job: Job) -> str:
    request = _request(job)
    return f"ONNX graph for {request.arch}, {request.rows} rows a step, keys in {request.splits} piece(s)"


EXPORT = Stage(
    name="export",
    folder="graph",
    run=_export,
    depends_on=lambda job: settings_of(_request(job), "model"),
    expects=_expect_export,
    needs=("quantize",),
    code=("compile", "engines", "checkpoints"),
    tools=("torch", "transformers", "onnx", "onnxruntime"),
)
EXPORT_WITH_HEAD = replace(
    EXPORT,
    depends_on=lambda job: {**EXPORT.depends_on(job), "head": head_model(job).identity},
    code=(*EXPORT.code, "drafters"),
)
BUILD_PLAN = Stage(
    name="compile",
    folder="engine",
    run=_build,
    depends_on=lambda job: {"kernels": _kernels(), "gpu": _gpu(), "version": job.config.engine.version},
    expects=lambda job: f"TensorRT plan on this machine's GPU, planned for {job.config.engine.device}",
    needs=("export",),
    code=("compile/tensorrt", "engines"),
    tools=("tensorrt", "torch"),
    lacking=_lacking,
    finish="copy this folder to a machine with TensorRT and an NVIDIA GPU, and there: trtspec build --resume {folder}",
)
