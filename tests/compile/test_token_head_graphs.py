"""Medusa's and Hydra's graphs against PyTorch's own arithmetic, from the folder a head is published in.

Those for TensorRT are written in float32 and run by ONNX Runtime, which has all of their operators.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from tests.tiny_models import VOCABULARY
from tests.tiny_parallel_heads import HIDDEN, hydra_head, medusa_head
from trtspec.checkpoints.head_layouts import hydra, medusa
from trtspec.compile.decoder import read_decoder
from trtspec.compile.export_tensorrt import IR_VERSION, OPSET, TensorRtLayers
from trtspec.compile.graph import GraphWriter
from trtspec.compile.heads.graph import HeadLayers
from trtspec.compile.heads.hydra import export_hydra
from trtspec.compile.heads.medusa import export_medusa
from trtspec.compile.weights import Weights

LAYERS: dict[str, Callable[[Path], HeadLayers | TensorRtLayers]] = {
    "onnxruntime": lambda path: HeadLayers(GraphWriter(path)),
    "onnxruntime, 8 bits": lambda path: HeadLayers(GraphWriter(path), int8=True),
    "tensorrt": lambda path: TensorRtLayers(GraphWriter(path, OPSET, IR_VERSION), "float32"),
}
BACKENDS = ["onnxruntime", "tensorrt"]
KNOWN = VOCABULARY - 20  # ids of the tokenizer; the rest is padding
RNG = np.random.default_rng(0)
STATES = (RNG.standard_normal((5, HIDDEN)) * 3).astype(np.float32)


def normed(model: Path) -> torch.Tensor:
    gamma = torch.from_numpy(Weights(model).array("model.norm.weight"))
    epsilon = read_decoder(model).norm_epsilon
    return torch.nn.functional.rms_norm(torch.from_numpy(STATES), (HIDDEN,), gamma, epsilon)


def run(path: Path, **inputs: np.ndarray) -> np.ndarray:
    (found,) = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, inputs)
    return found


def ten_best(logits: torch.Tensor) -> np.ndarray:
    return logits[:, :KNOWN].topk(10).indices.numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa_ranks_ids_as_pytorch_does(
    tiny_model: Callable[[str], Path], tmp_path: Path, layers: int, backend: str
) -> None:
    model, head = tiny_model("llama"), medusa_head(heads=3, layers=layers, seed=1)
    medusa.write_head(head, tmp_path / "published")
    export_medusa(
        LAYERS[backend](tmp_path / "medusa.onnx"),
        medusa.read_head(tmp_path / "published"),
        Weights(model),
        read_decoder(model).norm_epsilon,
        heads=3,
        vocab_size=KNOWN,
    )
    found = run(tmp_path / "medusa.onnx", hidden=STATES)
    for index in range(3):
        state = normed(model)
        for block in range(layers):
            weight, bias = (
                torch.from_numpy(head.array(f"{index}.{block}.linear.{x}")) for x in ("weight", "bias")
            )
            state = state + torch.nn.functional.silu(state @ weight.T + bias)
        logits = state @ torch.from_numpy(head.array(f"{index}.{layers}.weight")).T
        assert np.array_equal(found[:, index], ten_best(logits))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("index", "layers"), [(0, 1), (1, 1), (2, 2)])
def test_hydra_ranks_ids_as_its_torch_module_does(
    tiny_model: Callable[[str], Path], tmp_path: Path, index: int, layers: int, backend: str
) -> None:
    import transformers

    from trtspec.train.hydra_torch import HydraModule

    model, head = tiny_model("llama"), hydra_head(heads=3, layers=layers, seed=2)
    hydra.write_head(head, tmp_path / "published")
    export_hydra(
        LAYERS[backend](tmp_path / "one.onnx"),
        hydra.read_head(tmp_path / "published"),
        Weights(model),
        read_decoder(model).norm_epsilon,
        index=index,
        vocab_size=KNOWN,
    )
    embedded = RNG.standard_normal((5, (index + 1) * HIDDEN)).astype(np.float32)
    found = run(tmp_path / "one.onnx", hidden=STATES, embedded=embedded)

    module = HydraModule(transformers.LlamaForCausalLM.from_pretrained(model), 3, layers)
    module.load_state_dict({name: torch.from_numpy(head.array(name)) for name in head.tensors})
    rows = torch.cat([normed(model), torch.from_numpy(embedded)], dim=-1)
    with torch.no_grad():
        logits = module.hydra_lm_head[index](module.hydra_mlp[index](rows))
    assert np.array_equal(found, ten_best(logits))


def test_eight_bit_heads_mostly_agree_with_wide_ones(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, head = tiny_model("llama"), medusa_head(heads=2, seed=4)
    states = (RNG.standard_normal((60, HIDDEN)) * 3).astype(np.float32)
    found = []
    for name, kind in (("wide.onnx", "onnxruntime"), ("narrow.onnx", "onnxruntime, 8 bits")):
        epsilon = read_decoder(model).norm_epsilon
        export_medusa(LAYERS[kind](tmp_path / name), head, Weights(model), epsilon, heads=2, vocab_size=KNOWN)
        found.append(run(tmp_path / name, hidden=states))
    wide, narrow = (tmp_path / f"{name}.onnx.data" for name in ("wide", "narrow"))
    assert narrow.stat().st_size < wide.stat().st_size / 2
    assert not np.array_equal(found[0], found[1]), "rounded weights"
    assert (found[0][:, :, 0] == found[1][:, :, 0]).mean() > 0.9
