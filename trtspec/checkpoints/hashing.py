"""SHA-256 of model files, remembered by (size, mtime, inode): naming a model by its content stays cheap."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trtspec.events import Emit, Progress, silent
from trtspec.files import sha256_file, write_atomic


@dataclass(frozen=True, slots=True)
class FileHash:
    """One file: `name` inside its folder, lower-case hex `sha256`, size in `bytes`."""

    name: str
    sha256: str
    bytes: int


def hash_files(paths: Iterable[Path], cache: Path, emit: Emit = silent) -> tuple[FileHash, ...]:
    """Hashes of `paths`, files of one folder, sorted by name.

    A file whose size, mtime (ns) and inode equal those of an earlier call is not read again. The memory lies
    under `cache`; when it cannot be written the hashes are merely computed each time.
    """
    paths = sorted(paths)
    if not paths:
        return ()
    folder = str(paths[0].parent.resolve())
    memory = cache / "hashes" / f"{hashlib.sha256(folder.encode()).hexdigest()[:24]}.json"
    known: dict[str, dict] = {}
    with contextlib.suppress(
        OSError, ValueError
    ):  # no memory yet, or one that is no JSON: both mean "hash again"
        known = json.loads(memory.read_text())
    total = sum(path.stat().st_size for path in paths)
    hashes, entries, done = [], dict(known), 0
    for path in paths:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = known.get(path.name)
        if entry is None or entry["stamp"] != stamp:
            entry = {"stamp": stamp, "sha256": sha256_file(path)}
            emit(Progress("model", "hash files", done + stat.st_size, total, "B"))
        done += stat.st_size
        entries[path.name] = entry
        hashes.append(FileHash(path.name, entry["sha256"], stat.st_size))
    if entries != known:
        with contextlib.suppress(OSError):  # a read-only cache only costs time
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(memory, json.dumps(entries))
    return tuple(hashes)
