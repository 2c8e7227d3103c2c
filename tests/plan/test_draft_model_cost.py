"""What a draft model costs: its own bytes in its own format, of which the output layer is most when it is small."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.conftest import LLAMA_8B
from trtspec.checkpoints.facts import ArchitectureFacts, facts_from
from trtspec.plan.deployment import deploy
from trtspec.plan.devices import load_device
from trtspec.plan.drafting import drafter_for

SMOL: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
TABLE = 576 * 49152


def smol(layers: int) -> ArchitectureFacts:
    return facts_from(LLAMA_8B | SMOL | {"num_hidden_layers": layers}, f"{layers}/config.json")


def read_bytes(quantization: str, lm_head: bool) -> float:
    on = deploy(smol(30), load_device("cpu"), backend="onnxruntime", quantization=quantization)
    drafter = drafter_for("draft_model", on, smol(4), quantization=quantization, quantize_lm_head=lm_head)
    return drafter.bytes


def test_a_quantized_output_layer_is_a_quarter_of_its_float32_bytes():
    kept, quantized = read_bytes("int8_weight_only", False), read_bytes("int8_weight_only", True)
    assert kept - quantized == pytest.approx(3 * TABLE, rel=0.05)  # but for scales


def test_an_unquantized_draft_keeps_its_output_layer_whatever_the_target_does():
    assert read_bytes("none", True) == read_bytes("none", False)
