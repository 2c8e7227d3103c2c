"""Parts that the graphs of parallel heads have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.quantized_linear import QuantizedLinear
from trtspec.compile.graph import MICROSOFT, GraphWriter
from trtspec.compile.heads import HeadRequest
from trtspec.compile.weights import Linear, Weights, packed_linear
from trtspec.drafters.head_engine import HEAD_FOLDER, plan_folder
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import GRAPH
from trtspec.errors import ConfigError
from trtspec.files import JSON

if TYPE_CHECKING:
    from trtspec.compile.export_tensorrt import TensorRtLayers

CANDIDATES = 10  # of each head; published trees use no rank past the tenth
_PADDING = 1024  # rows by which embedding tables are padded at most
EMBEDDING = "model.embed_tokens.weight"


def check_fit(head: Head, hidden_size: int, vocab_size: int, where: Path) -> None:
    """Raise ConfigError for a head of another width than its target's, or of another vocabulary.

    Tables padded to different multiples are alike: rows past the tokenizer are never proposed.
    """
    width, tokens = int(head.config["hidden_size"]), int(head.config["vocab_size"])
    if width != hidden_size:
        said = f"the head is {width} wide, the target {hidden_size}"
    elif abs(tokens - vocab_size) > _PADDING:
        said = f"the head has {tokens} tokens, the target {vocab_size}"
    else:
        return
    raise ConfigError(said, where=str(where), hint="it was trained for another target")


def rms_norm(writer: GraphWriter, source: str, gamma: str, epsilon: float, result: str) -> str:
    """RMS norm over the last axis."""
    return writer.node(
        "SimplifiedLayerNormalization", [source, gamma], result, axis=-1, epsilon=epsilon, stash_type=1
    )


class HeadLayers:
    """Layers of a head's graph in ONNX Runtime's operators; `TensorRtLayers` are the same in TensorRT's.

    int8: their weights are rounded as ModelOpt's INT8_WEIGHT_ONLY does.
    """

    def __init__(self, writer: GraphWriter, *, int8: bool = False) -> None:
        self.writer, self._int8 = writer, int8

    def constant(self, name: str, values: np.ndarray) -> str:
        """A weight that is not rounded."""
        return self.writer.constant(name, values)

    def state(self, name: str) -> str:
        """A float32 input of the graph as the layers take it."""
        return name

    def rms_norm(self, name: str, source: str, gains: np.ndarray, epsilon: float) -> str:
        """RMS norm over the last axis."""
        gamma = self.writer.constant(f"{name}.weight", gains)
        return rms_norm(self.writer, source, gamma, epsilon, f"{name}.out")

    def silu(self, name: str, source: str) -> str:
        """source · sigmoid(source). QuickGelu with alpha 1 is that."""
        return self.writer.node("QuickGelu", [source], f"{name}.silu", MICROSOFT, alpha=1.0)

    def linear(self, name: str, source: str, weight: np.ndarray, bias: np.ndarray | None = None) -> str:
        """source [..., I] times weight [O, I] transposed, plus bias [O]."""
        packed = packed_linear([int8_rows(weight)]) if self._int8 else None
        return self.product(name, source, packed or Linear(weight, *weight.shape), bias)

    def product(self, name: str, source: str, linear: Linear, bias: np.ndarray | None = None) -> str:
        """The same for weights of either kind, without an input scale."""
        node, constant = self.writer.node, self.writer.constant
        if linear.bits == 32:
            result = node("MatMul", [source, constant(f"{name}.weight", linear.weight.T)], f"{name}.product")
        else:
            result = node(
                "MatMulNBits",
                [
                    source,
                    constant(f"{name}.weight", linear.weight),
                    constant(f"{name}.scales", linear.scales),
                ],
                f"{name}.product",
                MICROSOFT,
                K=linear.inputs,
                N=linear.outputs,
                bits=linear.bits,
                block_size=linear.block_size,
                accuracy_level=4,
            )
        return (
            result if bias is None else node("Add", [result, constant(f"{name}.bias", bias)], f"{name}.out")
        )


def open_layers(request: HeadRequest, engine: Path, name: str, rows: int) -> HeadLayers | TensorRtLayers:
    """Of a new graph without attention, for the engine's backend. name: its file in the head's folder.

    rows: of a run on TensorRT, whose shapes are static.
    """
    if EngineInfo.read(engine).backend == "tensorrt":
        from trtspec.compile.heads.tensorrt import open_rows

        return open_rows(engine, plan_folder(engine, name), rows)
    int8 = request.quantization == "int8_weight_only"
    return HeadLayers(GraphWriter(engine / HEAD_FOLDER / name), int8=int8)


def silu_block(
    layers: HeadLayers | TensorRtLayers,
    name: str,
    source: str,
    weight: np.ndarray,
    bias: np.ndarray,
    residual: str,
) -> str:
    """residual + SiLU(source · weightᵀ + bias)."""
    active = layers.silu(name, layers.linear(name, source, weight, bias))
    return layers.writer.node("Add", [residual, active], f"{name}.sum")


def int8_rows(weight: np.ndarray) -> QuantizedLinear:
    """float32 [out, in] as int8 with a scale for each row, its largest magnitude / 127."""
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    scales[scales == 0] = 1
    rounded = np.clip(np.rint(weight / scales[:, None]), -127, 127)
    return QuantizedLinear("int8_channel", rounded.astype(np.int8), scales)


def candidates(writer: GraphWriter, logits: str, count: int, result: str) -> str:
    """The `count` likeliest ids, likeliest first: int32 [..., count]."""
    node, size = writer.node, writer.constant(f"{result}.count", np.array([count], np.int64))
    scores = node("Cast", [logits], f"{result}.logits", to=TensorProto.FLOAT)
    node("TopK", [scores, size], [f"{result}.scores", f"{result}.ids"], axis=-1, largest=1, sorted=1)
    return node("Cast", [f"{result}.ids"], result, to=TensorProto.INT32)  # TensorRT's own type for them


def provide_embedding(engine: Path, weights: Weights) -> dict[str, JSON]:
    """What `open_embedding` needs of the target's table, for head.json. weights: of the target.

    A plan's weights cannot be looked into: for TensorRT it becomes a file of its own.
    """
    if EngineInfo.read(engine).backend == "tensorrt":
        from trtspec.compile.heads.tensorrt import write_embedding

        return write_embedding(engine, weights)
    return embedding_place(engine, GRAPH)


def embedding_place(engine: Path, graph: str) -> dict[str, JSON]:
    """Where the target's embedding lies in its engine's weights: {file, offset, shape}, for `shared_embedding`."""
    model = onnx.load(engine / graph, load_external_data=False)
    table = next(tensor for tensor in model.graph.initializer if tensor.name == EMBEDDING)
    place = {entry.key: entry.value for entry in table.external_data}
    return {"file": place["location"], "offset": int(place["offset"]), "shape": list(table.dims)}
