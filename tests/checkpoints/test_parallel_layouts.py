"""Medusa, Hydra, DFlash and DSpark heads as they are published: read, written back, refused with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_parallel_heads import HIDDEN, hydra_head, medusa_head, random_tensors
from trtspec.checkpoints import heads
from trtspec.checkpoints.head_layouts import dflash, hydra, medusa
from trtspec.checkpoints.head_layouts.head import Head, to_bfloat16, write_folder
from trtspec.errors import ConfigError

DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": 9,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 6], "causal": False},
}
MARKOV = {"projector_type": "dspark", "markov_rank": 4, "use_confidence_head": True, "shift_label": True}


def dflash_head(*, markov: str | None = None, bfloat16: bool = False) -> Head:
    """A random head."""
    config = dict(DFLASH)
    if markov:
        config["dflash_config"] = {**DFLASH["dflash_config"], **MARKOV, "markov_head_type": markov}
    head = Head("dspark" if markov else "dflash", config, (1, 6), None, {})
    tensors = random_tensors(dflash.dflash_shapes(dflash.numbers_of(head, "test"), 2), seed=3)
    if bfloat16:
        tensors = {name: to_bfloat16(array) for name, array in tensors.items()}
    return Head(head.method, config, head.captured_layers, None, tensors)


HEADS = {
    "medusa": (medusa, medusa_head(heads=2, layers=2)),
    "medusa-no-blocks": (medusa, medusa_head(heads=2, layers=0)),
    "hydra": (hydra, hydra_head(heads=3, layers=2)),
    "dflash": (dflash, dflash_head()),
    "dflash-bfloat16": (dflash, dflash_head(bfloat16=True)),
    "dspark": (dflash, dflash_head(markov="vanilla")),
    "dspark-gated": (dflash, dflash_head(markov="gated")),
    "dspark-rnn": (dflash, dflash_head(markov="rnn")),
}


def same(one: Head, other: Head) -> bool:
    return (
        (one.method, dict(one.config), one.captured_layers)
        == (other.method, dict(other.config), other.captured_layers)
        and one.tensors.keys() == other.tensors.keys()
        and all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
        and all(one.tensors[name].dtype == other.tensors[name].dtype for name in one.tensors)
    )


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_read_as_it_was_written_and_written_again_alike(kind: str, tmp_path: Path) -> None:
    layout, head = HEADS[kind]
    layout.write_head(head, tmp_path / "one")
    read = layout.read_head(tmp_path / "one")
    assert same(read, head)
    layout.write_head(read, tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("kind", HEADS)
def test_inspection_says_what_the_head_is(kind: str, tmp_path: Path) -> None:
    layout, head = HEADS[kind]
    layout.write_head(head, tmp_path)
    facts = heads.read_head(tmp_path)
    assert facts.method == head.method
    limits = {"medusa": 2, "hydra": 3, "dflash": 7, "dspark": 8}
    assert facts.draft_limit == limits[head.method]
    if head.method in ("medusa", "hydra"):
        assert facts.medusa_layers == (0 if kind == "medusa-no-blocks" else 2)
    else:
        assert facts.captured == (1, 6)
    assert facts.parameters == head.parameters


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads.", "medusa_lm_head."])
def test_medusa_s_other_spellings_and_a_whole_target_beside_them(prefix: str, tmp_path: Path) -> None:
    head = medusa_head(heads=2)
    stored = {f"{prefix}{name}": array for name, array in head.tensors.items()}
    stored["model.layers.0.mlp.up_proj.weight"] = np.zeros((4, 4), np.float32)
    stored["lm_head.weight"] = np.zeros((4, 4), np.float32)
    # ModelOpt's export, and a config that says fewer heads than there are
    config = {"architectures": ["MedusaLlamaForCausalLM"], "medusa": {"num_medusa_heads": 1}}
    write_folder(tmp_path, config, stored)
    read = medusa.read_head(tmp_path)
    assert read.tensors.keys() == head.tensors.keys()
    assert (read.config["medusa_num_heads"], read.config["medusa_num_layers"]) == (2, 1)


def test_hydra_heads_saved_with_dropout_layers(tmp_path: Path) -> None:
    head = hydra_head(heads=2, layers=2)
    moved = {}
    for name, array in head.tensors.items():
        parts = name.split(".")
        if parts[0] == "hydra_mlp":
            parts[2] = str(2 * int(parts[2]) + 1)
        else:
            parts.insert(2, "1")
        moved["hydra_head." + ".".join(parts)] = array
    write_folder(tmp_path, {"hydra_num_heads": 2}, moved)
    read = hydra.read_head(tmp_path)
    assert all(np.array_equal(read.tensors[name], head.tensors[name]) for name in head.tensors)


def test_dspark_s_nested_markov_tensors(tmp_path: Path) -> None:
    head = dflash_head(markov="gated")
    nested = {
        f"markov_head.{name}" if name.startswith(("markov", "gate")) else name: array
        for name, array in head.tensors.items()
    }
    write_folder(tmp_path, head.config, nested)
    assert same(dflash.read_head(tmp_path), head)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def refusal(layout: Any, head: Head, **change: Any) -> str:
        tensors = dict(head.tensors)
        for name, array in change.pop("tensors", {}).items():
            if array is None:
                del tensors[name]
            else:
                tensors[name] = array
        write_folder(tmp_path, {**head.config, **change}, tensors)
        with pytest.raises(ConfigError) as caught:
            layout.read_head(tmp_path)
        return caught.value.message

    bias, weight = "0.0.linear.bias", "1.0.linear.weight"
    nan = np.full(HIDDEN, np.nan, np.float32)
    head = medusa_head(heads=2)
    assert refusal(medusa, head, tensors={bias: None}) == f"the head lacks {bias}"
    assert refusal(medusa, head, tensors={bias: nan}) == f"{bias} holds values that are not finite"
    assert refusal(medusa, head, tensors={"0.1.bias": nan}).endswith("its layout does not know: 0.1.bias")
    assert refusal(medusa, head, tensors={weight: np.zeros((4, HIDDEN), np.float32)}) == (
        f"{weight} has shape [4, {HIDDEN}], expected [{HIDDEN}, {HIDDEN}]"
    )
    plain = np.zeros((HIDDEN, HIDDEN), np.float32)
    ungrounded = {"hydra_mlp.0.0.linear.weight": plain}
    assert f"expected [{HIDDEN}, {2 * HIDDEN}]" in refusal(hydra, hydra_head(), tensors=ungrounded)
    prefix = {"prefix_embeding_layer.norm.weight": plain}
    assert "prefix layer of Hydra++" in refusal(hydra, hydra_head(), tensors=prefix)
    assert "expected [32, 96]" in refusal(
        dflash, dflash_head(), dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 4, 6]}
    )
    assert "does not name the target layers" in refusal(
        dflash, dflash_head(), dflash_config={"mask_token_id": 7}
    )
    outside = {"mask_token_id": 60, "target_layer_ids": [1, 6]}
    assert "mask_token_id is 60" in refusal(dflash, dflash_head(), dflash_config=outside)
    sink = {**DFLASH["dflash_config"], "attention_sink_bias": True}
    assert "attention sinks" in refusal(dflash, dflash_head(), dflash_config=sink)
    infinite = np.full(32, 0x7F80, np.uint16)
    half = dflash_head(bfloat16=True)
    assert "norm.weight holds values" in refusal(dflash, half, tensors={"norm.weight": infinite})
