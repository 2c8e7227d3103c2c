"""The doctor names what keeps a backend from working and what to type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtspec import doctor
from trtspec.doctor import BACKENDS, Check, examine, lacks
from trtspec.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def by_name(checks) -> dict[str, Check]:
    return {check.name: check for check in checks}


def with_versions(monkeypatch, **versions: str | None) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name.replace("-", "_"), real(name)))


def test_it_writes_nothing(store: Store, tmp_path: Path):
    examine(store)
    assert list(tmp_path.iterdir()) == []


def test_it_imports_none_of_what_it_looks_at():
    code = (
        "import sys; from trtspec.doctor import examine; from trtspec.store import Store; examine(Store()); "
        "print([m for m in ('torch', 'transformers', 'onnxruntime', 'modelopt') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_everything_missing_says_what_to_type(store: Store):
    for check in examine(store):
        assert check.status == "ok" or check.fix, f"{check.name} has a complaint and no remedy"


def test_a_missing_package_stops_only_the_backends_that_need_it(store: Store, monkeypatch):
    with_versions(monkeypatch, onnxruntime=None, gguf=None)
    checks = examine(store)
    assert by_name(checks)["onnxruntime"].fix == "pip install 'trtspec[cpu]'"
    assert "onnxruntime" in [check.name for check in lacks(checks, "onnxruntime")]
    assert "onnxruntime" not in [check.name for check in lacks(checks, "tensorrt_llm")]
    assert by_name(checks)["gguf"].status == "warning"
    assert "gguf" not in [check.name for backend in BACKENDS for check in lacks(checks, backend)]


def test_numpy_2_is_refused_because_triton_returns_garbage_with_it(store: Store, monkeypatch):
    with_versions(monkeypatch, numpy="2.1.0")
    check = by_name(examine(store))["numpy"]
    assert check.status == "missing" and check.fix == "pip install 'numpy<2'"


def test_another_version_than_the_pinned_one_is_a_warning(store: Store, monkeypatch):
    monkeypatch.setattr(doctor, "_pins", lambda: {"transformers": "5.14.1"})
    with_versions(monkeypatch, transformers="5.20.0")
    check = by_name(examine(store))["transformers"]
    assert check.status == "warning" and check.fix == "pip install transformers==5.14.1"


def test_the_pins_come_from_the_release_itself():
    assert doctor._pins().keys() >= {"torch", "transformers", "onnxruntime"}
    assert all(version[0].isdigit() for version in doctor._pins().values())


@pytest.mark.parametrize(
    ("cuda", "driver", "status"),
    [("13.0", False, "warning"), (None, True, "warning"), (None, False, "ok"), ("13.0", True, "ok")],
)
def test_the_torch_build_should_fit_the_machine(monkeypatch, tmp_path: Path, cuda, driver: bool, status: str):
    class Distribution:
        @staticmethod
        def locate_file(_name):
            return tmp_path / "version.py"

    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\n")
    monkeypatch.setattr(doctor.metadata, "distribution", lambda _name: Distribution)
    monkeypatch.setattr(doctor, "_driver_reachable", lambda: driver)
    assert doctor._torch_build().status == status


def test_a_driver_without_a_gpu_is_not_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_driver_reachable", lambda: True)
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: None)
    (check,) = doctor._gpu()
    assert check.status == "missing" and "lists no GPU" in check.found


@pytest.mark.parametrize(("free", "status"), [(8 << 20, "missing"), (64 << 20, "ok")])
def test_too_little_shared_memory_is_found_before_triton_fails_on_it(monkeypatch, free: int, status: str):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _place: type("Usage", (), {"free": free}))
    assert doctor._shared_memory().status == status


def test_a_nearly_full_cache_disk_is_a_warning(store: Store, monkeypatch):
    monkeypatch.setattr(doctor, "free_bytes", lambda _place: 1 << 30)
    assert by_name(examine(store))["cache disk"].status == "warning"


def test_a_damaged_artifact_is_found_by_reading_all_of_it(store: Store):
    artifact = store.get_or_build("compile", {"n": 1}, lambda folder: (folder / "m").write_bytes(b"a" * 100))
    assert by_name(examine(store))["cache content"].status == "ok"
    victim = artifact.path / "m"
    stat = victim.stat()
    victim.chmod(0o644)
    victim.write_bytes(b"b" * 100)
    os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    check = by_name(examine(store))["cache content"]
    assert check.status == "warning" and str(artifact.path.parent) in check.fix
