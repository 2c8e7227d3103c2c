"""The two compile stages for `tensorrt`: a graph that any machine writes, and the plan that a GPU machine builds.

model folder ──export_graph──▶ model.onnx, tensorrt.json, engine.json, tokenizer ──build_plan──▶ model.plan

A trained head's graphs lie in folders of their own below (see heads/tensorrt.py), and so do their plans.
The graph is compared with PyTorch where it was written. A plan belongs to one TensorRT version and one GPU
architecture; both are recorded with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtspec import __version__
from trtspec.compile.engine import MAX_ROWS, context_limit, copy_companions, tokenizer_size
from trtspec.engines.base import EngineSpec
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import (
    APPEND,
    FILE,
    GRAPH,
    LAYERS,
    MEMORY_BOUND_ROWS,
    OLDEST_TENSORRT,
    PLAN,
    BuiltPlan,
    KvCache,
    Profile,
    TensorRtInfo,
    mask_words,
)
from trtspec.errors import SetupError, StageFailed
from trtspec.events import Emit, Note, Progress, silent
from trtspec.files import files_below, link_or_copy

if TYPE_CHECKING:
    from trtspec.compile.export_tensorrt import TensorRtOptions

_WORKSPACE_BYTES = 4 << 30
_BY_ROW = ("input_ids", "position_ids", "captured", "recycled", "is_recycled")  # inputs [B, T, …]


@dataclass(frozen=True, slots=True)
class TensorRtRequest:
    """model, name, speculation, max_batch, max_seq_len, taps: as in CompileRequest.

    numerics: "exact" makes one profile, so that the same kernels compute every row; "fast" one more for plain steps and
    one for prompts. rows: of a verify step and sequence. splits: pieces attention divides the keys into. arch:
    GPU architecture planned for. max_branches: the most leaves of a token tree, 1 for chains only; a tree's rows are
    one step's. kv_cache: "fp8" where the model's folder has scales for it. kv_group, kv_bits: as in CompileRequest.
    """

    model: Path
    name: str
    speculation: Mapping[str, Any]
    rows: int
    arch: str
    splits: int = 1
    max_batch: int = 8
    max_seq_len: int | None = None
    numerics: Literal["exact", "fast"] = "exact"
    taps: tuple[int, ...] = ()
    max_branches: int = 1
    kv_cache: KvCache = "auto"
    kv_group: int = 0
    kv_bits: Literal[4, 8] = 8


def export_graph(request: TensorRtRequest, into: Path, emit: Emit = silent) -> EngineInfo:
    """Write the graph, its static shapes and the tokenizer into the empty folder `into`. Needs no GPU.

    Raises PlanInfeasible for a model or format that the graph does not cover, and StageFailed when the graph does
    not compute what the PyTorch model computes.
    """
    from trtspec.checkpoints.tokenizer import stop_token_ids
    from trtspec.compile.decoder import read_decoder
    from trtspec.compile.export_tensorrt import TensorRtOptions

    decoder, group = read_decoder(request.model), request.kv_group
    max_seq_len = context_limit(decoder, request.max_seq_len, request.model)
    held = 2 * group if group else max_seq_len  # in full, before a step's own
    shapes = TensorRtInfo(
        dtype=_activation_dtype(request.model),
        capacity=held + max(profile.rows for profile in _profiles(request)),
        splits=request.splits,
        arch=request.arch,
        profiles=_profiles(request),
        trees=request.max_branches > 1,
        kv_cache=request.kv_cache,
        quantized=group * -(-max_seq_len // group) if group else 0,
        kv_bits=request.kv_bits,
    )
    emit(Progress("export", "graph", 0, 2, "step"))
    options = TensorRtOptions(
        dtype=shapes.dtype,
        max_positions=max_seq_len,
        capacity=shapes.capacity,
        splits=shapes.splits,
        taps=request.taps,
        trees=shapes.trees,
        kv_cache=shapes.kv_cache,
    )
    write_graph(request, shapes, options, into)
    copy_companions(request.model, into)
    info = EngineInfo(
        trtspec_version=__version__,
        backend="tensorrt",
        model=request.name,
        spec=EngineSpec(
            vocab_size=decoder.vocab_size,
            tokenizer_vocab_size=tokenizer_size(into, decoder.vocab_size),
            max_batch=request.max_batch,
            max_seq_len=max_seq_len,
            max_rows=min(MAX_ROWS, max_seq_len, group or MAX_ROWS),
            exact=request.numerics == "exact",
            max_branches=request.max_branches,
            hidden_size=decoder.hidden_size,
            taps=request.taps,
            rewinds=not group,
        ),
        layers=decoder.layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        least_rows=1,
        stop_token_ids=stop_token_ids(into),
        weights=_weights_summary(request.model, shapes.dtype),
        speculation=dict(request.speculation),
        kv_group=group,
    )
    shapes.write(into)
    info.write(into)
    emit(Progress("export", "comparison with PyTorch", 1, 2, "step"))
    info = replace(info, checks=_compare(request, into, info, shapes, options, emit))
    info.write(into)
    emit(Progress("export", "comparison with PyTorch", 2, 2, "step"))
    return info


def write_graph(request: TensorRtRequest, shapes: TensorRtInfo, options: TensorRtOptions, into: Path) -> None:
    """The graph of `request` over the cache it asks for."""
    from trtspec.compile.decoder import read_decoder
    from trtspec.compile.export_tensorrt import export_for_tensorrt
    from trtspec.compile.hierarchical_graph import KvView
    from trtspec.compile.hierarchical_tensorrt import export_hierarchical_for_tensorrt
    from trtspec.compile.weights import Weights

    decoder, weights = read_decoder(request.model), Weights(request.model)
    if request.kv_group:
        view = KvView(request.kv_group, request.kv_bits)
        export_hierarchical_for_tensorrt(decoder, weights, options, view, shapes.quantized, into / GRAPH)
    else:
        export_for_tensorrt(decoder, weights, options, into / GRAPH)


def _profiles(request: TensorRtRequest) -> tuple[Profile, ...]:
    slots = request.max_batch
    verify = Profile(slots, request.rows, slots * request.rows)
    if request.numerics == "exact":
        return (verify,)
    plain = (Profile(slots, 1, slots),) if request.rows > 1 else ()
    # One sequence at a time: a batch of prompts padded to one length would be mostly padding.
    return (*plain, verify, Profile(1, MEMORY_BOUND_ROWS, 1, "prompt"))


def _activation_dtype(model: Path) -> Literal["float16", "bfloat16"]:
    """The model's own 16-bit type; bfloat16 for float32 models, whose range float16 lacks."""
    from trtspec.checkpoints.config_view import load_view

    view = load_view(model)
    stated = view.string("dtype") or view.string("torch_dtype")
    return "float16" if stated == "float16" else "bfloat16"


def _weights_summary(model: Path, dtype: str) -> str:
    """One line on what the kernels read."""
    from collections import Counter

    from trtspec.checkpoints.safetensors_files import TensorFolder

    tensors = TensorFolder(model)
    kinds = {"F8_E4M3": "FP8", "U8": "NVFP4"}
    names = [name for name in tensors if name.endswith(("_proj.weight", "lm_head.weight"))]
    counts = Counter(kinds.get(tensors.info(name).dtype, dtype) for name in names)
    return f"{counts.total()} projections: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common())


def _compare(
    request: TensorRtRequest,
    into: Path,
    info: EngineInfo,
    shapes: TensorRtInfo,
    options: TensorRtOptions,
    emit: Emit,
) -> dict[str, float]:
    """`graph_error` of the same graph in float32, weights and KV not quantized, attention by definition.

    It takes the model three times in float32; where there is no memory for that, nothing is compared, and said.
    """
    from trtspec.checkpoints.safetensors_files import TensorFolder
    from trtspec.compile.check import (
        GRAPH_TOLERANCE,
        check_tokens,
        graph_error,
        logits_in_pieces,
        torch_logits,
    )
    from trtspec.compile.reference_attention import ReferenceRunner
    from trtspec.engines.hierarchical_tensorrt import open_tensorrt_engine

    tensors = TensorFolder(request.model)
    needed = 3 * 4 * sum(tensors.info(name).elements for name in tensors)
    if needed > _available_memory():
        text = f"the graph was not compared with PyTorch: that takes {needed / 1e9:.0f} GB of memory"
        emit(Note("export", text, "warning"))
        return {}
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        folder = Path(scratch)
        profiles = (Profile(1, request.rows, request.rows),)
        alone = replace(shapes, dtype="float32", kv_cache="auto", profiles=profiles)
        options = replace(options, dtype="float32", kv_cache="auto")
        write_graph(request, alone, options, folder)
        alone.write(folder)
        replace(info, spec=replace(info.spec, max_batch=1)).write(folder)
        tokens = check_tokens(into)
        engine = open_tensorrt_engine(folder, runner=ReferenceRunner(folder))
        error = graph_error(logits_in_pieces(engine, tokens), torch_logits(request.model, tokens))
    if not error <= GRAPH_TOLERANCE:
        raise StageFailed(
            f"the graph does not compute what the PyTorch model computes: graph_error {error:.3g} "
            f"(limit {GRAPH_TOLERANCE:g})",
            where=str(into / GRAPH),
            hint="please report the model; with `quantization: none` the weights play no part in it",
        )
    return {"graph_error": error}


def _available_memory() -> float:
    """Bytes that programs may still take; unlimited where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return float("inf")
    return float(re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def lacking() -> str | None:
    """What this machine lacks to build a plan, in words; None when nothing. Imports nothing heavy."""
    missing = [name for name in ("tensorrt", "torch") if importlib.util.find_spec(name) is None]
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        missing.append("an NVIDIA GPU driver")
    return " and ".join(missing) or None


def build_plan(
    graph: Path, into: Path, timing_cache: Path, emit: Emit = silent, *, version: str | None = None
) -> None:
    """Build the plans of a graph folder, its head's too, on this machine's GPU and write the engine folder `into`.

    version: of TensorRT that the plan is for, or its beginning ("11.4"); None takes what is installed. timing_cache:
    file with the measurements of earlier builds, read if it is there and written anew; it makes a second build of
    similar layers quick. Raises SetupError when TensorRT or the GPU is missing, too old or another version, and
    StageFailed, with TensorRT's own words, when it refuses the graph.
    """
    from trtspec.engines.tensorrt import current_sm, modules

    trt, torch = modules()
    if tuple(int(part) for part in trt.__version__.split(".")[:2]) < OLDEST_TENSORRT:
        oldest = ".".join(map(str, OLDEST_TENSORRT))
        raise SetupError(
            f"TensorRT {trt.__version__} has no in-place KV cache update; {oldest} is the first that has",
            hint=f"pip install 'tensorrt>={oldest}'",
        )
    if version is not None and not f"{trt.__version__}.".startswith(f"{version}."):
        raise SetupError(
            f"engine.version is {version}, and TensorRT {trt.__version__} is installed",
            hint=f"pip install 'tensorrt=={version}.*', or engine.version: null",
        )
    planned, sm = TensorRtInfo.read(graph).arch, current_sm(torch)
    if sm != planned:
        text = f"planned for {planned}, built on {sm}: the plan's times are another GPU's"
        emit(Note("compile", text, "warning"))
    for file in files_below(graph):
        place = into / file.relative_to(graph)
        if not file.name.startswith(GRAPH) and file.name != FILE:
            place.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file, place)
    # The target's graph, then those of its head.
    parts = sorted(file.parent.relative_to(graph) for file in graph.rglob(FILE))
    for number, part in enumerate(parts):
        emit(Progress("compile", "TensorRT plan", number, len(parts), "plan"))
        _build_part(trt, torch, graph / part, into / part, timing_cache, emit)
    emit(Progress("compile", "TensorRT plan", len(parts), len(parts), "plan"))


def _build_part(trt: Any, torch: Any, graph: Path, into: Path, timing_cache: Path, emit: Emit) -> None:
    """Write the plan of one graph, what it is made of, and what it is bound to."""
    from trtspec.engines.tensorrt import current_sm

    shapes = TensorRtInfo.read(graph)
    plan, listed = _Builder(trt, torch.cuda.get_device_capability(), graph, shapes, timing_cache).build()
    layers, expected = _attention_layers(listed), EngineInfo.read(graph).layers if shapes.plugins else 0
    if layers < expected:
        text = f"{layers} of {expected} attention layers of the plan are named as the plugin's: see {LAYERS}"
        emit(Note("compile", text, "warning"))
    into.mkdir(parents=True, exist_ok=True)
    (into / PLAN).write_bytes(plan)
    (into / LAYERS).write_text(listed)
    digest, device = hashlib.sha256(plan).hexdigest(), torch.cuda.get_device_name()
    built = BuiltPlan(trt.__version__, current_sm(torch), device, digest, layers)
    replace(shapes, built=built).write(into)


def _attention_layers(listed: str) -> int:
    """Layers of an inspector's list that carry the name of a plugin node (see compile/export_tensorrt.py)."""
    ours = ("self_attn.attended", "self_attn.partial")
    return sum(any(name in json.dumps(layer) for name in ours) for layer in json.loads(listed)["Layers"])


class _Builder:
    """One build. Everything TensorRT says is kept, to be quoted when it refuses."""

    def __init__(
        self, trt: Any, capability: tuple[int, int], graph: Path, shapes: TensorRtInfo, timing_cache: Path
    ) -> None:
        self._trt, self._capability = trt, capability
        self._graph, self._shapes, self._timing_cache = graph, shapes, timing_cache
        self._said: list[str] = []

    def build(self) -> tuple[bytes, str]:
        """(the plan, its layers as TensorRT's inspector lists them in JSON)."""
        self._register_plugins()
        trt, logger = self._trt, self._logger()
        builder = trt.Builder(logger)
        flags = trt.NetworkDefinitionCreationFlag
        network = builder.create_network(
            1 << int(flags.STRONGLY_TYPED) | 1 << int(flags.PREFER_AOT_PYTHON_PLUGINS)
        )
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(self._graph / GRAPH)):
            raise self._refused([str(parser.get_error(i)) for i in range(parser.num_errors)])
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
        if APPEND in self._shapes.plugins:
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        cache = self._timing(config)
        for profile in self._shapes.profiles:
            config.add_optimization_profile(self._profile(builder, network, profile))
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise self._refused(self._said)
        self._timing_cache.parent.mkdir(parents=True, exist_ok=True)
        partial = self._timing_cache.with_suffix(".partial")
        partial.write_bytes(bytes(cache.serialize()))
        partial.replace(self._timing_cache)
        runtime = trt.Runtime(logger)  # these must outlive what they make
        engine = runtime.deserialize_cuda_engine(plan)
        inspector = engine.create_engine_inspector()
        return bytes(plan), inspector.get_engine_information(trt.LayerInformationFormat.JSON)

    def _register_plugins(self) -> None:
        """Before parsing: an unknown plugin is an error, a registered one is never taken for another operator."""
        if not self._shapes.plugins:
            return
        from trtspec_plugins.tensorrt.registration import register

        try:
            register(self._capability, names=self._shapes.plugins)
        except FileNotFoundError as error:
            raise SetupError(
                "the kernels of this source checkout are not compiled", where=str(error.filename),
                hint="python -m trtspec_plugins.aot",
            ) from error  # fmt: skip

    def _logger(self) -> Any:
        said, trt = self._said, self._trt

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if int(severity) <= int(trt.ILogger.Severity.WARNING):
                    said.append(message)

        return Logger()

    def _timing(self, config: Any) -> Any:
        known = self._timing_cache.read_bytes() if self._timing_cache.is_file() else b""
        cache = config.create_timing_cache(known)
        if not config.set_timing_cache(cache, ignore_mismatch=False):  # of another GPU or version: start anew
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, ignore_mismatch=False)
        return cache

    def _profile(self, builder: Any, network: Any, profile: Profile) -> Any:
        """Minimum, optimum and maximum are one shape: that of every run."""
        made = builder.create_optimization_profile()
        by_row = (profile.batch, profile.rows)
        known = {"logit_rows": (profile.logits,), "tree_mask": (*by_row, mask_words(profile.rows))}
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            leading = by_row if tensor.name in _BY_ROW else (profile.batch,)
            shape = known.get(tensor.name, (*leading, *tuple(tensor.shape)[len(leading) :]))
            made.set_shape(tensor.name, shape, shape, shape)
        return made

    def _refused(self, words: list[str]) -> StageFailed:
        said = "\n  ".join(words[-8:] or ["(it gave no reason)"])
        return StageFailed(
            f"TensorRT {self._trt.__version__} refuses the graph:\n  {said}", where=str(self._graph / GRAPH)
        )
