"""Files written so that a kill at any moment leaves the old content or the new, never a mixture."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from trtspec.errors import SetupError

JSON = None | bool | int | float | str | list["JSON"] | Mapping[str, "JSON"]

_CHUNK_BYTES = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOLCK}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def canonical_json(value: JSON) -> str:
    """One spelling per value: sorted keys, no spaces, NaN refused (ValueError). What is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def pretty_json(value: JSON) -> str:
    """The spelling for people, as deterministic: sorted keys, two spaces, a final newline."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sha256_json(value: JSON) -> str:
    """Hex digest of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, links to files included, by POSIX name; links to folders are not entered."""
    found = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    yield from sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` every file and folder below `folder`, and `folder` itself."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not os.path.islink(os.path.join(place, name)):
                sync(Path(place, name))
        sync(Path(place))


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's whole content in one step; its folder must exist."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_folder(new: Path, target: Path) -> None:
    """Put folder `new` in the place of `target`; what was at `target` is deleted.

    Both must lie on one filesystem. Where the kernel can exchange two names (Linux, most filesystems)
    `target` exists at every moment; elsewhere it is missing for the time between two renames.
    """
    if not target.exists():
        os.rename(new, target)
    elif _exchange(new, target):
        remove_tree(new)
    else:
        old = target.with_name(f".{target.name}.replaced")
        remove_tree(old)
        os.rename(target, old)
        os.rename(new, target)
        remove_tree(old)
    sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def remove_tree(folder: Path) -> None:
    """Delete a folder if it is there."""
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file (the content, when it is a link), or copy it with its times where that fails."""
    source = source.resolve(strict=True)
    try:
        os.link(source, target)
    except OSError as error:
        # Another filesystem, too many links, or a filesystem or container that forbids hard links.
        if error.errno not in (
            errno.EXDEV,
            errno.EMLINK,
            errno.EPERM,
            errno.EACCES,
            errno.ENOTSUP,
            errno.ENOSYS,
        ):
            raise
        shutil.copy2(source, target)


def setup_error(error: OSError, place: Path) -> SetupError | None:
    """The failure in the reader's words when `place` is full or may not be written; None for any other."""
    where = str(error.filename or place)
    if error.errno in _FULL:
        return SetupError(
            f"no space left on the disk that holds {place}",
            where=where,
            hint="free space there, or choose a larger disk with TRTSPEC_CACHE (or --out), and try again",
        )
    if error.errno in _FORBIDDEN and Path(where).is_relative_to(place):
        return SetupError(
            f"may not write in {place}: {os.strerror(error.errno)}",
            where=where,
            hint="fix that folder's owner or mode, or choose another with TRTSPEC_CACHE (or --out)",
        )
    return None


def free_bytes(place: Path) -> int:
    """Bytes free for an unprivileged writer on the disk that holds `place` (or will, once it is made)."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
