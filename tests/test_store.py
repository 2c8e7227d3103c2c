"""The artifact store: built once, whole or absent, found again only when it is still what was published."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trtspec.errors import SetupError, StageFailed
from trtspec.store import Store, default_root

KEY = {"model": "a", "bits": 4}


def writes(text: str, calls: list | None = None):
    def build(folder: Path) -> None:
        if calls is not None:
            calls.append(1)
        (folder / "weights.bin").write_bytes(text.encode() * 1000)
        (folder / "sub").mkdir()
        (folder / "sub" / "config.json").write_text("{}")

    return build


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, notices: list[str]) -> Store:
    return Store(tmp_path / "cache", notify=notices.append)


def test_second_request_is_answered_without_building(store: Store):
    calls: list[int] = []
    first = store.get_or_build("quantize", KEY, writes("x", calls))
    second = store.get_or_build("quantize", {"bits": 4, "model": "a"}, writes("x", calls))
    assert calls == [1]
    assert (first.cached, second.cached) == (False, True)
    assert first.digest == second.digest and first.path == second.path
    assert [file.name for file in first.files] == ["sub/config.json", "weights.bin"]


def test_other_inputs_are_another_artifact_but_equal_bytes_have_equal_digests(store: Store):
    first = store.get_or_build("quantize", KEY, writes("x"))
    second = store.get_or_build("quantize", {**KEY, "bits": 8}, writes("x"))
    third = store.get_or_build("quantize", {**KEY, "bits": 16}, writes("y"))
    assert first.path != second.path
    assert first.digest == second.digest != third.digest


def test_making_a_store_and_asking_it_writes_nothing(tmp_path: Path):
    store = Store(tmp_path / "cache")
    assert store.find("quantize", KEY) is None
    assert list(store.artifacts()) == []
    assert list(tmp_path.iterdir()) == []


def test_published_files_are_read_only(store: Store):
    artifact = store.get_or_build("quantize", KEY, writes("x"))
    assert {path.stat().st_mode & 0o222 for path in artifact.path.rglob("*") if path.is_file()} == {0}


def test_a_file_shared_with_the_users_model_folder_keeps_its_mode(store: Store, tmp_path: Path):
    mine = tmp_path / "model.safetensors"
    mine.write_text("weights")
    mine.chmod(0o644)
    store.get_or_build("quantize", KEY, lambda folder: os.link(mine, folder / "model.safetensors"))
    assert mine.stat().st_mode & 0o777 == 0o644


def test_a_failed_build_publishes_nothing_and_leaves_nothing(store: Store):
    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise StageFailed("perplexity too high")

    with pytest.raises(StageFailed):
        store.get_or_build("quantize", KEY, fails)
    assert store.find("quantize", KEY) is None
    assert list((store.root / "partial").iterdir()) == []


@pytest.mark.parametrize("damage", ["content", "truncated", "missing", "extra", "record"])
def test_a_damaged_artifact_is_put_aside_and_built_again_with_a_warning(store: Store, notices, damage: str):
    artifact = store.get_or_build("quantize", KEY, writes("x"))
    before = snapshot(artifact.path)
    victim = artifact.path / "weights.bin"
    victim.chmod(0o644)
    match damage:
        case "content":
            victim.write_bytes(b"z" * victim.stat().st_size)
        case "truncated":
            os.truncate(victim, 10)
        case "missing":
            victim.unlink()
        case "extra":
            (artifact.path / "stray").write_text("?")
        case "record":
            record = artifact.path.parent / "artifact.json"
            record.unlink()
            record.write_text('{"form')
    assert store.find("quantize", KEY) is None
    calls: list[int] = []
    rebuilt = store.get_or_build("quantize", KEY, writes("x", calls))
    assert calls == [1] and not rebuilt.cached
    assert snapshot(rebuilt.path) == before
    assert len(notices) == 1 and "damaged" in notices[0]
    assert (store.root / "quarantine").exists()


def test_a_change_that_keeps_size_and_time_is_found_by_the_full_check(store: Store):
    artifact = store.get_or_build("quantize", KEY, writes("x"))
    victim = artifact.path / "weights.bin"
    stat = victim.stat()
    victim.chmod(0o644)
    victim.write_bytes(b"z" * stat.st_size)
    os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.problems(artifact) == []
    assert store.problems(artifact, full=True) == ["weights.bin: content changed (sha256 differs)"]


def test_a_copied_cache_is_hashed_once_and_then_trusted(store: Store, tmp_path: Path, monkeypatch):
    store.get_or_build("quantize", KEY, writes("x"))
    subprocess.run(["cp", "-r", str(store.root), str(tmp_path / "copy")], check=True)
    copy = Store(tmp_path / "copy")
    assert copy.get_or_build("quantize", KEY, writes("never")).cached
    monkeypatch.setattr("trtspec.store.sha256_file", lambda path: pytest.fail(f"{path} hashed again"))
    assert copy.get_or_build("quantize", KEY, writes("never")).cached


def test_a_fresh_build_that_differs_replaces_the_stored_one_and_says_so(store: Store, notices):
    old = store.get_or_build("quantize", KEY, writes("x"))
    same = store.get_or_build("quantize", KEY, writes("x"), fresh=True)
    assert not same.cached and same.digest == old.digest and notices == []
    other = store.get_or_build("quantize", KEY, writes("y"), fresh=True)
    assert other.digest != old.digest
    assert len(notices) == 1 and "weights.bin" in notices[0]
    assert store.find("quantize", KEY).digest == other.digest


def test_materialize_links_and_replaces_what_was_there(store: Store, tmp_path: Path):
    artifact = store.get_or_build("quantize", KEY, writes("x"))
    target = tmp_path / "out" / "target"
    target.mkdir(parents=True)
    (target / "stale").write_text("old")
    store.materialize(artifact, target)
    assert snapshot(target) == snapshot(artifact.path)
    assert (target / "weights.bin").stat().st_ino == (artifact.path / "weights.bin").stat().st_ino
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_materialize_copies_where_links_are_impossible(store: Store, tmp_path: Path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    artifact = store.get_or_build("quantize", KEY, writes("x"))
    monkeypatch.setattr(os, "link", refuse)
    store.materialize(artifact, tmp_path / "target")
    assert snapshot(tmp_path / "target") == snapshot(artifact.path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_leaves_nothing_behind(store: Store, code: int):
    def full(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"part")
        raise OSError(code, os.strerror(code), str(folder / "weights.bin"))

    with pytest.raises(SetupError) as caught:
        store.get_or_build("quantize", KEY, full)
    assert str(store.root) in caught.value.message and "TRTSPEC_CACHE" in caught.value.hint
    assert list((store.root / "partial").iterdir()) == []
    assert store.get_or_build("quantize", KEY, writes("x")).digest


def test_a_full_disk_reported_by_a_native_writer_is_still_a_full_disk(store: Store, monkeypatch):
    def native(_folder: Path) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr("trtspec.store.free_bytes", lambda _place: 4096)
    with pytest.raises(SetupError, match="no space left"):
        store.get_or_build("quantize", KEY, native)


def test_a_permission_error_outside_the_store_is_not_blamed_on_it(store: Store):
    def unreadable(_folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/llama/config.json")

    with pytest.raises(PermissionError):
        store.get_or_build("quantize", KEY, unreadable)


def test_a_cache_that_is_a_file_is_named(tmp_path: Path):
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(SetupError, match="may not write"):
        Store(tmp_path / "cache").get_or_build("quantize", KEY, writes("x"))


def test_the_cache_folder_is_the_users_choice(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "mine"))
    assert default_root() == tmp_path / "mine"
    monkeypatch.delenv("TRTSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "trtspec"


def _build_slowly(root: Path, log: Path, start) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        (folder / "weights.bin").write_text("x")

    start.wait(10)
    Store(root).get_or_build("quantize", KEY, build)


def test_processes_that_ask_at_once_build_once(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    workers = [
        context.Process(target=_build_slowly, args=(tmp_path / "cache", tmp_path / "log", start))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_sweep_deletes_what_the_dead_left_and_nothing_of_the_living(store: Store):
    dead = store.root / "partial" / "quantize-dead"
    dead.mkdir(parents=True)
    (dead / "half").write_text("half")
    alive = store.root / "partial" / "quantize-alive"
    alive.mkdir()
    with store.lock("quantize-alive", "in use"):
        store.sweep()
        assert not dead.exists() and alive.exists()


KILLED = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from trtspec.store import Store

    def build(folder):
        for index in range(12):
            with open(folder / f"shard-{index}", "wb") as file:
                for piece in range(8):
                    file.write(bytes([index, piece]) * 4096)
                    file.flush()
                    time.sleep(0.0008)

    store = Store(Path(sys.argv[1]))
    artifact = store.get_or_build("quantize", {"n": int(sys.argv[3])}, build)
    store.materialize(artifact, Path(sys.argv[2]))
    print(artifact.digest)
""")


def test_killed_at_any_moment_then_run_again_gives_the_same_bytes(tmp_path: Path):
    """SIGKILL at random moments of build, publish and copy; after each, what is visible must be whole."""
    script = tmp_path / "build.py"
    script.write_text(KILLED)
    rng = random.Random(0)

    def command(number: int) -> list[str]:
        return [sys.executable, str(script), str(tmp_path / "cache"), str(tmp_path / "out"), str(number)]

    began = time.monotonic()
    digest = subprocess.run(command(0), check=True, capture_output=True, text=True).stdout
    takes = time.monotonic() - began
    expected = snapshot(tmp_path / "out")
    store = Store(tmp_path / "cache")
    killed = 0
    for number in range(1, 31):
        victim = subprocess.Popen(command(number), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.25, 1.05) * takes)
        victim.send_signal(signal.SIGKILL)
        killed += victim.wait() == -signal.SIGKILL
        for artifact in store.artifacts():
            assert store.problems(artifact, full=True) == []
        assert snapshot(tmp_path / "out") == expected
        if number % 3 == 0:
            assert (
                subprocess.run(command(number), check=True, capture_output=True, text=True).stdout == digest
            )
            assert list((store.root / "partial").iterdir()) == []
    assert killed >= 10
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(expected)


def test_pruning_deletes_what_no_build_has_used_and_counts_what_became_free(store: Store, tmp_path: Path):
    old = store.get_or_build("quantize", {"n": 1}, writes("old"))
    built = store.get_or_build("compile", {"n": 1}, writes("built"))
    used = store.get_or_build("compile", {"n": 2}, writes("used"))
    store.materialize(built, tmp_path / "out")
    (store.root / "quarantine" / "compile-x").mkdir(parents=True)
    for artifact in (old, built, used):
        os.utime(artifact.path.parent / "seen.json", (0, 0))
    assert store.get_or_build("compile", {"n": 2}, writes("never")).cached, "and that is a use"

    deleted, freed = store.prune(3600)

    assert {(one.kind, one.key) for one in deleted} == {("quantize", old.key), ("compile", built.key)}
    assert freed == old.bytes, "the other one's files are still in the build directory"
    assert snapshot(tmp_path / "out")["weights.bin"] == b"built" * 1000
    assert [one.key for one in store.artifacts()] == [used.key]
    assert not (store.root / "quarantine").exists()
    assert not any((store.root / "partial").iterdir())
    assert store.prune(3600) == ([], 0)


def test_pruning_leaves_an_artifact_that_is_being_built_again(store: Store):
    artifact = store.get_or_build("compile", KEY, writes("x"))
    with store.lock(f"compile-{artifact.key}", "test"):
        assert store.prune(0) == ([], 0)
    assert [one.key for one in store.prune(0)[0]] == [artifact.key]
