"""What must stop a quantization, and what must be left alone: every one of these was shipped by somebody."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.quantize.tiny_llama import write_model
from trtspec.checkpoints.quantized_linear import read_linear
from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.errors import ConfigError, PlanInfeasible, SetupError, StageFailed
from trtspec.quantize import QuantizeRequest, quantize


def test_perplexity_above_the_limit_stops_the_build_with_the_numbers(tiny, run):
    with pytest.raises(StageFailed) as caught:
        run(tiny, "int4_awq", max_perplexity_increase=-0.5)
    assert "int4_awq raises perplexity" in caught.value.message and "-50.0%" in caught.value.message
    assert "int8_weight_only or fp8" in caught.value.hint
    assert "max_perplexity_increase: " in caught.value.hint


def test_an_untied_head_is_quantized_when_asked_and_kept_when_not(tmp_path, run):
    model = write_model(tmp_path, tied=False)
    report, folder = run(model, "int8_weight_only", quantize_lm_head=True)
    assert TensorFolder(folder).info("lm_head.weight").dtype == "I8"
    assert not any("untied" in note for note in report.notes)
    report, folder = run(model, "int8_weight_only")
    assert TensorFolder(folder).info("lm_head.weight").dtype == "BF16"
    assert next(m for m in report.modules if m.name == "lm_head").reason == "kept by default"


def test_a_tied_head_that_is_not_quantized_stays_tied(tiny, run):
    _, folder = run(tiny, "int8_weight_only")
    assert "lm_head.weight" not in TensorFolder(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_does_not_say_whether_the_head_is_tied_is_decided_by_the_tensors(tmp_path, run, tied):
    model = write_model(tmp_path, tied=tied)
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    report, folder = run(model, "int8_weight_only")
    assert any("does not say" in note for note in report.notes)
    assert ("lm_head.weight" in TensorFolder(folder)) == (not tied)
    assert report.perplexity_increase < 0.05


def test_an_exclude_pattern_keeps_its_modules_at_16_bits_and_in_the_label(tiny, run):
    report, folder = run(tiny, "int8_weight_only", exclude=("*.down_proj",))
    kept = [m.name for m in report.modules if m.reason == "excluded by the request"]
    assert kept == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert read_linear(folder, kept[0]).kind == "float"
    assert read_linear(folder, "model.layers.0.mlp.up_proj").kind == "int8_channel"


def test_an_exclude_pattern_that_matches_nothing_is_an_error(tiny, run):
    with pytest.raises(ConfigError, match="language_model"):
        run(tiny, "int8_weight_only", exclude=("model.language_model.layers.0.*",))


def test_a_width_no_block_divides_stays_at_16_bits_and_is_listed(tmp_path, run):
    model = write_model(tmp_path, intermediate=88)
    report, folder = run(model, "nvfp4")
    assert read_linear(folder, "model.layers.0.mlp.down_proj").kind == "float"
    assert read_linear(folder, "model.layers.0.mlp.up_proj").kind == "nvfp4"
    assert any("down_proj (88)" in note for note in report.notes)


def test_a_head_with_an_odd_vocabulary_cannot_be_packed_to_int4(tmp_path, run):
    model = write_model(tmp_path, vocab=259)
    with pytest.raises(PlanInfeasible, match="lm_head"):
        run(model, "int4_weight_only", quantize_lm_head=True)
    run(model, "int8_weight_only", quantize_lm_head=True)


def test_a_dead_output_row_is_no_fault(tmp_path, run):
    def padding_row(model):
        model.get_input_embeddings().weight[-1] = 0

    model = write_model(tmp_path, edit=padding_row)
    _, folder = run(model, "int8_weight_only", quantize_lm_head=True)
    assert not read_linear(folder, "lm_head").dequantized()[-1].any()


def test_weights_that_are_not_finite_are_named(tmp_path, run):
    def break_one(model):
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")

    with pytest.raises(StageFailed, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        run(write_model(tmp_path, edit=break_one), "fp8")


def test_activations_that_overflow_are_named_by_the_module_they_reach(tmp_path, run):
    def overflow(model):
        model.model.layers[0].mlp.gate_proj.weight.fill_(3e38)
        model.model.layers[0].mlp.up_proj.weight.fill_(3e38)

    with pytest.raises(StageFailed, match=r"model\.layers\.0\.mlp\.down_proj"):
        run(write_model(tmp_path, edit=overflow), "fp8")


def test_a_quantized_model_is_not_quantized_twice(tiny, run):
    _, folder = run(tiny, "int8_weight_only")
    with pytest.raises(PlanInfeasible, match="W8A16"):
        run(folder, "fp8")


def test_weights_the_config_asks_for_and_the_files_lack_are_an_error(tmp_path, run):
    model = write_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(StageFailed, match=r"layers\.2"):
        run(model, "int8_weight_only")


def test_a_model_without_a_tokenizer_is_refused_with_what_to_add(tmp_path, run):
    model = write_model(tmp_path)
    for path in model.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(SetupError) as caught:
        run(model, "int8_weight_only")
    assert "tokenizer.json" in caught.value.hint


def test_none_links_the_model_and_measures_nothing(tiny, run):
    report, folder = run(tiny, "none")
    assert report.perplexity_before is None and report.modules == ()
    linked, original = folder / "model.safetensors", tiny / "model.safetensors"
    assert linked.read_bytes() == original.read_bytes()
    assert not linked.is_symlink()


def test_a_folder_that_is_not_empty_is_never_written_into(tiny, tmp_path):
    (tmp_path / "old").write_text("x")
    with pytest.raises(StageFailed):
        quantize(QuantizeRequest(tiny, "none"), tmp_path)


def test_gqa_biases_survive(tmp_path, run):
    def bias(model):
        model.model.layers[0].self_attn.q_proj.bias.fill_(0.5)

    _, folder = run(write_model(tmp_path, edit=bias, attention_bias=True), "int4_awq")
    assert np.allclose(TensorFolder(folder).array("model.layers.0.self_attn.q_proj.bias"), 0.5)
