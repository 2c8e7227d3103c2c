"""The artifact store: every expensive result is built once and found again by what it depends on.

    ROOT/artifacts/KIND/KEY/artifact.json     what it is: kind, key, and each file's sha256 and size
    ROOT/artifacts/KIND/KEY/seen.json         how the files looked when last hashed (the fast check); its time: last use
    ROOT/artifacts/KIND/KEY/built.json        how long building it took
    ROOT/artifacts/KIND/KEY/files/…           the artifact itself, read-only
    ROOT/partial/KIND-KEY/                    one being built
    ROOT/locks/NAME.lock                      held (flock) by the process that builds; any death frees it
    ROOT/quarantine/KIND-KEY/                 one whose bytes changed after it was published

KEY is the sha256 of the inputs' canonical JSON. A build writes into `partial/`, is synced to disk and appears
under `artifacts/` by one rename: a kill at any moment leaves it absent or whole. A partial folder whose lock
nobody holds belongs to a dead process and is deleted; one whose lock is held is never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtspec.errors import SetupError, TrtspecError
from trtspec.files import (
    JSON,
    files_below,
    free_bytes,
    link_or_copy,
    pretty_json,
    remove_tree,
    replace_folder,
    setup_error,
    sha256_file,
    sha256_json,
    sync_tree,
    write_atomic,
)

_FORMAT = 1
_FULL_BYTES = 1 << 20


def default_root() -> Path:
    """$TRTSPEC_CACHE, or ~/.cache/trtspec ($XDG_CACHE_HOME respected)."""
    if chosen := os.environ.get("TRTSPEC_CACHE"):
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "trtspec"
    except RuntimeError as error:
        hint = "set TRTSPEC_CACHE to a folder that this user may write"
        raise SetupError("this user has no home folder to keep the cache in", hint=hint) from error


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an artifact: POSIX name relative to its folder, hex sha256, size in bytes."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published result. path: its folder; digest: hex sha256 over its files' names and hashes (not over its
    inputs, so equal bytes mean equal digests); key: hex sha256 of its inputs; cached: it was there before."""

    kind: str
    path: Path
    digest: str
    key: str
    files: tuple[StoredFile, ...]
    cached: bool = True

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)


class Store:
    """Artifacts below one folder. Making a `Store` touches nothing; the folder appears with the first build.

    `notify` receives one line of text when something unexpected is worth the reader's attention.
    """

    def __init__(
        self, root: Path | None = None, *, notify: Callable[[str], None] = lambda _text: None
    ) -> None:
        self.root = root or default_root()
        self._notify = notify

    def find(self, kind: str, key: Mapping[str, JSON]) -> Artifact | None:
        """The published and intact artifact for these inputs, or None. Writes nothing."""
        artifact = self._load(kind, sha256_json(key))
        return artifact if artifact and not self.problems(artifact) else None

    def get_or_build(
        self, kind: str, key: Mapping[str, JSON], build: Callable[[Path], None], *, fresh: bool = False
    ) -> Artifact:
        """The artifact for these inputs; `build(empty folder)` makes it when absent, damaged or `fresh`.

        Processes that ask for the same artifact at once build it once; the others wait. A `fresh` result with
        the bytes of the published one leaves that in place; one that differs replaces it, with a notice.
        Raises SetupError when the disk is full or may not be written, and whatever `build` raises.
        """
        digest = sha256_json(key)
        if not fresh and (artifact := self.find(kind, key)):
            self._record_looks(artifact)
            return artifact
        try:
            with self.lock(f"{kind}-{digest}", f"another process is building the same {kind}"):
                if not fresh and (artifact := self._intact(kind, digest)):
                    return artifact
                self.sweep()
                return self._build(kind, digest, key, build)
        except TrtspecError:
            raise
        except OSError as error:
            raise setup_error(error, self.root) or error from error
        except Exception as error:
            # Native writers report a full disk in their own exceptions; the disk itself is the witness.
            if free_bytes(self.root) < _FULL_BYTES:
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))
                raise setup_error(full, self.root) or error from error
            raise

    def problems(self, artifact: Artifact, *, full: bool = False) -> list[str]:
        """What is wrong with an artifact's bytes, one line each; empty when intact. Writes nothing.

        A file whose size, modification time and inode are as recorded is taken as unchanged; any other, and
        with `full` every file, is hashed again.
        """
        seen = _read_json(artifact.path.parent / "seen.json") or {}
        expected = {file.name for file in artifact.files}
        found = {path.relative_to(artifact.path).as_posix() for path in files_below(artifact.path)}
        lines = [f"{name}: not part of the artifact" for name in sorted(found - expected)]
        for file in artifact.files:
            path = artifact.path / file.name
            try:
                if not full and seen.get(file.name) == _look(path):
                    continue
                if path.stat().st_size != file.bytes:
                    lines.append(f"{file.name}: {path.stat().st_size} bytes instead of {file.bytes}")
                elif sha256_file(path) != file.sha256:
                    lines.append(f"{file.name}: content changed (sha256 differs)")
            except FileNotFoundError:
                lines.append(f"{file.name}: missing")
        return lines

    def artifacts(self) -> Iterator[Artifact]:
        """Every published artifact, by kind and key; one whose record is unreadable is skipped."""
        for place in sorted((self.root / "artifacts").glob("*/*/artifact.json")):
            if artifact := self._load(place.parent.parent.name, place.parent.name):
                yield artifact

    def last_seconds(self, kind: str) -> float | None:
        """How long the newest artifact of a kind took to build; None when there is none."""
        records = sorted(
            (self.root / "artifacts" / kind).glob("*/built.json"), key=lambda path: path.stat().st_mtime_ns
        )
        return (_read_json(records[-1]) or {}).get("seconds") if records else None

    def last_use(self, artifact: Artifact) -> float:
        """When a build last took the artifact, in seconds since the epoch."""
        return (artifact.path.parent / "seen.json").stat().st_mtime

    def prune(self, unused_s: float) -> tuple[list[Artifact], int]:
        """Delete every artifact that no build took for `unused_s` seconds, and all that is in quarantine.

        Returns the deleted artifacts and the bytes that became free: a file that a build directory links to stays.
        An artifact that is being built is left alone. Raises SetupError where the store may not be written.
        """
        latest = time.time() - unused_s
        deleted: list[Artifact] = []
        freed = 0
        try:
            for artifact in [one for one in self.artifacts() if self.last_use(one) <= latest]:
                name = f"{artifact.kind}-{artifact.key}"
                with self._try_lock(name) as held:
                    if not held:
                        continue
                    for path in files_below(artifact.path):
                        stat = path.stat()
                        freed += stat.st_size if stat.st_nlink == 1 else 0
                    # Never half an artifact, whenever this is killed: `sweep` deletes the rest.
                    partial = self.root / "partial" / name
                    partial.parent.mkdir(exist_ok=True)
                    os.rename(artifact.path.parent, partial)
                    remove_tree(partial)
                    deleted.append(artifact)
            remove_tree(self.root / "quarantine")
        except OSError as error:
            raise setup_error(error, self.root) or error from error
        return deleted, freed

    def materialize(self, artifact: Artifact, into: Path) -> None:
        """Make folder `into` hold exactly the artifact's files: hard links where possible, else copies.

        An existing `into` is replaced in one step. Raises SetupError when that place cannot be written.
        """
        partial = into.with_name(f".{into.name}.partial")
        try:
            into.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(partial)
            fill(artifact, partial)
            replace_folder(partial, into)
        except OSError as error:
            raise setup_error(error, into) or error from error

    def sweep(self) -> None:
        """Delete the partial folders of dead processes: those whose lock nobody holds."""
        for partial in sorted((self.root / "partial").glob("*")):
            with self._try_lock(partial.name) as held:
                if held:
                    remove_tree(partial)

    @contextmanager
    def lock(self, name: str, reason: str) -> Iterator[None]:
        """Hold the lock `name` among all processes of this machine; who must wait is told `reason`.

        Lock files stay: deleting one would let two processes lock two different files of one name.
        """
        with self._try_lock(name) as held:
            if held:
                yield
                return
        self._notify(f"waiting: {reason}")
        with self._open_lock(name) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        with self._open_lock(name) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _open_lock(self, name: str):
        path = self.root / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a")

    def _load(self, kind: str, digest: str) -> Artifact | None:
        place = self.root / "artifacts" / kind / digest
        record = _read_json(place / "artifact.json")
        if not record or record.get("format") != _FORMAT:
            return None
        files = tuple(StoredFile(f["name"], f["sha256"], f["bytes"]) for f in record["files"])
        return Artifact(kind, place / "files", content_digest(files), digest, files)

    def _intact(self, kind: str, digest: str) -> Artifact | None:
        """The published artifact if its bytes are what was published; a damaged one is put in quarantine."""
        artifact = self._load(kind, digest)
        place = self.root / "artifacts" / kind / digest
        if artifact is None:
            if place.exists():
                self._quarantine(kind, digest, ["artifact.json: missing or unreadable"])
            return None
        if lines := self.problems(artifact):
            self._quarantine(kind, digest, lines)
            return None
        self._record_looks(artifact)
        return artifact

    def _quarantine(self, kind: str, digest: str, lines: list[str]) -> None:
        jail = self.root / "quarantine" / f"{kind}-{digest}"
        jail.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(jail)
        os.rename(self.root / "artifacts" / kind / digest, jail)
        self._notify(
            f"the stored {kind} was damaged and is built again ({'; '.join(lines[:3])}); kept in {jail}"
        )

    def _build(
        self, kind: str, digest: str, key: Mapping[str, JSON], build: Callable[[Path], None]
    ) -> Artifact:
        partial = self.root / "partial" / f"{kind}-{digest}"
        remove_tree(partial)
        folder = partial / "files"
        folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            build(folder)
            files = _seal(folder)
            seconds = round(time.monotonic() - began, 3)
            (partial / "built.json").write_text(pretty_json({"seconds": seconds}), encoding="utf-8")
            record = {
                "format": _FORMAT,
                "kind": kind,
                "inputs": dict(key),
                "files": [_as_json(f) for f in files],
            }
            (partial / "artifact.json").write_text(pretty_json(record), encoding="utf-8")
            (partial / "seen.json").write_text(pretty_json({f.name: _look(folder / f.name) for f in files}))
            sync_tree(partial)
            return self._publish(partial, kind, digest, files)
        finally:
            remove_tree(partial)

    def _publish(self, partial: Path, kind: str, digest: str, files: tuple[StoredFile, ...]) -> Artifact:
        place = self.root / "artifacts" / kind / digest
        place.parent.mkdir(parents=True, exist_ok=True)
        old = self._load(kind, digest)
        if old and old.files == files and not self.problems(old, full=True):
            return Artifact(kind, old.path, old.digest, digest, files, cached=False)
        if old and old.files != files:
            changed = sorted({f.name for f in set(old.files) ^ set(files)})
            self._notify(f"the fresh {kind} differs from the stored one in {', '.join(changed[:5])}")
        replace_folder(partial, place)
        return Artifact(kind, place / "files", content_digest(files), digest, files, cached=False)

    def _record_looks(self, artifact: Artifact) -> None:
        """After a successful check: the artifact is used now, and where files moved (a copied cache) the next check is
        fast again.
        """
        looks = {file.name: _look(artifact.path / file.name) for file in artifact.files}
        place = artifact.path.parent / "seen.json"
        try:
            if _read_json(place) == looks:
                os.utime(place)
            else:
                write_atomic(place, pretty_json(looks))
        except OSError as error:
            # A cache mounted read-only still serves its artifacts; it is only checked the slow way each time.
            if setup_error(error, place) is None:
                raise


def content_digest(files: tuple[StoredFile, ...]) -> str:
    """Hex sha256 over names, hashes and sizes: equal for equal folders."""
    return sha256_json([_as_json(file) for file in files])


def fill(artifact: Artifact, folder: Path) -> None:
    """Hard-link or copy an artifact's files into `folder`, which is created. Raises OSError."""
    folder.mkdir(parents=True)
    for file in artifact.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(artifact.path / file.name, target)


def _seal(folder: Path) -> tuple[StoredFile, ...]:
    """Hash every file of a finished build and make it read-only.

    A file with other names (hard-linked from the user's model folder) keeps its mode, which is the user's.
    """
    files = []
    for path in files_below(folder):
        if not path.exists():
            raise SetupError(f"a stage left a link to nothing: {path.name}", where=str(path))
        stat = path.stat()
        files.append(StoredFile(path.relative_to(folder).as_posix(), sha256_file(path), stat.st_size))
        if stat.st_nlink == 1 and not path.is_symlink():
            path.chmod(0o555 if stat.st_mode & 0o111 else 0o444)
    return tuple(files)


def _look(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _as_json(file: StoredFile) -> dict[str, JSON]:
    return {"name": file.name, "sha256": file.sha256, "bytes": file.bytes}


def _read_json(path: Path) -> dict | None:
    """The object a JSON file holds, or None when it is missing or not whole (both mean: not published)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None
