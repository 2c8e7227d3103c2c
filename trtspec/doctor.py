"""What this machine has for each engine backend, what is missing, and the command that fixes it.

Everything is found without importing the packages looked at: a broken one cannot break the doctor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from trtspec.engines.tensorrt_info import OLDEST_TENSORRT
from trtspec.errors import SetupError
from trtspec.files import free_bytes
from trtspec.store import Store

BACKENDS = ("onnxruntime", "tensorrt", "tensorrt_llm")
_CPU_EXTRA = "pip install 'trtspec[cpu]'"
_GPU_EXTRA = "pip install 'trtspec[gpu]' inside NVIDIA's TensorRT-LLM container"
_INSTALL_TENSORRT = f"pip install 'tensorrt>={'.'.join(map(str, OLDEST_TENSORRT))}'"

# Distribution → backends that do not work without it. The rest is looked up for every backend.
_NEEDS: dict[str, tuple[str, ...]] = {
    "numpy": BACKENDS,
    "pydantic": BACKENDS,
    "pyyaml": BACKENDS,
    "rich": BACKENDS,
    "torch": BACKENDS,
    "transformers": BACKENDS,
    "nvidia-modelopt": BACKENDS,
    "onnx": ("onnxruntime", "tensorrt"),
    "onnxruntime": ("onnxruntime", "tensorrt"),
    "tensorrt": ("tensorrt",),
    "tensorrt-llm": ("tensorrt_llm",),
    "tritonclient": BACKENDS,
}
_USEFUL = {
    "gguf": "models shipped as GGUF inside a package",
    "pyarrow": "prompts in Parquet files",
    "matplotlib": "plots in reports",
    "accelerate": "quantizing models that do not fit one device",
    "aiohttp": "OpenAI's API before Triton (trtspec serve --openai)",
    "ray": "sweeps on a cluster (trtspec eval --sweep FILE --ray)",
}
_CACHE_BYTES = 4 << 30
_SHM_BYTES = 16 << 20
_TRITON_GLIBC = (2, 34)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. status: "ok", "warning" (works, within a limit) or "missing" (does not work).

    backends: those that do not work while this is missing. fix: the command, or act, that changes it.
    """

    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    backends: tuple[str, ...] = BACKENDS
    fix: str | None = None


def examine(store: Store) -> tuple[Check, ...]:
    """Look at everything; reads every stored artifact in full. Writes nothing."""
    return (
        *_platform(),
        *_packages(),
        _torch_build(),
        *_gpu(),
        _kernels(),
        *_triton(),
        _disk(store),
        _shared_memory(),
        _integrity(store),
    )


def lacks(checks: tuple[Check, ...], backend: str) -> tuple[Check, ...]:
    """The checks that keep a backend from working; empty when it works."""
    return tuple(check for check in checks if check.status == "missing" and backend in check.backends)


def _platform() -> Iterator[Check]:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        yield Check("python", "ok", version)
    else:
        yield Check("python", "missing", version, fix="use Python 3.11: the pins resolve together only there")
    kind, glibc = platform.libc_ver()
    numbers = tuple(int(part) for part in re.findall(r"\d+", glibc)[:2])
    if kind == "glibc" and numbers >= _TRITON_GLIBC:
        yield Check("glibc", "ok", glibc)
    else:
        fix = "use a distribution with glibc 2.34 or newer: the Triton server's binaries need it"
        yield Check(
            "glibc", "missing", f"{kind or 'another C library'} {glibc}".strip(), ("onnxruntime",), fix
        )
    yield Check("cpu", "ok", f"{os.cpu_count()} cores, {_cpu_features()}")


def _cpu_features() -> str:
    try:
        flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    except (OSError, TypeError):
        return platform.machine()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    return " ".join([platform.machine(), *(flag for flag in wanted if flag in flags)])


def _packages() -> Iterator[Check]:
    pins = _pins()
    for name, backends in _NEEDS.items():
        found, pin = _version(name), pins.get(name)
        install = {"tensorrt": _INSTALL_TENSORRT, "tensorrt-llm": _GPU_EXTRA}.get(name, _CPU_EXTRA)
        if found is None:
            yield Check(name, "missing", "not installed", backends, install)
        elif name == "numpy" and int(found.split(".")[0]) >= 2:
            yield Check(
                name, "missing", f"{found}: Triton's Python backend returns garbage with numpy 2",
                backends, "pip install 'numpy<2'",
            )  # fmt: skip
        elif name == "tensorrt" and tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TENSORRT:
            yield Check(name, "missing", f"{found}: no in-place KV cache update", backends, install)
        elif pin and found.split("+")[0] != pin:
            yield Check(
                name, "warning", f"{found}, tested with {pin}", backends, f"pip install {name}=={pin}"
            )
        else:
            yield Check(name, "ok", found, backends)
    for name, purpose in _USEFUL.items():
        found = _version(name)
        if found is None:
            yield Check(name, "warning", f"not installed: no {purpose}", (), _CPU_EXTRA)
        else:
            yield Check(name, "ok", found, ())


def _pins() -> dict[str, str]:
    """The exact versions this release was tested with, from its own metadata."""
    try:
        requirements = metadata.requires("trtspec") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)(?:\[[^\]]*\])?==([\w.]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch_build() -> Check:
    """A CUDA build on a machine without a GPU works, and wastes gigabytes; a CPU build leaves a GPU idle."""
    text = ""
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    if not text:
        return Check("torch build", "warning", "unknown: torch is not installed", (), _CPU_EXTRA)
    match = re.search(r"^cuda[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    build, gpu = f"CUDA {match[1]}" if match else "CPU", _driver_reachable()
    if match and not gpu:
        fix = (
            "to save about 5 GB, install torch's CPU wheel (version ending in +cpu) from PyTorch's own index"
        )
        return Check(
            "torch build", "warning", f"{build}, and no GPU driver here: it runs on the CPU", (), fix
        )
    if gpu and not match:
        fix = "install torch's CUDA wheel to quantize on the GPU"
        return Check("torch build", "warning", "CPU, though a GPU driver is here", (), fix)
    return Check("torch build", "ok", build, ())


def _driver_reachable() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _gpu() -> Iterator[Check]:
    needed_by = ("tensorrt", "tensorrt_llm")
    smi = shutil.which("nvidia-smi")
    if not _driver_reachable():
        fix = "run on a machine with an NVIDIA driver (in a container: --gpus all)"
        yield Check("gpu driver", "missing", "libcuda.so.1 not found", needed_by, fix)
        return
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    listed = ""
    if smi:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(
                [smi, *query], capture_output=True, text=True, timeout=20, check=True
            ).stdout
    names = "; ".join(line.strip() for line in listed.splitlines() if line.strip())
    if names:
        yield Check("gpu driver", "ok", names, needed_by)
    else:
        fix = "run nvidia-smi and repair what it reports"
        yield Check(
            "gpu driver", "missing", "libcuda.so.1 is there, but nvidia-smi lists no GPU", needed_by, fix
        )


def _kernels() -> Check:
    """The PTX of plugins/, which a wheel carries and a source checkout compiles."""
    fix = "python -m trtspec_plugins.aot (needs triton: pip install 'trtspec[kernels]')"
    try:
        from trtspec_plugins.index import COMPILED, read

        return Check("gpu kernels", "ok", f"{len(read(COMPILED))} compiled", ("tensorrt",))
    except ImportError:
        found, fix = "trtspec_plugins is not installed", "install trtspec again: the package is part of it"
    except FileNotFoundError:
        found = "not compiled"
    except ValueError as error:
        found = str(error)
    return Check("gpu kernels", "missing", found, ("tensorrt",), fix)


def _triton() -> Iterator[Check]:
    from trtspec.serve.install import find_triton

    try:
        server = find_triton()
        yield Check("triton server", "ok", f"{server.binary} ({server.origin})")
    except SetupError as error:
        yield Check("triton server", "missing", error.message, fix=error.hint or "use another server")
    library = sysconfig.get_config_var("INSTSONAME") or f"libpython{sysconfig.get_python_version()}.so.1.0"
    place = Path(sysconfig.get_config_var("LIBDIR") or "") / library
    if ".so" in library and (place.is_file() or _loadable(library)):
        yield Check("libpython", "ok", str(place) if place.is_file() else library)
    else:
        version = sysconfig.get_python_version()
        fix = f"install the distribution's shared libpython{version}, or a Python built with it"
        yield Check(
            "libpython", "missing", f"{library} not found: Triton's Python backend cannot start", fix=fix
        )


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _disk(store: Store) -> Check:
    free = free_bytes(store.root)
    found = f"{free / 1e9:.1f} GB free for {store.root}"
    if free >= _CACHE_BYTES:
        return Check("cache disk", "ok", found)
    return Check(
        "cache disk", "warning", found, fix="free space, or set TRTSPEC_CACHE to a folder on a larger disk"
    )


def _shared_memory() -> Check:
    """Triton keeps one region per model instance in /dev/shm."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check(
            "/dev/shm", "missing", "absent", fix="mount a tmpfs there (in a container: --shm-size=1g)"
        )
    free = shutil.disk_usage(place).free
    found = f"{free / 2**20:.0f} MiB free"
    if free >= _SHM_BYTES:
        return Check("/dev/shm", "ok", found)
    return Check(
        "/dev/shm", "missing", found, fix="enlarge it (in a container: --shm-size=1g), or delete leftovers"
    )


def _integrity(store: Store) -> Check:
    artifacts = list(store.artifacts())
    damaged = [artifact for artifact in artifacts if store.problems(artifact, full=True)]
    if not damaged:
        size = sum(artifact.bytes for artifact in artifacts)
        return Check("cache content", "ok", f"{len(artifacts)} artifacts, {size / 1e9:.2f} GB, all intact")
    names = ", ".join(f"{artifact.kind}/{artifact.key[:12]}" for artifact in damaged[:3])
    fix = "run `trtspec build … --fresh` for the configs that use them, or: rm -r " + " ".join(
        str(artifact.path.parent) for artifact in damaged
    )
    return Check(
        "cache content", "warning", f"{len(damaged)} of {len(artifacts)} artifacts damaged: {names}", fix=fix
    )
