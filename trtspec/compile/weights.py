"""A model folder's weights, as the graph wants them: what ModelOpt quantized stays quantized where a kernel exists.

| stored as | runs as |
|---|---|
| 16 or 32 bits | float32 product |
| INT8 per channel | `MatMulNBits`, 8 bits: the same integers, the channel's scale repeated for each block |
| INT4 blocks | `MatMulNBits`, 4 bits: the same integers and scales |
| FP8, NVFP4 | dequantized here, float32 product |

A pre-quantization scale (AWQ, SmoothQuant) multiplies the product's input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trtspec.checkpoints.quantized_linear import QuantizedLinear, read_linear
from trtspec.checkpoints.safetensors_files import TensorFolder

_CHANNEL_BLOCKS = (64, 32, 16)  # of MatMulNBits for one scale a channel; the fastest kernel first
# Block sizes at which MatMulNBits gives one row the same bits as several; float32 products promise it nowhere.
_ONE_ROW_BLOCKS = {8: (16, 32, 64), 4: (16, 32)}
_EMBEDDING = "model.embed_tokens.weight"
_BITS = {"int8_channel": 8, "int4_block": 4}


@dataclass(frozen=True, slots=True)
class Linear:
    """y = (x · input_scale) Wᵀ + bias, with W [outputs, inputs].

    bits 32: weight float32 [outputs, inputs]. bits 8 or 4: weight uint8 [outputs, blocks, bytes of a block], offset
    by 2^(bits−1), two values a byte (low half first) at 4 bits; scales float32 [outputs, blocks].
    """

    weight: np.ndarray
    outputs: int
    inputs: int
    bits: int = 32
    block_size: int = 0
    scales: np.ndarray | None = None
    bias: np.ndarray | None = None
    input_scale: np.ndarray | None = None


class Weights:
    """Reads the tensors of `folder` one at a time; remembers which kernels it handed weights to."""

    def __init__(self, folder: Path) -> None:
        self._tensors = TensorFolder(folder)
        self._kernels: Counter[str] = Counter()
        self._least_rows = 2 if self.shares_head else 1

    def array(self, name: str) -> np.ndarray:
        """A stored 16- or 32-bit tensor as float32."""
        return self._tensors.array(name)

    @property
    def shares_head(self) -> bool:
        """Whether the head has no tensor of its own and is the embedding."""
        return "lm_head.weight" not in self._tensors

    def embedding(self) -> np.ndarray:
        """float32 [V, H]."""
        return self.array(_EMBEDDING)

    def linear(self, modules: Sequence[str]) -> Linear:
        """The projections `modules`, which read the same input, as one; rows in their order."""
        parts = [read_linear(self._tensors, module) for module in modules]
        first = parts[0]
        alike = all(_layout(part) == _layout(first) for part in parts) and all(
            _same(part.pre_quant_scale, first.pre_quant_scale) for part in parts
        )
        packed = packed_linear(parts) if alike and first.kind in _BITS else None
        linear = packed or _dense(parts)
        if linear.block_size not in _ONE_ROW_BLOCKS.get(linear.bits, ()):
            self._least_rows = 2
        self._kernels[f"{linear.bits}-bit" if packed else "float32"] += len(parts)
        biases = [bias for m in modules if (bias := self.bias(m)) is not None]
        return replace(linear, bias=np.concatenate(biases)) if biases else linear

    def stored(self, module: str) -> QuantizedLinear:
        """A projection as it is stored, for graphs that hold it in that form. Not counted by `summary`."""
        return read_linear(self._tensors, module)

    def bias(self, module: str) -> np.ndarray | None:
        """float32 [out], None where the folder has none."""
        return self.array(f"{module}.bias") if f"{module}.bias" in self._tensors else None

    def dense(self, parameter: str) -> np.ndarray:
        """float32 value of a PyTorch parameter by its name: dequantized, its input scale multiplied in."""
        if parameter == "lm_head.weight" and self.shares_head:
            return self.embedding()
        if parameter.endswith("_proj.weight") or parameter == "lm_head.weight":
            return _dense([read_linear(self._tensors, parameter.removesuffix(".weight"))]).weight
        return self.array(parameter)

    @property
    def least_rows(self) -> int:
        """See `EngineInfo.least_rows`; complete once every weight has been read."""
        return self._least_rows

    def summary(self) -> str:
        """One line on what the kernels read, such as "211 projections: 210 8-bit, 1 float32"."""
        counts = ", ".join(f"{count} {kernel}" for kernel, count in self._kernels.most_common())
        return f"{self._kernels.total()} projections: {counts}"


def _layout(part: QuantizedLinear) -> tuple[str, int | None, int]:
    return part.kind, part.block_size, part.weight.shape[1]


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _dense(parts: Sequence[QuantizedLinear]) -> Linear:
    weights = [
        part.dequantized() if part.pre_quant_scale is None else part.dequantized() * part.pre_quant_scale
        for part in parts
    ]
    weight = np.concatenate(weights)
    return Linear(weight, *weight.shape)


def packed_linear(parts: Sequence[QuantizedLinear]) -> Linear | None:
    """For `MatMulNBits`; None where its blocks cannot express the stored scales."""
    first = parts[0]
    weight = np.concatenate([part.weight for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    outputs, inputs = weight.shape
    bits = _BITS[first.kind]
    if first.kind == "int8_channel":
        block = next((size for size in _CHANNEL_BLOCKS if inputs % size == 0), None)
        if block is None:
            return None
        scales = np.repeat(scales[:, None], inputs // block, axis=1)
    else:
        block = first.block_size
        if block < 16 or block & (block - 1):
            return None
    raised = (weight.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8).reshape(outputs, -1, block)
    if bits == 4:
        raised = raised[..., 0::2] | raised[..., 1::2] << 4
    return Linear(
        raised, outputs, inputs, bits, block, scales.astype(np.float32), input_scale=first.pre_quant_scale
    )
