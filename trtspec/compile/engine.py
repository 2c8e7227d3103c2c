"""The compile stage for `onnxruntime`: graph, tokenizer, `engine.json`, and the proof that they are right.

model folder ──read_decoder, Weights──▶ model.onnx + model.onnx.data ──check_engine──▶ engine.json
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtspec import __version__
from trtspec.checkpoints.hf_folder import COMPANIONS
from trtspec.engines.base import EngineSpec
from trtspec.engines.info import EngineInfo
from trtspec.errors import PlanInfeasible
from trtspec.events import Emit, Progress, silent

if TYPE_CHECKING:
    from trtspec.compile.decoder import DecoderSpec

MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """model: a folder with config.json, safetensors (quantized or not) and tokenizer. name: what it is called.

    max_seq_len: tokens of prompt and output together, None for the model's own limit.
    speculation: `method`, `draft_length` and the method's options, as planned; stored, not interpreted here.
    numerics: "fast" leaves out the companion row of lone rows (see engines/onnxruntime.py) and exactness with it.
    max_branches: the most leaves of a token tree; each takes KV of its own while a tree is verified.
    taps: 0-based layers whose output a drafter reads.
    kv_group: tokens of a group of a hierarchical KV cache (see engines/hierarchical_kv.py), 0 for a float32 one.
    kv_bits: of the hierarchical cache's elements that are read, 8 as a target and 4 as its draft.
    """

    model: Path
    name: str
    speculation: Mapping[str, Any]
    max_batch: int = 8
    max_seq_len: int | None = None
    numerics: Literal["exact", "fast"] = "exact"
    max_branches: int = 1
    taps: tuple[int, ...] = ()
    kv_group: int = 0
    kv_bits: Literal[4, 8] = 8


def compile_engine(request: CompileRequest, into: Path, emit: Emit = silent) -> EngineInfo:
    """Write an engine folder into the empty folder `into` and return what it says of itself.

    Raises PlanInfeasible for an architecture the graph does not cover or a context past the model's, and
    StageFailed when the engine's logits differ from the PyTorch model's.
    """
    from trtspec.checkpoints.tokenizer import stop_token_ids
    from trtspec.compile.check import check_engine
    from trtspec.compile.decoder import read_decoder
    from trtspec.compile.export_onnx import GraphOptions, export_decoder
    from trtspec.compile.hierarchical_graph import KvView, export_hierarchical
    from trtspec.compile.weights import Weights
    from trtspec.engines.onnxruntime import GRAPH, RESERVE_ROWS

    decoder = read_decoder(request.model)
    max_seq_len = context_limit(decoder, request.max_seq_len, request.model)
    weights = Weights(request.model)
    emit(Progress("compile", "graph", 0, 2, "step"))
    options = GraphOptions(
        max_positions=max_seq_len + RESERVE_ROWS,
        taps=request.taps,
        masks=request.max_branches > 1 and request.numerics == "fast",  # an exact engine gives branches lanes
    )
    if request.kv_group:
        view = KvView(request.kv_group, request.kv_bits)
        export_hierarchical(decoder, weights, options, view, into / GRAPH)
    else:
        export_decoder(decoder, weights, options, into / GRAPH)
    copy_companions(request.model, into)
    info = EngineInfo(
        trtspec_version=__version__,
        backend="onnxruntime",
        model=request.name,
        spec=EngineSpec(
            vocab_size=decoder.vocab_size,
            tokenizer_vocab_size=tokenizer_size(into, decoder.vocab_size),
            max_batch=request.max_batch,
            max_seq_len=max_seq_len,
            # Rows past a group's end would take another pass anyway, and every row has to be held in float32.
            max_rows=min(MAX_ROWS, max_seq_len, request.kv_group or MAX_ROWS),
            exact=request.numerics == "exact",
            max_branches=request.max_branches,
            hidden_size=decoder.hidden_size,
            taps=request.taps,
            rewinds=not request.kv_group,
        ),
        layers=decoder.layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        least_rows=weights.least_rows,
        stop_token_ids=stop_token_ids(into),
        weights=weights.summary(),
        speculation=dict(request.speculation),
        kv_group=request.kv_group,
    )
    info.write(into)
    emit(Progress("compile", "comparison with PyTorch", 1, 2, "step"))
    info = replace(info, checks=check_engine(request.model, into))
    info.write(into)
    emit(Progress("compile", "comparison with PyTorch", 2, 2, "step"))
    return info


def context_limit(decoder: DecoderSpec, wanted: int | None, model: Path) -> int:
    """Tokens of prompt and output together: `wanted`, or the model's own limit. PlanInfeasible past that."""
    most = decoder.max_position_embeddings
    if wanted is not None and wanted > most:
        raise PlanInfeasible(
            f"max_seq_len {wanted} passes the model's max_position_embeddings",
            where=str(model / "config.json"),
            hint=f"set engine.max_seq_len to at most {most}",
        )
    return wanted or most


def copy_companions(model: Path, into: Path) -> None:
    """Config and tokenizer: all an engine folder needs of the model's besides its weights."""
    for name in ("config.json", *COMPANIONS):
        if (model / name).is_file():
            shutil.copyfile(model / name, into / name)


def tokenizer_size(folder: Path, vocab_size: int) -> int:
    """Ids the tokenizer knows; logits past them are padding of the embedding table."""
    from trtspec.checkpoints.tokenizer import TextTokenizer

    if not (folder / "tokenizer.json").is_file():
        return vocab_size
    return min(vocab_size, TextTokenizer.load(folder).vocab_size)
