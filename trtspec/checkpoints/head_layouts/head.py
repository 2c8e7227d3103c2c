"""A trained draft head in memory, in one form for every published layout.

*Head* is what is trained to draft for one target: EAGLE's autoregressive layer, MTP modules, Medusa's and Hydra's
output heads, DFlash's block denoiser. The layouts (one module each beside this one) read a folder into a `Head` and
write a `Head` back; everything else in trtspec sees this form only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.safetensors_header import read_folder
from trtspec.errors import ConfigError
from trtspec.files import JSON

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# Safetensors dtype ↔ the numpy type that holds its bits. uint16 is a view of bfloat16.
_HELD = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype("?"),
}
_STORED = {held: stored for stored, held in _HELD.items()}


@dataclass(frozen=True, slots=True)
class Head:
    """One draft head.

    method: its mechanism, as in a config. config: architecture numbers under the names Hugging Face gives them
    (`hidden_size`, `num_attention_heads`, `head_dim`, `rope_theta`, …) and the mechanism's own (`draft_vocab_size`,
    `target_hidden_size`, `medusa_num_heads`, `block_size`, …); what they are is said by the layout's module.
    captured_layers: 0-based layers of the target whose output it reads, empty where it reads the last normed state.
    d2t: int64 [draft vocabulary], target id = draft id + d2t[draft id]; None where the two vocabularies are one.
    tensors: by canonical name (said by the layout's module), bits as stored: float32, float16, or uint16 that views
    bfloat16. A tensor that is absent is the target's (embedding, output layer) or an option that is off.
    """

    method: str
    config: Mapping[str, JSON]
    captured_layers: tuple[int, ...]
    d2t: npt.NDArray[np.int64] | None
    tensors: Mapping[str, np.ndarray]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """Values of a tensor, widened to float32. Raises KeyError where the head does not have it."""
        return widened(self.tensors[name])

    @property
    def parameters(self) -> int:
        """Elements of all its weights."""
        return sum(tensor.size for tensor in self.tensors.values())


def widened(array: np.ndarray) -> npt.NDArray[np.float32]:
    """float32 values of a tensor that holds float32, float16 or the bits of bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of bfloat16, rounded to nearest even (as PyTorch does); the values must be finite."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a head's folder by its stored name, bits as stored.

    Raises ConfigError where there are none, or where one has a dtype that no unquantized head has.
    """
    found = read_folder(folder)
    if not found:
        raise ConfigError("the head's folder holds no .safetensors weights", where=str(folder))
    tensors = {}
    for name, info in found.items():
        if info.dtype not in _HELD:
            raise ConfigError(
                f"{name} is stored as {info.dtype}: a quantized head is not read here",
                where=str(info.file),
                hint="name the head as it was before quantization",
            )
        stored = np.fromfile(info.file, _HELD[info.dtype], info.elements, offset=info.offset)
        tensors[name] = stored.reshape(info.shape)
    return tensors


def write_folder(folder: Path, config: Mapping[str, JSON], tensors: Mapping[str, np.ndarray]) -> None:
    """Write `config.json` and `model.safetensors` into `folder`, which is made if need be.

    The same head gives the same bytes. The format's own library is not asked: it knows no bfloat16 without PyTorch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        array = tensors[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _STORED[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name]).tobytes())


def check_tensors(
    tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise ConfigError where `tensors` are not those of `shapes`: missing, unknown, misshapen or not finite."""
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ConfigError(f"the head lacks {_some(missing)}", where=where)
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise ConfigError(
            f"the head has tensors its layout does not know: {_some(unknown)}",
            where=where,
            hint="they would change what it computes and are not left out silently",
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}", where=where
            )
        if not _finite(tensors[name]):
            raise ConfigError(f"{name} holds values that are not finite", where=where)


def check_trained(tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Raise ConfigError for weights that nobody can have trained: a matrix of one value, or a fresh initialisation.

    A fresh one has every norm at 1 and all projections spread alike, or alike but for the width of their input.
    """
    tables = ("embed_tokens.weight", "lm_head.weight")
    matrices = {name: widened(t) for name, t in tensors.items() if t.ndim == 2 and name not in tables}
    spread = {name: float(matrix.std()) for name, matrix in matrices.items()}
    if constant := sorted(name for name, std in spread.items() if std == 0):
        raise ConfigError(f"{_some(constant)} holds one value everywhere: it was never loaded", where=where)
    gains = [widened(t) for name, t in tensors.items() if t.ndim == 1 and "norm" in name]
    by_width = [std * matrices[name].shape[1] ** 0.5 for name, std in spread.items()]
    alike = any(max(stds) < 1.05 * min(stds) for stds in (list(spread.values()), by_width))
    if len(spread) > 3 and alike and all((gain == 1).all() for gain in gains):
        raise ConfigError(
            "the head looks freshly initialised: every norm is 1 and all its projections are spread alike",
            where=where,
            hint="it would draft at random; name the folder of the trained one",
        )


def _finite(array: np.ndarray) -> bool:
    if array.dtype == np.uint16:  # bfloat16: all bits of the exponent set
        return not ((array & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(array).all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
