"""Hydra heads (2402.05109, section 3): Medusa's, each with the embeddings of the tokens before it as further input.

Canonical names, those of the authors' MLP heads; head i, block j, H the target's width, V the head's vocabulary:

    hydra_mlp.{i}.0.linear.weight [H, (i+2)·H], .bias [H]            first block: R x + SiLU(W x + b), where x is the
    hydra_mlp.{i}.0.res_connection.weight [H, (i+2)·H], .bias [H]    state and i+1 embeddings, in order of position
    hydra_mlp.{i}.{j}.linear.weight [H, H], .bias [H]                later blocks: x + SiLU(W x + b)
    hydra_lm_head.{i}.weight [V, H], .bias [V]                       output layer

Heads saved with dropout layers count those as places too; they are read all the same. Not implemented, and refused:
the prefix layer of Hydra++, and heads that are not grounded (they see no tokens: they are Medusa's).

config: `hydra_num_heads`, `hydra_num_layers`, `hidden_size`, `vocab_size`, and what else the file says.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from trtspec.checkpoints.head_layouts.head import CONFIG, Head, read_tensors, write_folder
from trtspec.checkpoints.head_layouts.medusa import check_tensors
from trtspec.checkpoints.json_file import read_json_object
from trtspec.errors import ConfigError

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))$")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")


def read_head(folder: Path) -> Head:
    """The head in `folder`. Raises ConfigError for what is missing, contradictory or not implemented."""
    where = str(folder)
    stored = {name.removeprefix("hydra_head."): array for name, array in read_tensors(folder).items()}
    if any(name.startswith("prefix_embed") for name in stored):
        raise ConfigError("the prefix layer of Hydra++ is not implemented", where=where)
    tensors = _canonical(stored)
    output = tensors.get("hydra_lm_head.0.weight")
    if output is None or output.ndim != 2:
        raise ConfigError("the first Hydra head has no output layer", where=where)
    blocks = [tuple(map(int, m.groups()[:2])) for name in tensors if (m := _BLOCK.match(name))]
    heads = max((head for head, _ in blocks), default=-1) + 1
    layers = max((block for _, block in blocks), default=-1) + 1
    vocab, hidden = output.shape
    check_tensors(tensors, hydra_shapes(heads, layers, hidden, vocab), where)
    counted = {
        "hydra_num_heads": heads,
        "hydra_num_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
    }
    return Head("hydra", read_json_object(folder / CONFIG) | counted, (), None, tensors)


def write_head(head: Head, folder: Path) -> None:
    """Write a head that `read_head` gives back as it is."""
    write_folder(folder, head.config, head.tensors)


def hydra_shapes(heads: int, layers: int, hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a head by canonical name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(layers):
            width = (head + 2) * hidden if block == 0 else hidden
            kinds = ("linear", "res_connection") if block == 0 else ("linear",)
            for kind in kinds:
                shapes[f"hydra_mlp.{head}.{block}.{kind}.weight"] = (hidden, width)
                shapes[f"hydra_mlp.{head}.{block}.{kind}.bias"] = (hidden,)
        shapes[f"hydra_lm_head.{head}.weight"] = (vocab, hidden)
        shapes[f"hydra_lm_head.{head}.bias"] = (vocab,)
    return shapes


def _canonical(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Blocks numbered without the dropout layers between them; other names are left for the check."""
    places = sorted({int(m[2]) for name in stored if (m := _BLOCK.match(name))})
    tensors = {}
    for name, array in stored.items():
        if match := _BLOCK.match(name):
            name = f"hydra_mlp.{match[1]}.{places.index(int(match[2]))}.{match[3]}"
        elif match := _OUTPUT.match(name):
            name = f"hydra_lm_head.{match[1]}.{match[2]}"
        tensors[name] = array
    return tensors
