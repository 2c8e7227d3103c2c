"""An engine is compared with the PyTorch model it came from before anyone may run it.

Both see the same tokens: a prompt in two pieces and then short steps, as serving does. Two comparisons:

- the graph alone, its activations kept in float32: logits agree to rounding;
- the engine as it will run: where kernels round activations to 8 bits, the next-token distribution stays close
  (mean KL divergence) and the likeliest token is nearly always the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from trtspec.compile.weights import Weights
from trtspec.engines.base import Engine, SlotStep
from trtspec.engines.hierarchical import open_cpu_engine
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import GRAPH
from trtspec.errors import StageFailed

_PIECES = (24, 12, 1, 2, 5, 1, 9, 10)  # rows of the steps that read the check's tokens
GRAPH_TOLERANCE = 1e-3  # of the logits' standard deviation
_MEAN_KL_LIMIT = 0.05  # nats
_FLOAT_GRAPH = "check.onnx"
_TEXT = (
    "A speculative decoder proposes several tokens cheaply and lets the target model check them in one pass. "
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n1, 1, 2, 3, 5, 8, 13, 21"
)


def check_engine(model: Path, engine: Path) -> Mapping[str, float]:
    """Compare the engine folder with the model folder it was built from.

    Returns `graph_error` (largest logit difference, in standard deviations of the logits), `mean_kl_nats` and
    `top1_agreement` of the engine as it runs. Raises StageFailed when either comparison is out of bounds.
    """
    tokens = check_tokens(engine)
    reference = torch_logits(model, tokens)
    try:
        _write_float_graph(engine)
        error = graph_error(_engine_logits(engine, _FLOAT_GRAPH, tokens), reference)
    finally:
        (engine / _FLOAT_GRAPH).unlink(missing_ok=True)
    running = _engine_logits(engine, GRAPH, tokens)
    figures = {
        "graph_error": error,
        "mean_kl_nats": _mean_kl(reference, running),
        "top1_agreement": float((running.argmax(-1) == reference.argmax(-1)).mean()),
    }
    if not error <= GRAPH_TOLERANCE or not figures["mean_kl_nats"] <= _MEAN_KL_LIMIT:
        raise StageFailed(
            "the compiled engine does not compute what the PyTorch model computes: "
            + ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            + f" (limits: graph_error {GRAPH_TOLERANCE:g}, mean_kl_nats {_MEAN_KL_LIMIT:g})",
            where=str(engine),
            hint="please report the model; with `quantization: none` the weights play no part in it",
        )
    return figures


def graph_error(logits: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference of two [T, V] arrays of logits, in standard deviations of the reference."""
    return float(np.abs(logits - reference).max() / reference.std())


def check_tokens(engine: Path) -> np.ndarray:
    """int64 [sum of the pieces, or the engine's context]: real text where the folder has a tokenizer, seeded random
    ids otherwise."""
    spec = EngineInfo.read(engine).spec
    count = min(sum(_PIECES), spec.max_seq_len)
    if (engine / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(engine / "tokenizer.json")).encode(_TEXT).ids
        return np.resize(np.array(ids, np.int64), count)
    return np.random.default_rng(0).integers(0, spec.vocab_size, count)


def torch_logits(model: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 [T, V] of transformers' own implementation, in float32, on the dequantized weights."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    config.quantization_config = None
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = Weights(model)
    state = {name: torch.from_numpy(weights.dense(name)) for name in network.state_dict()}
    network.load_state_dict(state, strict=True, assign=True)
    network.tie_weights()
    network.model.rotary_emb = type(network.model.rotary_emb)(config)  # its buffers were made on "meta" too
    with torch.inference_mode():
        return network.eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()


def _engine_logits(engine: Path, graph: str, tokens: np.ndarray) -> np.ndarray:
    """float32 [T, V], read in pieces."""
    return logits_in_pieces(open_cpu_engine(engine, graph=graph, max_batch=1), tokens)


def logits_in_pieces(engine: Engine, tokens: np.ndarray) -> np.ndarray:
    """float32 [T, V] of the check's tokens, read in slot 0 in the check's pieces. Closes the engine."""
    start, rows = 0, []
    for piece in _PIECES:
        if start < len(tokens):
            step = SlotStep(slot=0, start=start, tokens=tokens[start : start + piece])
            rows.append(engine.forward([step])[0].logits.copy())
        start += piece
    engine.close()
    return np.concatenate(rows)


def _write_float_graph(engine: Path) -> None:
    """The same graph over the same weights, with MatMulNBits told to keep activations in float32."""
    graph = onnx.load(engine / GRAPH, load_external_data=False)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    (engine / _FLOAT_GRAPH).write_bytes(graph.SerializeToString(deterministic=True))


def _mean_kl(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean over rows of KL(reference ‖ other), nats."""

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
