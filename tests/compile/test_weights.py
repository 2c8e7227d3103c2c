"""The integers that ModelOpt wrote are the integers the kernels read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trtspec.compile.weights import Linear, Weights

RNG = np.random.default_rng(0)


def folder(into: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, into / "model.safetensors")
    return into


def int8(outputs: int, inputs: int, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    weight = torch.from_numpy(RNG.integers(-127, 128, (outputs, inputs)).astype(np.int8))
    return {"weight": weight, "weight_scale": torch.rand(outputs) * 0.02 + 0.001, **extra}


def int4(outputs: int, inputs: int, block: int, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    packed = torch.from_numpy(RNG.integers(0, 256, (outputs // 2, inputs)).astype(np.uint8))
    scales = torch.rand(outputs, inputs // block) * 0.02 + 0.001
    return {"weight": packed, "weight_scale": scales, **extra}


def named(**modules: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{m}.{part}": tensor for m, parts in modules.items() for part, tensor in parts.items()}


def kernel_value(linear: Linear) -> np.ndarray:
    """float32 [outputs, inputs]: what `MatMulNBits` multiplies by, from its documented packing."""
    values = linear.weight
    if linear.bits == 4:
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(linear.outputs, -1, linear.block_size)
    offset = 1 << (linear.bits - 1)
    blocks = (values.astype(np.float32) - offset) * linear.scales[..., None]
    return blocks.reshape(linear.outputs, linear.inputs)


def test_int8_channels_keep_their_integers(tmp_path: Path) -> None:
    parts = named(q_proj=int8(8, 128), k_proj=int8(4, 128))
    weights = Weights(folder(tmp_path, {**parts, "lm_head.weight": torch.zeros(1, 1)}))
    linear = weights.linear(["q_proj", "k_proj"])
    assert (linear.bits, linear.block_size, linear.outputs, linear.inputs) == (8, 64, 12, 128)
    expected = np.concatenate([weights.dense(f"{m}_proj.weight") for m in "qk"])
    np.testing.assert_array_equal(kernel_value(linear), expected)
    assert weights.summary() == "2 projections: 2 8-bit"
    assert weights.least_rows == 1


@pytest.mark.parametrize(("inputs", "block"), [(96, 32), (48, 16)])
def test_int8_takes_a_block_that_divides_the_width(tmp_path: Path, inputs: int, block: int) -> None:
    weights = Weights(folder(tmp_path, named(o_proj=int8(8, inputs))))
    linear = weights.linear(["o_proj"])
    assert linear.block_size == block
    np.testing.assert_array_equal(kernel_value(linear), weights.dense("o_proj.weight"))


def test_a_width_no_block_divides_runs_dequantized(tmp_path: Path) -> None:
    weights = Weights(folder(tmp_path, named(o_proj=int8(8, 24))))
    linear = weights.linear(["o_proj"])
    assert linear.bits == 32
    np.testing.assert_array_equal(linear.weight, weights.dense("o_proj.weight"))
    assert weights.summary() == "1 projections: 1 float32"


@pytest.mark.parametrize("block", [32, 64])
def test_int4_blocks_keep_their_integers(tmp_path: Path, block: int) -> None:
    scale = torch.rand(128) + 0.5
    tensors = named(down_proj=int4(8, 128, block, pre_quant_scale=scale))
    weights = Weights(folder(tmp_path, {**tensors, "lm_head.weight": torch.zeros(1, 1)}))
    linear = weights.linear(["down_proj"])
    assert (linear.bits, linear.block_size) == (4, block)
    np.testing.assert_array_equal(linear.input_scale, scale.numpy())
    np.testing.assert_array_equal(
        kernel_value(linear) * linear.input_scale, weights.dense("down_proj.weight")
    )
    # with blocks of 64 one row and several round differently, so a step must have two
    assert weights.least_rows == (1 if block == 32 else 2)


def test_projections_that_share_an_input_but_not_a_format_run_dequantized(tmp_path: Path) -> None:
    other = {"weight": torch.randn(4, 128)}
    weights = Weights(folder(tmp_path, named(q_proj=int8(8, 128), k_proj=other)))
    linear = weights.linear(["q_proj", "k_proj"])
    assert linear.bits == 32
    expected = np.concatenate([weights.dense("q_proj.weight"), other["weight"].numpy()])
    np.testing.assert_array_equal(linear.weight, expected)
    assert weights.least_rows == 2


def test_input_scales_that_differ_are_multiplied_into_the_weights(tmp_path: Path) -> None:
    scales = {m: torch.rand(128) + 0.5 for m in "qk"}
    parts = {f"{m}_proj": int8(8, 128, pre_quant_scale=scales[m]) for m in "qk"}
    linear = Weights(folder(tmp_path, named(**parts))).linear(["q_proj", "k_proj"])
    assert linear.bits == 32 and linear.input_scale is None
    raw = parts["k_proj"]["weight"].float() * parts["k_proj"]["weight_scale"][:, None]
    np.testing.assert_allclose(linear.weight[8:], (raw * scales["k"]).numpy(), rtol=1e-6)


def test_biases_are_concatenated_with_their_projections(tmp_path: Path) -> None:
    biases = {m: torch.randn(n) for m, n in (("q", 8), ("k", 4))}
    parts = named(q_proj=int8(8, 64, bias=biases["q"]), k_proj=int8(4, 64, bias=biases["k"]))
    linear = Weights(folder(tmp_path, parts)).linear(["q_proj", "k_proj"])
    np.testing.assert_array_equal(linear.bias, torch.cat([biases["q"], biases["k"]]).numpy())
