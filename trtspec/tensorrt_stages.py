"""The compile stages of the `tensorrt` backend: a graph that any machine writes, a plan that a GPU machine builds.

A build on a machine without TensorRT or a GPU ends after the graph; `trtspec build --resume` goes on elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import PlanInfeasible
from trtspec.events import Emit
from trtspec.files import sha256_file
from trtspec.models import TARGET
from trtspec.plan.devices import load_device
from trtspec.plan.tiles import key_splits, mma_tiles, step_rows
from trtspec.stage import Job, Stage
from trtspec.stage_requests import NOWHERE, model_name, settings_of, speculation_of
from trtspec.store import default_root

if TYPE_CHECKING:
    from trtspec.checkpoints.facts import ArchitectureFacts
    from trtspec.compile.tensorrt import TensorRtRequest
    from trtspec.config import Config

FORMATS = ("none", "fp8", "nvfp4")  # of target.quantization


def check_formats(config: Config) -> None:
    """Raise PlanInfeasible for what the planner knows kernels for and TensorRT's own layers do not have."""
    if config.target.kv_cache == "fp8":
        raise PlanInfeasible(
            "TensorRT updates a KV cache in place in 16 or 32 bits only",
            where="target.kv_cache",
            hint="kv_cache: auto, or engine.backend: tensorrt_llm",
        )
    if config.target.quantization not in FORMATS:
        raise PlanInfeasible(
            f"the tensorrt backend has no Q/DQ for {config.target.quantization}",
            where="target.quantization",
            hint=f"it builds {', '.join(FORMATS)}; backend tensorrt_llm runs more",
        )


def _request(job: Job) -> TensorRtRequest:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.compile.tensorrt import TensorRtRequest

    config, engine, length = job.config, job.config.engine, int(job.plan["draft_length"])
    device, kernel = load_device(engine.device), job.plan["kernels"][0]
    group, tile_rows = kernel["group"], kernel["tile_rows"]
    facts = read_facts(job.models[TARGET].config)
    kv_heads = next(shape.kv_heads for shape in facts.attention if shape.kv_heads)
    longest = engine.max_seq_len or facts.max_position_embeddings or config.workload.context
    tiles, batch = mma_tiles(group, length, tile_rows), config.workload.batch_sizes[0]
    _check_head_dim(facts)
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
    )


def _check_head_dim(facts: ArchitectureFacts) -> None:
    """Raise PlanInfeasible for heads of a size that the attention kernel is not compiled for."""
    from trtspec_plugins.variants import variants

    compiled = {dict(v.constants)["HEAD_DIM"] for v in variants() if v.kernel == "verify_attention"}
    for shape in facts.attention:
        if shape.head_dim not in (None, *compiled):
            sizes = ", ".join(map(str, sorted(compiled)))
            raise PlanInfeasible(
                f"the attention kernel is compiled for heads of {sizes}, this model's have {shape.head_dim}",
                where="target.model",
                hint="use backend tensorrt_llm",
            )


def _export(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.tensorrt import export_graph

    export_graph(_request(job), into, emit)


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
