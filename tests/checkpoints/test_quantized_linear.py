"""Packed layouts, spelled out by hand: which half of which byte is which weight."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from trtspec.checkpoints.quantized_linear import read_linear
from trtspec.checkpoints.safetensors_files import TensorFolder, e4m3_values
from trtspec.errors import SetupError, StageFailed


def write(folder: Path, **tensors: tuple[str, np.ndarray]) -> Path:
    """A safetensors file of (dtype, raw array) under the module name "m"."""
    header, body = {}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[f"m.{name}"] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


def test_e4m3_equals_torch_for_every_byte():
    import torch

    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)


def test_bfloat16_and_float16_are_widened(tmp_path):
    bits = np.array([0x3F80, 0xC000, 0x0000, 0x7F80], "<u2")
    folder = write(tmp_path, a=("BF16", bits), b=("F16", np.array([1.5, -2], np.float16)))
    tensors = TensorFolder(folder)
    np.testing.assert_array_equal(tensors.array("m.a"), np.array([1, -2, 0, np.inf], np.float32))
    np.testing.assert_array_equal(tensors.array("m.b"), np.array([1.5, -2], np.float32))


def test_int4_packs_two_outputs_into_a_byte_low_half_first(tmp_path):
    packed = np.array([[0x1F, 0x80]], np.uint8)  # out 0: 0xF = -1, 0; out 1: 1, 0x8 = -8
    scales = np.array([[2.0], [0.5]], np.float32)
    linear = read_linear(write(tmp_path, weight=("U8", packed), weight_scale=("F32", scales)), "m")
    assert (linear.kind, linear.block_size, linear.weight.dtype) == ("int4_block", 2, np.int8)
    np.testing.assert_array_equal(linear.weight, [[-1, 0], [1, -8]])
    np.testing.assert_array_equal(linear.dequantized(), [[-2, 0], [0.5, -4]])


def test_int4_scales_cover_their_own_block(tmp_path):
    packed = np.full((1, 4), 0x11, np.uint8)
    scales = np.array([[1, 2], [3, 4]], np.float32)
    linear = read_linear(write(tmp_path, weight=("U8", packed), weight_scale=("F32", scales)), "m")
    np.testing.assert_array_equal(linear.dequantized(), [[1, 1, 2, 2], [3, 3, 4, 4]])


def test_nvfp4_packs_two_inputs_into_a_byte_and_has_two_scales(tmp_path):
    packed = np.zeros((1, 8), np.uint8)
    packed[0, 0] = 0x7A  # in 0: 0xA = -1.0, in 1: 0x7 = 6.0
    linear = read_linear(
        write(
            tmp_path,
            weight=("U8", packed),
            weight_scale=("F8_E4M3", np.array([[0x40]], np.uint8)),  # 2.0
            weight_scale_2=("F32", np.array(0.25, np.float32)),
        ),
        "m",
    )
    assert (linear.kind, linear.block_size) == ("nvfp4", 16)
    np.testing.assert_array_equal(linear.dequantized()[0, :3], [-0.5, 3, 0])


def test_int8_has_one_scale_per_output_and_carries_the_input_scales(tmp_path):
    linear = read_linear(
        write(
            tmp_path,
            weight=("I8", np.array([[1, -2], [3, 127]], np.int8)),
            weight_scale=("F32", np.array([0.5, 2], np.float32)),
            pre_quant_scale=("BF16", np.array([0x3F80, 0x4000], "<u2")),
            input_scale=("F32", np.array(0.125, np.float32)),
        ),
        "m",
    )
    np.testing.assert_array_equal(linear.dequantized(), [[0.5, -1], [6, 254]])
    np.testing.assert_array_equal(linear.pre_quant_scale, [1, 2])
    assert linear.input_scale == 0.125


def test_packed_weights_without_a_scale_are_not_taken_for_numbers(tmp_path):
    with pytest.raises(StageFailed, match="no weight_scale"):
        read_linear(write(tmp_path, weight=("I8", np.zeros((2, 2), np.int8))), "m")


def test_a_layout_nobody_described_is_refused(tmp_path):
    folder = write(
        tmp_path,
        weight=("U8", np.zeros((2, 2), np.uint8)),
        weight_scale=("F32", np.ones(2, np.float32)),
    )
    with pytest.raises(StageFailed, match="no layout"):
        read_linear(folder, "m")


def test_a_missing_linear_is_named(tmp_path):
    with pytest.raises(SetupError, match=r"no tensor gone\.weight"):
        read_linear(write(tmp_path, weight=("F32", np.zeros((2, 2), np.float32))), "gone")
