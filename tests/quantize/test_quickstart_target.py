"""The real model, quantized by the quickstart build."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trtspec.checkpoints.quantized_linear import read_linear
from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.quantize.verify import verify_export

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def target(quickstart_build):
    return quickstart_build / "target"


def test_int8_loses_under_two_percent_and_the_export_is_what_was_measured(target):
    report = json.loads((target / "quantization_report.json").read_text())
    assert report["format"] == "int8_weight_only" and report["quant_algo"] == "W8A16"
    assert 0 < report["perplexity_increase"] < 0.02
    assert report["heldout_tokens"] >= 6000
    assert report["export_difference"] < 0.01


def test_all_211_products_are_integers_and_the_embedding_is_not(target):
    verify_export(target)
    tensors = TensorFolder(target)
    quantized = [name for name in tensors if name.endswith(".weight_scale")]
    assert len(quantized) == 30 * 7 + 1
    assert tensors.info("model.embed_tokens.weight").dtype == "BF16"


def test_the_untied_head_is_the_embedding_within_half_a_step_of_its_grid(target):
    tensors = TensorFolder(target)
    head = read_linear(tensors, "lm_head")
    assert head.kind == "int8_channel"
    error = np.abs(head.dequantized() - tensors.array("model.embed_tokens.weight"))
    assert (error <= 0.5001 * head.scales[:, None]).all()
