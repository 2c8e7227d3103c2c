"""Draft against target: what must be refused, what is accepted with a word, and what the words say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.conftest import LLAMA
from tests.checkpoints.test_heads import EAGLE3, layer
from trtspec.checkpoints.facts import ArchitectureFacts, facts_from
from trtspec.checkpoints.heads import HeadFacts, read_head
from trtspec.checkpoints.pairing import captured_layers, check_draft_model, check_head, last_draft_length
from trtspec.errors import ConfigError

Make = Callable[..., Path]


def target(**keys: Any) -> ArchitectureFacts:
    small = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 12,
    }
    return facts_from(LLAMA | small | {"num_hidden_layers": 36} | keys, "target/config.json")


def words(found: Any) -> str:
    return " | ".join(f.text for f in found[0])


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(16, 12), (12, 16)])
def test_padding_alone_does_not_part_a_pair(target_rows: int, draft_rows: int) -> None:
    found = check_draft_model(
        target(vocab_size=target_rows), target(vocab_size=draft_rows), target_tokens=10, draft_tokens=10
    )
    assert [f.level for f in found] == ["note"]
    assert "rows from 10 on are padding, never proposed or emitted" in found[0].text


def test_sizes_alone_prove_nothing_and_different_tokenizers_are_refused() -> None:
    found = check_draft_model(target(vocab_size=16), target(vocab_size=12))
    assert found[0].level == "warning"
    assert "do not prove" in found[0].text
    with pytest.raises(ConfigError, match="9 entries, the target's 10"):
        check_draft_model(target(vocab_size=12), target(vocab_size=12), target_tokens=10, draft_tokens=9)


def test_foreign_token_ids_of_a_head_are_ignored(folder: Make) -> None:
    """A template copied from another family: ids past the head's own vocabulary."""
    head = read_head(folder(EAGLE3 | {"bos_token_id": 14, "eos_token_id": 15}))
    found = check_head(target(eos_token_id=[10, 11]), head)
    assert "[14, 15] outside its own vocabulary of 12: ignored" in words(found)
    inside = read_head(folder(EAGLE3 | {"eos_token_id": 3}))
    assert "the target's are used" in words(check_head(target(eos_token_id=[10, 11]), inside))


def test_a_head_with_a_shorter_context(folder: Make) -> None:
    head = read_head(folder(EAGLE3 | {"max_position_embeddings": 8}))
    assert "no draft position reaches 8" in words(check_head(target(max_position_embeddings=64), head))
    assert last_draft_length(10, 8, 3) == 0
    assert last_draft_length(6, 8, 3) == 2
    assert last_draft_length(1, 8, 3) == 3


def test_lost_rope_scaling_is_said(folder: Make) -> None:
    scaled = target(
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    )
    said = words(check_head(scaled, read_head(folder(EAGLE3 | {"rope_theta": 10000.0}))))
    assert "the head's RoPE differs from the target's beyond position 8192" in said


def test_rope_in_two_spellings_is_one_schedule(folder: Make) -> None:
    new = target(
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    old = EAGLE3 | {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    }
    assert "RoPE differs" not in words(check_head(new, read_head(folder(old))))


def test_an_unknown_rope_is_refused(folder: Make) -> None:
    head = read_head(folder(EAGLE3 | {"rope_scaling": {"rope_type": "foo", "factor": 2.0}}))
    with pytest.raises(ConfigError, match="rope_type 'foo'"):
        check_head(target(), head)


WIDE = EAGLE3 | {"hidden_size": 6, "num_attention_heads": 1, "head_dim": 6}


def wide_head(folder: Make, fc: int, *, embedding: bool, ids: list[int] | None = None) -> HeadFacts:
    tensors = layer(0, 12, heads=1, head_dim=6, hidden=6) | {"fc.weight": ("BF16", [6, fc])}
    if embedding:
        tensors["embed_tokens.weight"] = ("BF16", [12, 6])
    config = WIDE | ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {})
    return read_head(folder(config, tensors))


def test_a_head_of_another_width_needs_its_own_embedding(folder: Make) -> None:
    big = target(hidden_size=8)
    own = wide_head(folder, 24, embedding=True)
    assert own.own_embedding is True
    check_head(big, own)
    with pytest.raises(ConfigError, match=r"6 wide, the target 8.*cannot share"):
        check_head(big, wide_head(folder, 24, embedding=False))


def test_the_fusing_layer_takes_every_captured_layer(folder: Make) -> None:
    big = target(hidden_size=8)
    check_head(big, wide_head(folder, 40, embedding=True, ids=[2, 9, 17, 25, 33]))
    with pytest.raises(ConfigError, match=r"fc takes 40 inputs, 3 captured layers of width 8 give 24"):
        check_head(big, wide_head(folder, 40, embedding=True))


def test_captured_layer_numbering() -> None:
    """[24, 30, 36] on 36 layers counts finished blocks; TensorRT-LLM wants the layers [23, 29, 35]."""
    found = captured_layers([24, 30, 36], 36)
    assert (found.zero_based, found.boundaries, found.convention) == ((23, 29, 35), (24, 30, 36), "boundary")
    assert "eagle3_layers_to_capture [23, 29, 35]" in found.describe()
    with pytest.raises(ConfigError, match="37 > 36"):
        captured_layers([25, 31, 37], 36)
    default = captured_layers(None, 36)
    assert (default.boundaries, default.zero_based, default.convention) == (
        (2, 18, 33),
        (1, 17, 32),
        "default",
    )


def test_dflash_ids_are_zero_based_and_equal_shifted_eagle_ids() -> None:
    assert captured_layers([1, 9, 17], 36, "dflash").boundaries == captured_layers([2, 10, 18], 36).boundaries
    assert captured_layers([1, 46, 90], 94).convention == "zero_based"  # the training frameworks' default set
    with pytest.raises(ConfigError):
        captured_layers([1, 36], 36, "dflash")


def test_captured_recurrent_layers_are_said(folder: Make) -> None:
    kinds = ["linear_attention", "full_attention"] * 18
    hybrid = target(layer_types=kinds)
    said = words(check_head(hybrid, read_head(folder(EAGLE3))))
    assert "captured layers [32] are recurrent layers" in said


def test_a_head_made_for_another_depth_is_refused(folder: Make) -> None:
    config = {name: v for name, v in EAGLE3.items() if name != "architectures"}
    head = read_head(
        folder(
            config | {"dflash_config": {"target_layer_ids": [1]}, "block_size": 4, "num_target_layers": 28}
        )
    )
    with pytest.raises(ConfigError, match="28 layers, this one has 36"):
        check_head(target(), head)


def test_both_dtypes_are_stated(folder: Make) -> None:
    fp8 = target(quantization_config={"quant_method": "fp8"})
    assert "target weights FP8, head weights bfloat16" in words(
        check_head(fp8, read_head(folder(EAGLE3, layer(0, 8))))
    )
