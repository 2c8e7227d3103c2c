"""MTP modules in the DeepSeek-V3 form (2412.19437, section 2.2), each with one Llama layer.

A checkpoint has them behind the target's L layers: module k (from 0) is `model.layers.{L + k}.`, and the config states
`num_nextn_predict_layers`. Canonical names drop the target's part, H is the width and Vd the draft vocabulary:

    layers.{k}.enorm.weight, layers.{k}.hnorm.weight [H]   norms of the token's embedding and of the state before
    layers.{k}.eh_proj.weight [H, 2H]                      of both, the embedding first
    layers.{k}.{self_attn, mlp, input_layernorm, post_attention_layernorm}.*   a Llama layer
    layers.{k}.shared_head.norm.weight [H]                 before the output layer
    lm_head.weight [Vd, H], embed_tokens.weight [V, H]     absent: the target's

Published files repeat the shared embedding and output layer inside every module (`embed_tokens`, `shared_head.head`):
one copy is kept, and copies that differ are refused. The state before is the target's, after its final norm, for the
first module, and what the previous module's output layer reads for the next.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from trtspec.checkpoints.config_view import load_view
from trtspec.checkpoints.head_layouts.eagle import layer_config, layer_shapes
from trtspec.checkpoints.head_layouts.head import (
    Head,
    check_tensors,
    check_trained,
    read_tensors,
    write_folder,
)
from trtspec.errors import ConfigError
from trtspec.files import JSON

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*)$")
_SHARED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def read_head(folder: Path) -> Head:
    """The modules in `folder`. Raises ConfigError for tensors that are missing, unknown or contradictory."""
    view = load_view(folder)
    stored = read_tensors(folder)
    d2t = stored.pop("d2t", None)
    stored.pop("t2d", None)
    tensors = _canonical(stored, view.where)
    config = layer_config(view, tensors)
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None
    config["num_target_layers"] = view.integer("num_target_layers") or config["num_hidden_layers"]
    config["num_hidden_layers"] = sum(name.endswith("eh_proj.weight") for name in tensors)
    config["draft_vocab_size"] = rows or config["vocab_size"]
    config["target_hidden_size"] = config["hidden_size"]
    if d2t is not None and len(d2t) != config["draft_vocab_size"]:
        raise ConfigError(
            f"d2t maps {len(d2t)} tokens, lm_head has {config['draft_vocab_size']} rows", where=view.where
        )
    check_tensors(tensors, mtp_shapes(config, tensors), str(folder))
    check_trained(tensors, str(folder))
    return Head("mtp", config, (), None if d2t is None else d2t.astype(np.int64), tensors)


def write_head(head: Head, folder: Path) -> None:
    """Write the modules as a checkpoint of their own, which `read_head` gives back as it is."""
    first, count = int(head.config["num_target_layers"]), int(head.config["num_hidden_layers"])
    tensors = {}
    for name, array in head.tensors.items():
        match = _LAYER.match(name)
        tensors[f"model.layers.{first + int(match[1])}.{match[2]}" if match else name] = array
    if head.d2t is not None:
        tensors["d2t"] = head.d2t
    config: dict[str, JSON] = {
        **{name: value for name, value in head.config.items() if name != "num_target_layers"},
        "architectures": ["LlamaForCausalLMMTP"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": first,
        "num_nextn_predict_layers": count,
        "tie_word_embeddings": False,
    }
    write_folder(folder, config, tensors)


def mtp_shapes(config: dict[str, JSON], tensors: object) -> dict[str, tuple[int, ...]]:
    """Every tensor of such modules with its shape; those that may be absent are listed where `tensors` has them."""
    hidden = int(config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {}
    optional = {
        "lm_head.weight": (int(config["draft_vocab_size"]), hidden),
        "embed_tokens.weight": (int(config["vocab_size"]), hidden),
    }
    for index in range(int(config["num_hidden_layers"])):
        required, possible = layer_shapes(config, index, hidden)
        shapes |= required
        optional |= possible
        shapes |= {
            f"layers.{index}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")
        }
        shapes[f"layers.{index}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes | {name: shape for name, shape in optional.items() if name in tensors}


def _canonical(stored: dict[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    numbers = sorted({int(m[1]) for name in stored if (m := _LAYER.match(name)) and "eh_proj" in m[2]})
    if not numbers:
        raise ConfigError("the folder holds no MTP module (no eh_proj)", where=where)
    tensors: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        match = _LAYER.match(name)
        if match and int(match[1]) not in numbers:
            continue  # a layer of the target, where the modules come in its checkpoint
        short = match[2] if match else name.removeprefix("model.")
        key = _SHARED.get(short) or (f"layers.{numbers.index(int(match[1]))}.{short}" if match else short)
        if key in tensors and not np.array_equal(tensors[key], array):
            raise ConfigError(f"the modules have different copies of {key}, which they share", where=where)
        tensors[key] = array
    return tensors
