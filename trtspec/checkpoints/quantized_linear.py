"""Reading the weights of an exported folder back: packed where a kernel wants integers, or as float32.

How ModelOpt's unified Hugging Face export stores one Linear of [out, in], by kind:

| kind | weight | weight_scale | weight_scale_2 | value |
|---|---|---|---|---|
| float | BF16, F16 or F32 [out, in] | – | – | as stored |
| int8_channel | I8 [out, in] | F32 [out] | – | q · s[o] |
| int4_block | U8 [out/2, in]: byte (r, i) holds out 2r in its low half, 2r+1 in its high half, two's complement | F32 [out, in/b] | – (W4A8: F32 scalar) | q · s[o, i/b] |
| fp8 | F8_E4M3 [out, in] | F32 scalar | – | q · s |
| nvfp4 | U8 [out, in/2]: byte (o, c) holds in 2c in its low half, 2c+1 in its high half, E2M1 | F8_E4M3 [out, in/16] | F32 scalar | q · s[o, i/16] · s2 |

`pre_quant_scale` [in] (AWQ, SmoothQuant) multiplies the *input* of the Linear; where it is absent in an AWQ
export it was folded into the norm before. The second scale of W4A8 is the FP8 grid a kernel may use inside;
the value it approximates is still q · s.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.errors import StageFailed

Kind = Literal["float", "int8_channel", "int4_block", "fp8", "nvfp4"]

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """One Linear's weight, unpacked but not multiplied out.

    weight: [out, in]; int8 for int8_channel and int4_block (−8..7), float32 otherwise (for fp8 and nvfp4 the
    values on the 8- or 4-bit grid). scales: float32; [out] for int8_channel, [out, in / block_size] for
    int4_block and nvfp4 (its second scale multiplied in), [1] for fp8, None for float.
    pre_quant_scale: float32 [in], multiplies the input. input_scale: the static activation scale of a kernel
    that quantizes inputs; None where inputs stay at 16 bits.
    """

    kind: Kind
    weight: np.ndarray
    scales: np.ndarray | None = None
    block_size: int | None = None
    pre_quant_scale: np.ndarray | None = None
    input_scale: float | None = None

    def dequantized(self) -> np.ndarray:
        """float32 [out, in], without `pre_quant_scale`."""
        if self.kind == "float":
            return self.weight
        weight = self.weight.astype(np.float32)
        if self.kind == "fp8":
            return weight * self.scales
        if self.kind == "int8_channel":
            return weight * self.scales[:, None]
        outputs, inputs = weight.shape
        blocks = weight.reshape(outputs, -1, self.block_size) * self.scales[..., None]
        return blocks.reshape(outputs, inputs)


def read_linear(source: Path | TensorFolder, name: str) -> QuantizedLinear:
    """The Linear called `name` ("model.layers.0.mlp.up_proj") of an exported folder.

    Pass an open `TensorFolder` to read many. A tied head has no tensors of its own: ask for the embedding.
    SetupError for a missing tensor, StageFailed for a layout this reader does not know.
    """
    tensors = source if isinstance(source, TensorFolder) else TensorFolder(source)
    stored = tensors.info(f"{name}.weight")
    weight = tensors.array(f"{name}.weight")

    def optional(part: str) -> np.ndarray | None:
        return tensors.array(f"{name}.{part}") if f"{name}.{part}" in tensors else None

    scale, second = optional("weight_scale"), optional("weight_scale_2")
    pre_quant_scale, input_scale = optional("pre_quant_scale"), optional("input_scale")
    inputs = {
        "pre_quant_scale": pre_quant_scale,
        "input_scale": None if input_scale is None else float(input_scale),
    }
    if stored.dtype in _FLOATS and scale is None:
        return QuantizedLinear("float", weight, **inputs)
    if scale is None:
        raise StageFailed(
            f"{name}.weight is {stored.dtype} but has no weight_scale", where=str(tensors.folder)
        )
    if stored.dtype == "F8_E4M3" and scale.size == 1:
        return QuantizedLinear("fp8", weight, scale.reshape(1), **inputs)
    if stored.dtype == "I8" and scale.ndim == 1:
        return QuantizedLinear("int8_channel", weight, scale, **inputs)
    if stored.dtype == "U8" and scale.ndim == 2:
        if tensors.info(f"{name}.weight_scale").dtype == "F8_E4M3" and second is not None:
            unpacked = E2M1_VALUES[_halves(weight, axis=1)]
            block = unpacked.shape[1] // scale.shape[1]
            return QuantizedLinear("nvfp4", unpacked, scale * second, block, **inputs)
        unpacked = _halves(weight, axis=0).astype(np.int8)
        unpacked = np.where(unpacked > 7, unpacked - 16, unpacked).astype(np.int8)
        return QuantizedLinear("int4_block", unpacked, scale, unpacked.shape[1] // scale.shape[1], **inputs)
    raise StageFailed(
        f"{name}: weight {stored.dtype} {list(stored.shape)} with weight_scale {list(scale.shape)} "
        "is no layout this version reads",
        where=str(tensors.folder),
    )


def _halves(packed: np.ndarray, axis: int) -> np.ndarray:
    """uint8 4-bit values of packed bytes, low half first, `axis` twice as long."""
    pair = np.stack([packed & 15, packed >> 4], axis=axis + 1)
    shape = list(packed.shape)
    shape[axis] *= 2
    return pair.reshape(shape)
