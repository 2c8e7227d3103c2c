"""Parallel heads for the tiny models of tiny_models.py: random ones, and ones trained to know a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.tiny_models import VOCABULARY
from trtspec.checkpoints.head_layouts.dflash import dflash_shapes, numbers_of
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.head_layouts.hydra import hydra_shapes
from trtspec.checkpoints.head_layouts.medusa import medusa_shapes
from trtspec.train.head_modules import METHODS, Blueprint
from trtspec.train.texts import Text

if TYPE_CHECKING:
    from trtspec.train.fit_torch import Curves

HIDDEN = 64
TOKENS = 259  # ids that the tokenizer of `with_tokenizer` knows


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Normal float32 weights."""
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}


def medusa_head(heads: int = 3, layers: int = 1, seed: int = 0) -> Head:
    """Random Medusa heads."""
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
    }
    return Head(
        "medusa", config, (), None, random_tensors(medusa_shapes(heads, layers, HIDDEN, VOCABULARY), seed)
    )


def hydra_head(heads: int = 3, layers: int = 1, seed: int = 0) -> Head:
    """Random Hydra heads."""
    config = {
        "hydra_num_heads": heads,
        "hydra_num_layers": layers,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
    }
    return Head(
        "hydra", config, (), None, random_tensors(hydra_shapes(heads, layers, HIDDEN, VOCABULARY), seed)
    )


def dflash_head(method: str = "dflash", block_size: int = 5, head_dim: int = 16) -> Head:
    """A random DFlash head, or DSpark's with a recurrent head and a confidence of its own."""
    settings = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    if method == "dspark":
        serial = {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "rnn"}
        settings |= {**serial, "use_confidence_head": True, "shift_label": True}
    config = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "block_size": block_size,
        "num_target_layers": 3,
        "dflash_config": settings,
    }
    head = Head(method, config, (0, 2), None, {})
    shapes = dflash_shapes(numbers_of(head, "a random head"), 2)
    return replace(head, tensors=random_tensors(shapes, seed=0))


def without_padding(model: Path, into: Path) -> Path:
    """A copy of a tiny target that hardly ever likes an id its tokenizer does not know, as trained models do not."""
    import torch
    import transformers

    network = transformers.LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        network.lm_head.weight[TOKENS:] = 0
    network.save_pretrained(into)
    return into


def own_texts(model: Path, prompts: Sequence[Sequence[int]], length: int) -> list[Text]:
    """What a tiny target with that tokenizer writes greedily after each prompt: `length` tokens."""
    import torch
    import transformers

    network = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    texts = []
    for prompt in prompts:
        with torch.no_grad():
            written = network.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=length,
                eos_token_id=None,
                suppress_tokens=list(range(TOKENS, VOCABULARY)),
                do_sample=False,
            )
        texts.append(Text(written[0].numpy().astype(np.uint32), len(prompt), "own"))
    return texts


def fitted(
    method: str,
    model: Path,
    texts: Sequence[Text],
    work: Path,
    *,
    draft_length: int,
    captured_layers: tuple[int, ...] = (),
) -> tuple[Head, Curves]:
    """A head trained on texts of its tiny target, which are its held-out texts too. Block diffusion takes longest."""
    import torch
    import transformers

    from trtspec.train.batches_torch import StreamedBatches
    from trtspec.train.fit_torch import FitSettings, fit
    from trtspec.train.head_modules import build_module

    block = method in ("dflash", "dspark")
    steps, options = (300, {"anchors": 16}) if block else (120, {})
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM.from_pretrained(model)
    blueprint = Blueprint(
        method, captured_layers, draft_length, options={**METHODS[method].options, **options}
    )
    module = build_module(blueprint, network)
    batches = StreamedBatches(network, texts, texts, captured_layers, batch_tokens=1024, seed=0)
    curves = fit(module, batches, FitSettings(steps, 3e-3, evaluate_steps=steps), work)
    return module.head(), curves
