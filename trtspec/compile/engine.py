"""The compile stage for `onnxruntime`: graph, tokenizer, `engine.json`, and the proof that they are right.

model folder ──read_decoder, Weights──▶ model.onnx + model.onnx.data ──check_engine──▶ engine.json
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtspec import __version__
from trtspec.checkpoints.hf_folder import COMPANIONS
from trtspec.engines.base import EngineSpec
from trtspec.engines.info import EngineInfo
from trtspec.errors import PlanInfeasible
from trtspec.events import Emit, Progress, silent

MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """model: a folder with config.json, safetensors (quantized or not) and tokenizer. name: what it is called.

    max_seq_len: tokens of prompt and output together, None for the model's own limit.
    speculation: `method`, `draft_length` and the method's options, as planned; stored, not interpreted here.
    numerics: "fast" leaves out the companion row of lone rows (see engines/onnxruntime.py) and exactness with it.
    max_branches: the most leaves of a token tree; each takes KV of its own while a tree is verified.
    taps: 0-based layers whose output a drafter reads.
    """

    model: Path
    name: str
    speculation: Mapping[str, Any]
    max_batch: int = 8
    max_seq_len: int | None = None
    numerics: Literal["exact", "fast"] = "exact"
    max_branches: int = 1
    taps: tuple[int, ...] = ()


def compile_engine(request: CompileRequest, into: Path, emit: Emit = silent) -> EngineInfo:
    """Write an engine folder into the empty folder `into` and return what it says of itself.

    Raises PlanInfeasible for an architecture the graph does not cover or a context past the model's, and
    StageFailed when the engine's logits differ from the PyTorch model's.
    """
    from trtspec.checkpoints.tokenizer import stop_token_ids
    from trtspec.compile.check import check_engine
    from trtspec.compile.decoder import read_decoder
    from trtspec.compile.export_onnx import GraphOptions, export_decoder
    from trtspec.compile.weights import Weights
    from trtspec.engines.onnxruntime import GRAPH, RESERVE_ROWS

    decoder = read_decoder(request.model)
    max_seq_len = request.max_seq_len or decoder.max_position_embeddings
    if max_seq_len > decoder.max_position_embeddings:
        raise PlanInfeasible(
            f"max_seq_len {max_seq_len} passes the model's max_position_embeddings",
            where=str(request.model / "config.json"),
            hint=f"set engine.max_seq_len to at most {decoder.max_position_embeddings}",
        )
    weights = Weights(request.model)
    emit(Progress("compile", "graph", 0, 2, "step"))
    options = GraphOptions(max_positions=max_seq_len + RESERVE_ROWS, taps=request.taps)
    export_decoder(decoder, weights, options, into / GRAPH)
    for name in ("config.json", *COMPANIONS):  # an engine folder needs nothing else
        if (request.model / name).is_file():
            shutil.copyfile(request.model / name, into / name)
    info = EngineInfo(
        trtspec_version=__version__,
        backend="onnxruntime",
        model=request.name,
        spec=EngineSpec(
            vocab_size=decoder.vocab_size,
            tokenizer_vocab_size=_tokenizer_size(into, decoder.vocab_size),
            max_batch=request.max_batch,
            max_seq_len=max_seq_len,
            max_rows=min(MAX_ROWS, max_seq_len),
            exact=request.numerics == "exact",
            max_branches=request.max_branches,
            hidden_size=decoder.hidden_size,
            taps=request.taps,
        ),
        layers=decoder.layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        least_rows=weights.least_rows,
        stop_token_ids=stop_token_ids(into),
        weights=weights.summary(),
        speculation=dict(request.speculation),
    )
    info.write(into)
    emit(Progress("compile", "comparison with PyTorch", 1, 2, "step"))
    info = replace(info, checks=check_engine(request.model, into))
    info.write(into)
    emit(Progress("compile", "comparison with PyTorch", 2, 2, "step"))
    return info


def _tokenizer_size(folder: Path, vocab_size: int) -> int:
    """Ids the tokenizer knows; logits past them are padding of the embedding table."""
    from trtspec.checkpoints.tokenizer import TextTokenizer

    if not (folder / "tokenizer.json").is_file():
        return vocab_size
    return min(vocab_size, TextTokenizer.load(folder).vocab_size)
