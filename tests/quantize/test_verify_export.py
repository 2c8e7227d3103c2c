"""An export whose label and tensors disagree is caught by reading the tensors back."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trtspec.errors import StageFailed
from trtspec.quantize import QuantizeRequest, quantize
from trtspec.quantize.verify import can_verify, verify_export

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def fp8_export(tiny, tmp_path_factory) -> Path:
    into = tmp_path_factory.mktemp("fp8")
    quantize(QuantizeRequest(tiny, "fp8", kv_cache="fp8", calibration_samples=2, calibration_tokens=32), into)
    return into


def _changed(export: Path, into: Path, change: Callable[[dict], object]) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(export, into, dirs_exist_ok=True)
    tensors = load_file(into / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors")
    return into


def _relabelled(export: Path, into: Path, **changes: object) -> Path:
    shutil.copytree(export, into, dirs_exist_ok=True)
    label = json.loads((into / "hf_quant_config.json").read_text())
    label["quantization"] |= changes
    (into / "hf_quant_config.json").write_text(json.dumps(label))
    return into


def test_a_sound_export_passes(fp8_export):
    verify_export(fp8_export, quantized=[Q_PROJ], kept=["lm_head"], kv_cache="FP8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.input_scale"), "no input_scale"),
        (lambda t: t[f"{Q_PROJ}.input_scale"].zero_(), "input_scale is not finite and positive"),
        (lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(float("nan")), "weight_scale is not finite"),
        (lambda t: t[f"{Q_PROJ}.weight_scale"].neg_(), "weight_scale is not finite and positive"),
        (lambda t: t.update({f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"].bfloat16()}), "is BF16, FP8 stores"),
        (lambda t: t["model.norm.weight"].fill_(float("inf")), "model.norm.weight holds values"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.k_scale"), "no k_scale"),
        (lambda t: t["model.layers.1.self_attn.k_proj.k_scale"].zero_(), "k_scale is not finite"),
        (
            lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].float()}),
            "must be 16 bits",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight_scale": t[f"{Q_PROJ}.weight_scale"].clone()}),
            "exclude_modules lists",
        ),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_a_broken_tensor_is_named(fp8_export, tmp_path, change, message):
    folder = _changed(fp8_export, tmp_path, change)
    with pytest.raises(StageFailed, match=message):
        verify_export(folder)


def test_a_module_the_plan_quantizes_and_the_export_did_not(fp8_export):
    with pytest.raises(StageFailed, match="lm_head was not quantized"):
        verify_export(fp8_export, quantized=["lm_head"])


def test_a_module_the_plan_keeps_and_the_export_quantized(fp8_export):
    with pytest.raises(StageFailed, match=f"{Q_PROJ} is quantized"):
        verify_export(fp8_export, quantized=[], kept=[Q_PROJ])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"quant_algo": "W8A16"}, "W8A16 stores I8"),
        ({"quant_algo": None}, "quant_algo is None"),
        ({"kv_cache_quant_algo": None}, "KV cache is labelled None"),
        ({"exclude_modules": ["model.layers.0.*"]}, "although exclude_modules"),
        ({"exclude_modules": ["lm_head", "mtp.fc"]}, "'mtp.fc' matches no module"),
    ],
)
def test_a_false_label_is_caught(fp8_export, tmp_path, label, message):
    folder = _relabelled(fp8_export, tmp_path, **label)
    with pytest.raises(StageFailed, match=message):
        verify_export(folder, quantized=[])


@pytest.mark.parametrize(
    ("config", "label"),
    [("INT8_DEFAULT_CFG", "W8A8_SQ_PER_CHANNEL"), ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "W4A16_AWQ")],
)
def test_plain_rounding_that_modelopt_labels_as_smoothed_is_caught(tiny, tmp_path, config, label):
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    from trtspec.quantize.ptq_torch import load_model

    model, _ = load_model(tiny)
    settings = copy.deepcopy(getattr(mtq, config))
    for entry in settings["quant_cfg"]:
        if "block_sizes" in (entry.get("cfg") or {}):
            entry["cfg"]["block_sizes"][-1] = 64
    with torch.inference_mode():
        mtq.quantize(model, settings, lambda module: module(torch.arange(2, 60)[None]))
        export_hf_checkpoint(model, export_dir=tmp_path)
    assert json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == label
    with pytest.raises(StageFailed, match="no pre_quant_scale"):
        verify_export(tmp_path)


def test_a_format_of_another_exporter_is_left_to_its_server(fp8_export, tmp_path):
    assert can_verify(fp8_export)
    assert not can_verify(_relabelled(fp8_export, tmp_path, quant_algo="MIXED_PRECISION"))
