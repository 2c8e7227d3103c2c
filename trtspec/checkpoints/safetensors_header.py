"""Tensor names, dtypes and shapes of safetensors files, read from their headers without any package.

A safetensors file begins with a little-endian u64 header length and a JSON object
`{name: {dtype, shape, data_offsets}}`; nothing but that is read here, except for the small integer tensors
(`d2t`, `t2d`) whose values decide whether a draft head fits its target.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoints.json_file import read_json_object
from trtspec.errors import ConfigError

_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8.0),
    **dict.fromkeys(("F32", "I32", "U32"), 4.0),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2.0),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1.0),
    **dict.fromkeys(("F4", "F4_E2M1"), 0.5),
}
_ARRAY_CODES = {
    "I64": "q",
    "U64": "Q",
    "I32": "i",
    "U32": "I",
    "I16": "h",
    "U16": "H",
    "I8": "b",
    "U8": "B",
    "BOOL": "B",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. dtype: safetensors' name (BF16, F8_E4M3, I64, …). offset: bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of elements as stored (packed formats hold several weights in one)."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises ConfigError where the header is broken, cut off or lies about its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(
                "not a safetensors file: the header does not fit into it",
                where=str(file),
                hint="the download may be cut off, or the file is a Git LFS pointer",
            )
        text = stream.read(length)
    try:
        entries = json.loads(text)
        return {
            name: _tensor(name, entry, file, 8 + length, size)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"broken safetensors header: {error}", where=str(file)) from None


def read_folder(folder: Path) -> dict[str, TensorInfo] | None:
    """All tensors of a model folder, None where it holds no safetensors.

    With an index, exactly the files it names are read; raises ConfigError where one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError("holds no weight_map", where=str(index))
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if len(missing) == len(files):
            return None  # configuration and index only: facts come from the configuration
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(files)} weight files are missing: {missing[0]} …", where=str(index)
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(file))
    return tensors


def read_integers(tensor: TensorInfo) -> list[int]:
    """The values of a small integer or bool tensor, flat. Raises ConfigError for other dtypes."""
    code = _ARRAY_CODES.get(tensor.dtype)
    if code is None:
        raise ConfigError(f"{tensor.name} is {tensor.dtype}, expected integers", where=str(tensor.file))
    values = array(code)
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        values.frombytes(stream.read(tensor.nbytes))
    return values.tolist()


def _tensor(name: str, entry: Mapping[str, Any], file: Path, base: int, file_size: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    info = TensorInfo(name, dtype, shape, file, base + begin, end - begin)
    if begin < 0 or end < begin or base + end > file_size:
        raise ValueError(f"{name} reaches past the end of the file")
    expected = _ITEM_BYTES.get(dtype)
    if expected is not None and round(info.elements * expected) != end - begin:
        raise ValueError(f"{name}: {dtype} {list(shape)} does not take {end - begin} bytes")
    return info
