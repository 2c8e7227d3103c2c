"""Medusa's and Hydra's graphs against PyTorch's own arithmetic, from the folder a head is published in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import VOCABULARY
from tests.tiny_parallel_heads import HIDDEN, hydra_head, medusa_head
from trtspec.checkpoints.head_layouts import hydra, medusa
from trtspec.compile.decoder import read_decoder
from trtspec.compile.heads.hydra import export_hydra
from trtspec.compile.heads.medusa import export_medusa
from trtspec.compile.weights import Weights
from trtspec.drafters.head_engine import HEAD_FOLDER, HeadGraph

KNOWN = VOCABULARY - 20  # ids of the tokenizer; the rest is padding
RNG = np.random.default_rng(0)
STATES = (RNG.standard_normal((5, HIDDEN)) * 3).astype(np.float32)


def normed(model: Path) -> torch.Tensor:
    gamma = torch.from_numpy(Weights(model).array("model.norm.weight"))
    epsilon = read_decoder(model).norm_epsilon
    return torch.nn.functional.rms_norm(torch.from_numpy(STATES), (HIDDEN,), gamma, epsilon)


def ten_best(logits: torch.Tensor) -> np.ndarray:
    return logits[:, :KNOWN].topk(10).indices.numpy()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa_ranks_ids_as_pytorch_does(
    tiny_model: Callable[[str], Path], tmp_path: Path, layers: int
) -> None:
    model, head = tiny_model("llama"), medusa_head(heads=3, layers=layers, seed=1)
    medusa.write_head(head, tmp_path / "published")
    (tmp_path / HEAD_FOLDER).mkdir()
    export_medusa(
        medusa.read_head(tmp_path / "published"),
        Weights(model),
        read_decoder(model).norm_epsilon,
        heads=3,
        vocab_size=KNOWN,
        path=tmp_path / HEAD_FOLDER / "medusa.onnx",
    )
    (found,) = HeadGraph(tmp_path, "medusa.onnx")(hidden=STATES)
    for index in range(3):
        state = normed(model)
        for block in range(layers):
            weight, bias = (
                torch.from_numpy(head.array(f"{index}.{block}.linear.{x}")) for x in ("weight", "bias")
            )
            state = state + torch.nn.functional.silu(state @ weight.T + bias)
        logits = state @ torch.from_numpy(head.array(f"{index}.{layers}.weight")).T
        assert np.array_equal(found[:, index], ten_best(logits))


@pytest.mark.parametrize(("index", "layers"), [(0, 1), (1, 1), (2, 2)])
def test_hydra_ranks_ids_as_its_torch_module_does(
    tiny_model: Callable[[str], Path], tmp_path: Path, index: int, layers: int
) -> None:
    import transformers

    from trtspec.train.hydra_torch import HydraModule

    model, head = tiny_model("llama"), hydra_head(heads=3, layers=layers, seed=2)
    hydra.write_head(head, tmp_path / "published")
    (tmp_path / HEAD_FOLDER).mkdir()
    export_hydra(
        hydra.read_head(tmp_path / "published"),
        Weights(model),
        read_decoder(model).norm_epsilon,
        index=index,
        vocab_size=KNOWN,
        path=tmp_path / HEAD_FOLDER / "one.onnx",
    )
    embedded = RNG.standard_normal((5, (index + 1) * HIDDEN)).astype(np.float32)
    (found,) = HeadGraph(tmp_path, "one.onnx")(hidden=STATES, embedded=embedded)

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
    for name, int8 in (("wide.onnx", False), ("narrow.onnx", True)):
        (tmp_path / HEAD_FOLDER).mkdir(exist_ok=True)
        path = tmp_path / HEAD_FOLDER / name
        epsilon = read_decoder(model).norm_epsilon
        export_medusa(head, Weights(model), epsilon, heads=2, vocab_size=KNOWN, path=path, int8=int8)
        found.append(HeadGraph(tmp_path, name)(hidden=states)[0])
    wide, narrow = (tmp_path / HEAD_FOLDER / f"{name}.onnx.data" for name in ("wide", "narrow"))
    assert narrow.stat().st_size < wide.stat().st_size / 2
    assert not np.array_equal(found[0], found[1]), "rounded weights"
    assert (found[0][:, :, 0] == found[1][:, :, 0]).mean() > 0.9
