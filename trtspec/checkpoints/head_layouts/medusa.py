"""Medusa heads (2401.10774, section 2.1.1): for each future position some residual blocks and an output layer.

Published files name the tensors of head i by their place in its sequence, block after block and the output layer
last. These are the canonical names; V is the head's vocabulary, L the blocks of one head:

    {i}.{j}.linear.weight [H, H], {i}.{j}.linear.bias [H]     block j: x + SiLU(W x + b)
    {i}.{L}.weight [V, H]                                     output layer

Also read: the same below `medusa_head.`, `medusa_heads.` (ModelOpt's export, whose file holds the whole target too)
and `medusa_lm_head.`. How many heads and blocks there are, the tensors say: published configs understate them.

config: `medusa_num_heads`, `medusa_num_layers`, `hidden_size`, `vocab_size`, and what else the file says. A head reads
the target's last state, after the final norm.
"""

from __future__ import annotations

import re
from pathlib import Path

from trtspec.checkpoints.head_layouts.head import CONFIG, Head, check_tensors, read_tensors, write_folder
from trtspec.checkpoints.json_file import read_json_object
from trtspec.errors import ConfigError

_NAME = re.compile(r"(?:medusa_(?:lm_)?heads?\.)?((\d+)\.(\d+)\.(?:linear\.)?(?:weight|bias))$")


def read_head(folder: Path) -> Head:
    """The head in `folder`. Raises ConfigError for tensors that are missing or of contradictory shapes."""
    stored = read_tensors(folder)
    tensors = {match[1]: array for name, array in stored.items() if (match := _NAME.match(name))}
    where = str(folder)
    if not tensors:
        raise ConfigError("the folder holds no tensors of Medusa heads", where=where)
    places = [tuple(map(int, name.split(".")[:2])) for name in tensors]
    heads, layers = max(head for head, _ in places) + 1, max(place for _, place in places)
    output = tensors.get(f"0.{layers}.weight")
    if output is None or output.ndim != 2:
        raise ConfigError("the first Medusa head has no output layer", where=where)
    vocab, hidden = output.shape
    check_tensors(tensors, medusa_shapes(heads, layers, hidden, vocab), where)
    counted = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
    }
    return Head("medusa", read_json_object(folder / CONFIG) | counted, (), None, tensors)


def write_head(head: Head, folder: Path) -> None:
    """Write a head that `read_head` gives back as it is."""
    write_folder(folder, head.config, head.tensors)


def medusa_shapes(heads: int, layers: int, hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a head by canonical name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(layers):
            shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{block}.linear.bias"] = (hidden,)
        shapes[f"{head}.{layers}.weight"] = (vocab, hidden)
    return shapes
