"""What ModelOpt exports for each format, read back by our own reader and held against ModelOpt's own arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from trtspec.checkpoints.quantized_linear import read_linear
from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.quantize import FORMATS, QuantizeReport, QuantizeRequest, quantize
from trtspec.quantize.verify import verify_export

NAMES = [name for name in FORMATS if name != "none"]
KINDS = {"fp8": "fp8", "nvfp4": "nvfp4", "w4a16_nvfp4": "nvfp4"} | {
    "int8_weight_only": "int8_channel", "int8_smoothquant": "int8_channel",
    "int4_weight_only": "int4_block", "int4_awq": "int4_block", "w4a8_awq": "int4_block",
}  # fmt: skip


@dataclass
class Exported:
    report: QuantizeReport
    folder: Path
    fake_quantized: dict[str, np.ndarray]  # module → float32 [out, in] as ModelOpt simulates it
    events: list
    printed: str


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """exported(format) → one quantization with the head, kept for the module, and ModelOpt's view of it."""
    made: dict[str, Exported] = {}

    def export(name: str) -> Exported:
        if name not in made:
            made[name] = _export(tiny, name, tmp_path_factory.mktemp(name))
        return made[name]

    return export


def _export(model: Path, name: str, into: Path) -> Exported:
    import contextlib
    import io

    import torch
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    from trtspec.quantize import ptq_torch

    fake: dict[str, np.ndarray] = {}
    real_export = ptq_torch.export_hf_checkpoint

    def record_then_export(module, **options):
        requantize_resmooth_fused_llm_layers(
            module
        )  # what the exporter does first; doing it twice is harmless
        for path, linear in module.named_modules():
            if isinstance(linear, torch.nn.Linear) and linear.weight_quantizer.is_enabled:
                quantizer = linear.weight_quantizer
                if name == "w4a8_awq":  # without its second stage, which is the kernel's FP8 grid
                    quantizer = quantizer[0]
                fake[path] = quantizer(linear.weight.float()).float().numpy()
        real_export(module, **options)

    request = QuantizeRequest(
        model, name, quantize_lm_head=True, kv_cache="fp8", calibration_samples=4, calibration_tokens=64,
        max_perplexity_increase=10.0,
    )  # fmt: skip
    events: list = []
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(ptq_torch, "export_hf_checkpoint", record_then_export)
        report = quantize(request, into, events.append)
    return Exported(report, into, fake, events, out.getvalue())


@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_equal_what_modelopt_simulated(exported, name):
    found = exported(name)
    assert len(found.fake_quantized) == 2 * 7 + 1
    tensors = TensorFolder(found.folder)
    for module, expected in found.fake_quantized.items():
        linear = read_linear(tensors, module)
        assert linear.kind == KINDS[name]
        actual = linear.dequantized()
        assert actual.dtype == np.float32 and actual.shape == expected.shape
        difference = np.abs(actual - expected)
        # A weight in the middle between two grid points may land on either, because simulation and export order
        # their divisions differently: rare for integers, one in 16 for FP8, whose export divides in bfloat16.
        if linear.kind == "fp8":
            grid_step = np.abs(expected) / 7
        else:
            rows, width = expected.shape
            grid_step = np.repeat(linear.scales.reshape(rows, -1), linear.block_size or width, axis=1)
        assert (difference <= grid_step * 1.001 + 1e-6).all()
        assert (difference > 1e-6).mean() < (0.08 if linear.kind == "fp8" else 0.003)


@pytest.mark.parametrize("name", NAMES)
def test_label_blocks_and_modules_are_reported_as_they_are(exported, name):
    found = exported(name)
    label = json.loads((found.folder / "hf_quant_config.json").read_text())["quantization"]
    chosen = FORMATS[name]
    assert label["quant_algo"] == chosen.quant_algo == found.report.quant_algo
    assert label["kv_cache_quant_algo"] == "FP8"
    assert label.get("group_size") == found.report.block_size
    assert found.report.block_size == (None if chosen.block_size is None else min(chosen.block_size, 64))
    assert {module.format for module in found.report.modules} == {chosen.quant_algo}
    linear = read_linear(found.folder, "model.layers.1.mlp.down_proj")
    assert linear.block_size == found.report.block_size
    assert (linear.input_scale is not None) == (chosen.activations != "none")


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_head_is_untied_and_quantized(exported, name):
    found = exported(name)
    assert found.report.lm_head_quantized
    assert json.loads((found.folder / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = TensorFolder(found.folder)
    assert tensors.info("model.embed_tokens.weight").dtype == "BF16"
    assert tensors.info("lm_head.weight").dtype in ("I8", "U8", "F8_E4M3")
    head, embedding = read_linear(tensors, "lm_head"), tensors.array("model.embed_tokens.weight")
    smooth = 1.0 if head.pre_quant_scale is None else head.pre_quant_scale
    assert np.abs(head.dequantized() * smooth - embedding).max() < 0.2 * np.abs(embedding).max()
    assert any("untied" in note for note in found.report.notes)


@pytest.mark.parametrize("name", NAMES)
def test_perplexity_is_measured_from_the_files(exported, name):
    report = exported(name).report
    assert report.perplexity_after == pytest.approx(
        report.perplexity_before * (1 + report.perplexity_increase)
    )
    assert report.perplexity_after != report.perplexity_before
    assert report.heldout_tokens > 6000
    assert report.export_difference < 0.01


@pytest.mark.parametrize("name", ["int8_weight_only", "int4_awq"])
def test_the_folder_is_complete_and_stdout_stays_empty(exported, name):
    found = exported(name)
    files = {path.name for path in found.folder.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"} <= files
    assert json.loads((found.folder / "quantization_report.json").read_text())["format"] == name
    config = json.loads((found.folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == "bfloat16"
    assert found.printed == ""
    tasks = {getattr(event, "task", None) for event in found.events}
    assert {"perplexity before", "calibrate", "export", "perplexity after"} <= tasks


def test_kv_rounding_is_part_of_what_is_measured(tiny, run):
    report, folder = run(tiny, "none", kv_cache="fp8")
    assert report.perplexity_after != report.perplexity_before
    scales = [name for name in TensorFolder(folder) if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 4
    assert report.quant_algo is None and not any(m.format != "16-bit" for m in report.modules)


def test_the_export_is_the_same_bytes_for_the_same_seed_and_not_for_another(tiny, run):
    def contents(seed: int) -> dict[str, bytes]:
        _, folder = run(tiny, "fp8", seed=seed)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first = contents(0)
    assert contents(0) == first
    assert contents(1)["model.safetensors"] != first["model.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_an_export_passes_its_own_checks_without_knowing_the_plan(exported, name):
    verify_export(exported(name).folder)
