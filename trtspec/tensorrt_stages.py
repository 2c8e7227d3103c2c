"""The compile stages of the `tensorrt` backend: a graph that any machine writes, a plan that a GPU machine builds.

A build on a machine without TensorRT or a GPU ends after the graph; `trtspec build --resume` goes on elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.drafters.catalog import TOKEN_HEADS
from trtspec.engine_parts import DATASTORE, place_parts
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
    branches_of,
    compile_draft_request,
    draft_source,
    drafts_trees,
    drafts_with_head,
    head_model,
    head_request,
    head_taps_of,
    kv_group_of,
    mark,
    measuring_prompts,
    model_name,
    settings_of,
    shipped_text,
    speculation_of,
)
from trtspec.store import default_root

if TYPE_CHECKING:
    from trtspec.checkpoints.facts import ArchitectureFacts
    from trtspec.compile.tensorrt import TensorRtRequest
    from trtspec.config import Config

FORMATS = ("none", "fp8", "nvfp4")  # of a model's weights
EXPORT_DRAFT = "export_draft"


def check_runs(config: Config, method: str) -> None:
    """Raise PlanInfeasible for what the planner knows kernels for and a TensorRT engine does not do."""
    draft = getattr(config.speculation, "draft", None)
    formats = {"target.quantization": config.target.quantization}
    several = getattr(config.speculation, "drafts", ())
    models = {None: draft} if method == "draft_model" else dict(enumerate(several))
    formats |= {f"{_section(number)}.quantization": model.quantization for number, model in models.items()}
    if method == "quantspec":
        _check_hierarchical(config)
        formats["speculation.draft_quantization"] = config.speculation.draft_quantization
    for where, format in formats.items():
        if format not in FORMATS:
            raise PlanInfeasible(
                f"the tensorrt backend has no Q/DQ for {format}",
                where=where,
                hint=f"it builds {', '.join(FORMATS)}; backend tensorrt_llm runs more",
            )
    if drafts_with_head(method) and draft is not None and draft.quantization != "none":
        raise PlanInfeasible(
            "TensorRT builds a head's weights in 16 bits",
            where="speculation.draft.quantization",
            hint="quantization: none",
        )
    if drafts_trees(config, method) and config.engine.numerics == "exact":
        as_chain = "speculation.shape: chain, or " if hasattr(config.speculation, "shape") else ""
        raise PlanInfeasible(
            "TensorRT verifies a token tree under a mask, where rows equal those of plain decoding to rounding only",
            where="speculation.method",
            hint=f"{as_chain}lossless: false with engine.numerics: fast",
        )


def _check_hierarchical(config: Config) -> None:
    """Raise PlanInfeasible for a cache that QuantSpec's attention kernel does not read."""
    from trtspec_plugins.variants import variants

    groups = {dict(v.constants)["GROUP"] for v in variants() if v.kernel == "int4_kv_attention"}
    if config.speculation.kv_group_size not in groups:
        raise PlanInfeasible(
            f"the attention kernel is compiled for groups of {', '.join(map(str, sorted(groups)))} tokens",
            where="speculation.kv_group_size",
            hint=f"kv_group_size: {max(groups)}",
        )
    if config.target.kv_cache != "auto":
        raise PlanInfeasible(
            "QuantSpec quantizes the target's KV cache itself", where="target.kv_cache", hint="kv_cache: auto"
        )


def _section(number: int | None) -> str:
    """The part of a config that names a draft: the one, or one of several by number from 0, here and below."""
    return "speculation.draft" if number is None else f"speculation.drafts[{number}]"


def _request(job: Job) -> TensorRtRequest:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.heads import read_head
    from trtspec.compile.tensorrt import TensorRtRequest

    config, engine, method = job.config, job.config.engine, str(job.plan["method"])
    length = int(job.plan["draft_length"])
    if method == "lookahead":  # its window's rows are verified beside the drafts
        length += request_from(config).probe_rows
    kernel = job.plan["kernels"][0]
    group, tile_rows = kernel["group"], kernel["tile_rows"]
    facts = read_facts(job.models[TARGET].config)
    _check_head_dim(facts, "target.model", fp8=config.target.kv_cache == "fp8")
    branches = 1
    if drafts_trees(config, method):
        choices = getattr(config.speculation, "choices", None)
        branches = branches_of(job, choices, length) if choices else max(2, length)
    if drafts_with_head(method) and (decoder := read_head(head_model(job).config).decoder):
        _check_head_dim(decoder, "speculation.draft.model")
    return TensorRtRequest(
        model=job.artifacts["quantize"].path if "quantize" in job.artifacts else NOWHERE,
        name=model_name(job.models[TARGET]),
        speculation=speculation_of(job),
        rows=step_rows(group, length, tile_rows),
        arch=load_device(engine.device).arch,
        splits=_splits(config, facts, mma_tiles(group, length, tile_rows)),
        max_batch=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        numerics=engine.numerics,
        taps=head_taps_of(job),
        kv_cache=config.target.kv_cache,
        max_branches=branches,
        kv_group=kv_group_of(job),
    )


def _draft_request(job: Job, number: int | None) -> TensorRtRequest:
    """A draft's engine: slots, rows and numerics of the target's, and no more context than either model has.

    QuantSpec's reads the upper halves of the target's cache.
    """
    from trtspec.checkpoints.facts import read_facts

    alike, whole = compile_draft_request(job, number), _request(job)
    facts = read_facts(draft_source(job, number)[0].config)
    _check_head_dim(facts, f"{_section(number)}.model")
    return replace(
        whole,
        model=alike.model,
        name=alike.name,
        speculation=alike.speculation,
        max_seq_len=alike.max_seq_len,
        splits=_splits(job.config, facts, 1),  # it writes row by row
        kv_cache="auto",
        max_branches=alike.max_branches,
        kv_bits=alike.kv_bits,
    )


def _splits(config: Config, facts: ArchitectureFacts, tiles: int) -> int:
    """Pieces that attention divides a model's keys into. tiles: of a step's rows."""
    # Which piece a key is in depends on the key alone, but whether merging pieces rounds a lone row as it rounds one
    # among others has not been measured on hardware: exact engines take one piece until it has.
    engine = config.engine
    if engine.numerics == "exact" or config.speculation.method == "quantspec":  # whose kernel has no pieces
        return 1
    kv_heads = next(shape.kv_heads for shape in facts.attention if shape.kv_heads)
    longest = engine.max_seq_len or facts.max_position_embeddings or config.workload.context
    return key_splits(
        load_device(engine.device).sms, tiles, kv_heads, config.workload.batch_sizes[0], longest
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

        compile_head(head_request(job), into, emit)
    place_parts(job, into, EXPORT_DRAFT)


def _export_draft(job: Job, into: Path, emit: Emit, number: int | None) -> None:
    from trtspec.compile.tensorrt import export_graph

    export_graph(_draft_request(job, number), into, emit)


def _build(job: Job, into: Path, emit: Emit) -> None:
    from trtspec.compile.tensorrt import build_plan

    # One file for all builds: TensorRT itself refuses measurements of another GPU or version.
    cache, version = default_root() / "tensorrt-timing.cache", job.config.engine.version
    build_plan(job.artifacts["export"].path, into, cache, emit, version=version)
    if (method := str(job.plan["method"])) in TOKEN_HEADS:
        from trtspec.compile.heads.measure import measure_head

        measure_head(method, into, measuring_prompts(into), emit)


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


_EXPORT = Stage(
    name="export",
    folder="graph",
    run=_export,
    depends_on=lambda job: settings_of(_request(job), "model"),
    expects=_expect_export,
    needs=("quantize",),
    code=("compile", "engines", "checkpoints"),
    tools=("torch", "transformers", "onnx", "onnxruntime"),
)
_EXPORT_WITH_HEAD = replace(
    _EXPORT,
    depends_on=lambda job: {**_EXPORT.depends_on(job), "head": head_model(job).identity},
    code=(*_EXPORT.code, "drafters"),
)
_BUILD_PLAN = Stage(
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

# How often candidates are right is counted where plans can run, on held-out text.
_BUILD_AND_MEASURE = replace(
    _BUILD_PLAN,
    depends_on=lambda job: {
        **_BUILD_PLAN.depends_on(job),
        "measured_on": shipped_text("heldout.jsonl").sha256,
    },
    data=lambda _job: (shipped_text("heldout.jsonl"),),
    code=(*_BUILD_PLAN.code, "compile/heads", "drafters", "quantize/corpora"),
    tools=(*_BUILD_PLAN.tools, "safetensors", "tokenizers"),
)


def _export_of(number: int | None, quantize: Stage) -> Stage:
    """A draft is exported as a target is. quantize: the stage that makes its weights."""
    return replace(
        _EXPORT,
        name=f"{EXPORT_DRAFT}{mark(number)}",
        folder=None,
        run=partial(_export_draft, number=number),
        depends_on=lambda job: settings_of(_draft_request(job, number), "model"),
        expects=lambda _job: "the draft's own graph, with the target's static shapes",
        needs=(quantize.name,),
    )


def stages_of(
    method: str, quantize_drafts: Mapping[int | None, Stage], make_datastore: Stage
) -> tuple[Stage, ...]:
    """The stages between the quantized target and the package: graphs, plans and what a method has besides.

    quantize_drafts, by number, make_datastore: those of the other backends.
    """
    export = _EXPORT_WITH_HEAD if drafts_with_head(method) else _EXPORT
    build = _BUILD_AND_MEASURE if method in TOKEN_HEADS else _BUILD_PLAN
    if method in ("draft_model", "quantspec", "specinfer"):
        of_drafts = [(stage, _export_of(number, stage)) for number, stage in quantize_drafts.items()]
        graphs = tuple(graph.name for _, graph in of_drafts)
        with_drafts = replace(export, needs=(*export.needs, *graphs))
        return *chain.from_iterable(of_drafts), with_drafts, build
    if method == "rest":
        return make_datastore, replace(export, needs=(*export.needs, DATASTORE)), _BUILD_PLAN
    return export, build
