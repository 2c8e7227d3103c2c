"""EAGLE heads (2401.15077, 2406.16858, 2503.01840) and P-EAGLE's (2602.01469): four published layouts, one form.

| layout | config | names of the first layer |
|---|---|---|
| `eagle` | the EAGLE authors': a one-layer Llama | EAGLE-1 `layers.0.`, EAGLE-3 `midlayer.` |
| `specforge` | SpecForge, AngelSlim: the same and `eagle_config` | `midlayer.` |
| `speculators` | `transformer_layer_config`, `speculators_config` | `layers.0.`, EAGLE-1 `transformer.` |
| `modelopt` | ModelOpt's export, which TensorRT-LLM expects: `eagle_config` with its switches | `layers.0.` |

Canonical names (H width of the head, Ht of the target, W = captured layers · Ht, Vd draft vocabulary):

    fc.weight                  EAGLE-1, -2 [H, 2H] of embedding and feature, with or without fc.bias
                               EAGLE-3, P-EAGLE [H, W] of the captured states
    input_norm.weight [W]      a norm before fc (`norm_before_fc`); fc_norm.{i}.weight [Ht], one for each captured
                               layer (`fc_norm`)
    layers.{i}.*               a Llama layer. EAGLE-3's first takes 2H (embedding and fused state): q, k, v are
                               [·, 2H] and layers.0.hidden_norm.weight norms the fused half. EAGLE-1's first has no
                               input_layernorm.
    norm.weight [H]            before the output layer; EAGLE-1 has none
    lm_head.weight [Vd, H], embed_tokens.weight [V, H]   absent: the target's
    mask_hidden [W]            P-EAGLE's stand-in for states that are not there yet

**Captured layers** are 0-based here: those whose output is read. Configs count finished blocks (`[2, L//2, L − 3]`),
one more; ModelOpt's own default is written 0-based and is recognised (see pairing.captured_layers). EAGLE-1 and
EAGLE-2 read the last state, after the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from trtspec.checkpoints import heads
from trtspec.checkpoints.config_view import ConfigView, load_view
from trtspec.checkpoints.head_layouts.head import (
    Head,
    check_tensors,
    check_trained,
    read_tensors,
    write_folder,
)
from trtspec.checkpoints.pairing import captured_layers
from trtspec.checkpoints.rope import read_rope
from trtspec.errors import ConfigError
from trtspec.files import JSON

Layout = Literal["eagle", "specforge", "speculators", "modelopt"]

THREE = ("eagle3", "p_eagle")  # the first layer takes 2H, fc the captured states
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
)
_MASK_TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")
_MAPS = ("d2t", "t2d")
# The target's own tensors, which training frameworks leave in the file, and a buffer that is computed.
_NOT_THE_HEADS = re.compile(r"verifier_(lm_head|norm)\.|.*rotary_emb\.inv_freq$")


def read_head(folder: Path, target_layers: int | None = None) -> Head:
    """The head in `folder`, whatever its layout. target_layers: of the target, where it is known.

    Raises ConfigError for one that contradicts itself, lacks a tensor or has one that no layout knows.
    """
    facts = heads.read_head(folder)
    view = load_view(folder)
    stored = {name: array for name, array in read_tensors(folder).items() if not _NOT_THE_HEADS.match(name)}
    tensors = {canonical(name): array for name, array in stored.items()}
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # says again what d2t says, which heads.read_head has compared
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
    method = facts.method or "eagle"
    captured: tuple[int, ...] = ()
    if method in THREE:
        layers = target_layers or view.integer("num_target_layers", minimum=1)
        captured = _captured(facts.captured, layers, method, view.where)
    config = _config(view, tensors, method, captured, None if d2t is None else len(d2t))
    check_tensors(tensors, eagle_shapes(method, config, len(captured), tensors), str(folder))
    check_trained(tensors, str(folder))
    return Head(method, config, captured, None if d2t is None else d2t.astype(np.int64), tensors)


def write_head(head: Head, folder: Path, layout: Layout = "specforge", target: str | None = None) -> None:
    """Write `head` in a published layout; `read_head` gives it back as it is.

    target: the name of the model it drafts for, for the layout that states it. Raises ConfigError for captured layers
    that a reader would take for another numbering.
    """
    three = head.method in THREE
    tensors = {_published(name, layout, head): array for name, array in head.tensors.items()}
    if head.d2t is not None:
        tensors["d2t"] = head.d2t
        if layout != "modelopt":
            t2d = np.zeros(int(head.config["vocab_size"]), np.bool_)
            t2d[np.arange(len(head.d2t)) + head.d2t] = True
            tensors["t2d"] = t2d
    layer = {name: head.config[name] for name in (*_SIZES, "head_dim", "rms_norm_eps", "rope_theta")}
    layer |= {"model_type": "llama", "hidden_act": "silu", "rope_scaling": head.config["rope_scaling"]}
    layer |= {"attention_bias": "layers.0.self_attn.q_proj.bias" in head, "tie_word_embeddings": False}
    extra = {name: True for name in OPTIONS if head.config[name]}
    if head.config["num_target_layers"] is not None:
        extra["num_target_layers"] = head.config["num_target_layers"]
    if three:
        extra |= {"draft_vocab_size": head.config["draft_vocab_size"]}
        extra |= {"target_hidden_size": head.config["target_hidden_size"]}
    if head.method == "p_eagle":
        extra |= dict.fromkeys(_MASK_TOKEN, head.config["mask_token_id"])
    boundaries = _boundaries(head)
    if layout == "speculators":
        config = _speculators(head, layer, extra, boundaries, target)
    else:
        architecture = "LlamaForCausalLMEagle3" if three and layout != "eagle" else "LlamaForCausalLM"
        config = {**layer, **extra, "architectures": [architecture], "torch_dtype": _dtype(head)}
        if three:
            config["eagle_config"] = _eagle_config(head, boundaries, layout)
    write_folder(folder, config, tensors)


def eagle_shapes(
    method: str, config: Mapping[str, JSON], captured: int, tensors: Mapping[str, object]
) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a head with its shape; those that may be absent are listed where `tensors` has them."""
    hidden, width = int(config["hidden_size"]), captured * int(config["target_hidden_size"])
    three = method in THREE
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width if three else 2 * hidden)}
    optional = {
        "fc.bias": (hidden,),
        "lm_head.weight": (int(config["draft_vocab_size"]), hidden),
        "embed_tokens.weight": (int(config["vocab_size"]), hidden),
        "norm.weight": (hidden,),
    }
    for index in range(int(config["num_hidden_layers"])):
        required, possible = layer_shapes(config, index, 2 * hidden if three and index == 0 else hidden)
        if index == 0 and not three:
            possible |= {"layers.0.input_layernorm.weight": required.pop("layers.0.input_layernorm.weight")}
        shapes |= required
        optional |= possible
    if three:
        shapes |= {"norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (width,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (int(config["target_hidden_size"]),) for i in range(captured)}
    if method == "p_eagle":
        shapes["mask_hidden"] = (width,)
    return shapes | {name: shape for name, shape in optional.items() if name in tensors}


def layer_shapes(
    config: Mapping[str, JSON], index: int, inputs: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensors of Llama layer `index` whose attention takes `inputs`: those it must have, and those it may have."""
    hidden, inner, dim = (int(config[name]) for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (int(config[f"num_{x}_heads"]) * dim for x in ("attention", "key_value"))
    prefix = f"layers.{index}"
    rows = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    required = {f"{prefix}.{name}.weight": (size, inputs) for name, size in rows.items()}
    rows |= {
        "self_attn.o_proj": hidden,
        "mlp.gate_proj": inner,
        "mlp.up_proj": inner,
        "mlp.down_proj": hidden,
    }
    required |= {
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    possible: dict[str, tuple[int, ...]] = {f"{prefix}.{name}.bias": (size,) for name, size in rows.items()}
    possible |= {f"{prefix}.self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    return required, possible


def layer_config(view: ConfigView, tensors: Mapping[str, np.ndarray]) -> dict[str, JSON]:
    """The numbers of a head's Llama layers, `head_dim` from its projections. Raises ConfigError for what is missing."""
    config: dict[str, JSON] = {name: view.integer(name, minimum=1) for name in _SIZES}
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    config["max_position_embeddings"] = config["max_position_embeddings"] or 2048
    if missing := [name for name, value in config.items() if value is None]:
        raise ConfigError(f"the head's config does not state {', '.join(missing)}", where=view.where)
    if (activation := view.string("hidden_act") or "silu") != "silu":
        raise ConfigError(f"hidden_act {activation!r} of a head is not implemented", where=view.where)
    rope = read_rope(view)
    config["rope_theta"] = rope.theta or 10000.0
    scaling = {"rope_type": rope.kind, **dict(rope.scaling)}
    config["rope_scaling"] = None if rope.kind == "default" else scaling
    config["rms_norm_eps"] = view.number("rms_norm_eps") or 1e-6
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    if query is None:
        raise ConfigError("the head has no attention weights", where=view.where)
    config["head_dim"] = query.shape[0] // int(config["num_attention_heads"])
    return config


def canonical(name: str) -> str:
    """The canonical name of a tensor, from any layout's."""
    name = re.sub(r"^(draft_model\.|eagle_module\.|model\.)+", "", name)
    name = re.sub(r"^(midlayer|transformer)\.", "layers.0.", name)
    return re.sub(r"^fusion_fc\.", "fc.", name)


def _published(name: str, layout: Layout, head: Head) -> str:
    three = head.method in THREE
    if layout == "speculators" and not three:
        return re.sub(r"^layers\.0\.", "transformer.", re.sub(r"^fc\.", "fusion_fc.", name))
    if layout in ("eagle", "specforge") and three and head.config["num_hidden_layers"] == 1:
        return name.replace("layers.0.", "midlayer.")
    return name


def _config(
    view: ConfigView,
    tensors: Mapping[str, np.ndarray],
    method: str,
    captured: tuple[int, ...],
    mapped: int | None,
) -> dict[str, JSON]:
    config = layer_config(view, tensors)
    hidden = int(config["hidden_size"])
    fused = tensors.get("fc.weight")
    if fused is None:
        raise ConfigError("the head has no fc.weight", where=view.where)
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None
    config["draft_vocab_size"] = mapped or rows or config["vocab_size"]
    config["target_hidden_size"] = fused.shape[1] // len(captured) if captured else hidden
    config["num_target_layers"] = view.integer("num_target_layers", minimum=1)
    for option in OPTIONS:
        config[option] = bool(view.flag(option, f"eagle_config.{option}"))
    if method == "p_eagle":
        config["mask_token_id"] = view.integer(*_MASK_TOKEN)
        if config["mask_token_id"] is None:
            raise ConfigError("a P-EAGLE head must state mask_token_id", where=view.where)
    return config


def _captured(ids: tuple[int, ...] | None, layers: int | None, method: str, where: str) -> tuple[int, ...]:
    """0-based captured layers, in the order fc has them."""
    if layers is not None:
        found = captured_layers(ids, layers, method).zero_based
    elif ids is None:
        raise ConfigError(
            "the head does not say which layers it reads, and its target is not known", where=where
        )
    else:
        found = tuple(i - 1 for i in ids)
    if list(found) != sorted(set(found)):
        raise ConfigError(f"captured layers {list(found)} are not ascending", where=where)
    return found


def _boundaries(head: Head) -> list[int]:
    """Captured layers as configs count them: blocks done before the state is taken."""
    ids = [layer + 1 for layer in head.captured_layers]
    layers = head.config["num_target_layers"]
    if layers is not None and tuple(ids) == (1, layers // 2 - 1, layers - 4):
        raise ConfigError(
            f"captured layers after blocks {ids} of {layers} would be read as 0-based layers, ModelOpt's default",
            hint="capture other layers",
        )
    return ids


def _eagle_config(head: Head, boundaries: list[int], layout: Layout) -> dict[str, JSON]:
    config: dict[str, JSON] = {
        "eagle_aux_hidden_state_layer_ids": boundaries,
        "use_aux_hidden_state": True,
    }
    if layout == "modelopt":
        config |= {
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_heads_num_layers": 1,
        }
    if head.method == "p_eagle":
        config["parallel_draft_step"] = 2  # more than one; how many is the runtime's choice
    elif layout == "modelopt":
        config["parallel_draft_step"] = 1
    return config


def _speculators(
    head: Head, layer: dict[str, JSON], extra: dict[str, JSON], boundaries: list[int], target: str | None
) -> dict[str, JSON]:
    three = head.method in THREE
    kind = {"eagle2": "eagle", "p_eagle": "peagle"}.get(head.method, head.method)
    name = {"eagle": "EagleSpeculator", "eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}[kind]
    config: dict[str, JSON] = {
        "architectures": [name],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "torch_dtype": _dtype(head),
        **extra,
    }
    if three:
        config["eagle_aux_hidden_state_layer_ids"] = boundaries
    else:
        config |= {"fusion_bias": "fc.bias" in head, "layernorms": False}
    return config


def _dtype(head: Head) -> str:
    held = head.tensors["fc.weight"].dtype
    return {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}[held.name]
