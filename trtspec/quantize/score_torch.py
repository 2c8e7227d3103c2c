"""Perplexity of a model folder as a runtime would see it: from its files, quantized or not, in the same way.

A quantized export is rebuilt from its tensors (`dequantize`), not from the model that produced it, so what is
measured is what ships. Where the format quantizes inputs or the KV cache, the same rounding is applied here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trtspec.checkpoints.hf_folder import quiet_transformers
from trtspec.checkpoints.quantized_linear import QuantizedLinear, read_linear
from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.errors import PlanInfeasible
from trtspec.events import Emit, Progress
from trtspec.quantize.nvfp4_torch import nvfp4_round

_FLOAT32_UP_TO = 3_000_000_000  # parameters; above, bfloat16 keeps the memory in bounds
_E4M3_MAX = 448.0
_KV_ATTENTION = "trtspec_fp8_kv"
_SIDE_TENSORS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Score:
    """losses: mean negative log-likelihood per predicted token of each text; tokens: predicted in all."""

    losses: tuple[float, ...]
    tokens: int
    perplexity: float


def scoring_dtype(folder: Path) -> torch.dtype:
    """float32, or bfloat16 for a 16-bit model too large for that; decided once and used before and after."""
    parameters = TensorFolder(folder).total_bytes // 2
    return torch.float32 if parameters <= _FLOAT32_UP_TO else torch.bfloat16


def perplexity(
    folder: Path,
    texts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    emit: Emit,
    task: str,
    *,
    trust_remote_code: bool = False,
) -> Score:
    """Score token id lists of at least two ids. The first id of each is context only."""
    model = load_for_scoring(folder, dtype, trust_remote_code)
    losses, counts = [], []
    emit(Progress("quantize", task, 0, len(texts), "text"))
    for index, ids in enumerate(texts):
        losses.append(text_loss(model, ids))
        counts.append(len(ids) - 1)
        emit(Progress("quantize", task, index + 1, len(texts), "text"))
    total = sum(counts)
    mean = sum(loss * count for loss, count in zip(losses, counts)) / total
    return Score(tuple(losses), total, math.exp(mean) if mean < 700 else math.inf)


def text_loss(model: nn.Module, ids: Sequence[int]) -> float:
    """Mean negative log-likelihood of ids[1:], natural logarithm."""
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[0, :-1].float()
        return float(nn.functional.cross_entropy(logits, tokens[0, 1:]))


def load_for_scoring(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """The model of a folder with every quantized Linear dequantized and its input and KV rounding attached.

    PlanInfeasible when transformers itself has no causal language model of that type.
    """
    tensors = TensorFolder(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    architecture = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if architecture is None:
        raise PlanInfeasible(
            f"{config.model_type} is no causal language model that transformers brings, so it is not quantized here",
            where=str(folder / "config.json"),
            hint="use `quantization: none`, or a model that is quantized already",
        )
    config.__dict__.pop("quantization_config", None)
    state, linears = _dequantized_state(tensors, dtype)
    kv = {name: float(tensors.array(name)) for name in tensors if name.endswith((".k_scale", ".v_scale"))}
    with quiet_transformers():
        model = architecture.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    model.eval()
    if torch.cuda.is_available():
        model.cuda()
    algo = _quant_algo(folder)
    for name, linear in linears.items():
        _attach_input_rounding(model.get_submodule(name), linear, algo)
    if kv:
        _attach_kv_rounding(model, kv)
    return model


def _dequantized_state(
    tensors: TensorFolder, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, QuantizedLinear]]:
    """Parameters in `dtype`, and the quantized Linears by name without their weights: how their inputs flow."""
    state, linears = {}, {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part in _SIDE_TENSORS:
            continue
        if part == "weight" and f"{module}.weight_scale" in tensors:
            linear = read_linear(tensors, module)
            array = linear.dequantized()
            linears[module] = replace(linear, weight=np.empty(0), scales=None)
        else:
            array = tensors.array(name)
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return state, linears


def _quant_algo(folder: Path) -> str | None:
    path = folder / "hf_quant_config.json"
    return json.loads(path.read_text())["quantization"].get("quant_algo") if path.is_file() else None


def _attach_input_rounding(module: nn.Module, linear: QuantizedLinear, algo: str | None) -> None:
    """Scale and round what flows into `module` as the format's kernel does."""
    smooth = None if linear.pre_quant_scale is None else torch.from_numpy(linear.pre_quant_scale.copy())
    if smooth is None and linear.input_scale is None:
        return

    def before(_module: nn.Module, inputs: tuple) -> tuple:
        x = inputs[0]
        if smooth is not None:
            x = x * smooth.to(x)
        if (scale := linear.input_scale) is not None:
            if algo == "NVFP4":
                x = nvfp4_round(x, linear.block_size, scale)
            elif linear.kind == "int8_channel":
                x = (x / scale).round().clamp(-128, 127) * scale
            else:
                x = _e4m3_round(x, scale)
        return (x, *inputs[1:])

    module.register_forward_pre_hook(before)


def _e4m3_round(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _attach_kv_rounding(model: nn.Module, scales: dict[str, float]) -> None:
    """Round keys (after the rotary embedding) and values to FP8 with the exported scales."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs
    ):
        key, value = _e4m3_round(key, module.fp8_k_scale), _e4m3_round(value, module.fp8_v_scale)
        return attend(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_KV_ATTENTION, attention)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
        _KV_ATTENTION, transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    for name, scale in scales.items():
        projection, _, kind = name.rpartition(".")
        attention_module = model.get_submodule(projection.rpartition(".")[0])
        setattr(attention_module, f"fp8_{kind}", scale)
    model.set_attn_implementation(_KV_ATTENTION)
