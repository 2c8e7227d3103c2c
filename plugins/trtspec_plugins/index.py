"""Records of compiled kernels: what a launcher must know, and where the PTX lies."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMPILED = Path(__file__).parent / "compiled"
_VERSION = 1  # of index.json

Constants = tuple[tuple[str, int | float], ...]
Types = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One PTX file. parameters: `pointer` or `i32` for each, in order. threads: of a block, all along x.

    shared_bytes: dynamic shared memory of a launch. spill_bytes: stored by spills, per thread. instruction: the
    matrix instruction it multiplies with, None for kernels without one. default: whether it is the tactic to use
    unless another was measured to be faster. key: hash of what it was compiled from.
    """

    name: str
    kernel: str
    arch: str
    entry: str
    parameters: tuple[str, ...]
    types: Types
    constants: Constants
    threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    instruction: str | None
    ptx_version: int
    triton: str
    file: str
    sha256: str
    default: bool
    key: str

    def ptx(self, folder: Path = COMPILED) -> str:
        """The PTX text. Raises ValueError where the file is not the one the index was written for."""
        text = gzip.decompress((folder / self.file).read_bytes())
        if hashlib.sha256(text).hexdigest() != self.sha256:
            raise ValueError(f"{folder / self.file} is not what index.json describes: compile it again")
        return text.decode()


def read(folder: Path = COMPILED) -> tuple[CompiledKernel, ...]:
    """Every record of a folder. Raises FileNotFoundError without an index, ValueError for another version of it."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    if index["version"] != _VERSION:
        raise ValueError(
            f"{folder / 'index.json'} has version {index['version']}, this package reads {_VERSION}"
        )
    return tuple(_record(entry) for entry in index["kernels"])


def write(folder: Path, records: Iterable[CompiledKernel]) -> None:
    """Write index.json, sorted by name, in one step. Of records with one name the last counts."""
    by_name = {record.name: asdict(record) for record in records}
    index = {"version": _VERSION, "kernels": [by_name[name] for name in sorted(by_name)]}
    partial = folder / "index.json.partial"
    partial.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / "index.json")


def find(
    records: Iterable[CompiledKernel],
    kernel: str,
    arch: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
) -> tuple[CompiledKernel, ...]:
    """Records of a kernel on an architecture whose types and constants agree with the given ones.

    Several remain where more than one tile was compiled: a launcher's tactics.
    """
    return tuple(
        record
        for record in records
        if record.kernel == kernel
        and record.arch == arch
        and types.items() <= dict(record.types).items()
        and constants.items() <= dict(record.constants).items()
    )


def _record(entry: dict[str, Any]) -> CompiledKernel:
    lists = {"parameters": tuple(entry["parameters"])}
    pairs = {name: tuple((key, value) for key, value in entry[name]) for name in ("types", "constants")}
    return CompiledKernel(**{**entry, **lists, **pairs})
