"""Find a Triton server on this machine, and make the command line and environment that start it."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from trtspec.errors import SetupError

# Names a server binary; stronger than anything found by itself.
SERVER_VARIABLE = "TRTSPEC_TRITONSERVER"
_SYSTEM_ROOT = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A server binary and its parts.

    origin: how it was found, for people. python_backend: folder of the Python backend's library.
    stub: the backend's interpreter process for this Python version; it lies beside the library in a system
    install and elsewhere in nvidia-pytriton. caches: cache implementations, None when there are none.
    """

    binary: Path
    origin: str
    python_backend: Path
    stub: Path
    caches: Path | None


def find_triton(binary: Path | None = None) -> TritonInstall:
    """The server to use: `binary`, $TRTSPEC_TRITONSERVER, PATH, /opt/tritonserver, then nvidia-pytriton's.

    Raises SetupError when a named binary cannot serve Python models, or when there is none at all.
    """
    if binary is not None:
        return _system_install(binary, "the path given")
    if named := os.environ.get(SERVER_VARIABLE):
        return _system_install(Path(named), f"${SERVER_VARIABLE}")
    if on_path := shutil.which("tritonserver"):
        return _system_install(Path(on_path), "PATH")
    if (_SYSTEM_ROOT / "bin/tritonserver").exists():
        return _system_install(_SYSTEM_ROOT / "bin/tritonserver", str(_SYSTEM_ROOT))
    if bundled := _pytriton_root():
        return _bundled_install(bundled, "nvidia-pytriton")
    raise SetupError(
        "no Triton Inference Server on this machine",
        hint="pip install --no-deps nvidia-pytriton==0.7.0, or run inside NVIDIA's Triton container, "
        f"or name the binary in ${SERVER_VARIABLE}",
    )


def server_environment() -> dict[str, str]:
    """This process's environment, changed so that models run in this very interpreter's environment.

    The first `python3` on PATH decides which packages models see, and the stub needs this interpreter's
    libpython, not the distribution's (mixing two patch releases works until it does not).
    """
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    libraries = [sysconfig.get_config_var("LIBDIR"), environment.get("LD_LIBRARY_PATH")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    # The engine has its own thread pool; a second one per BLAS call only fights with it.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def link_backends(install: TritonInstall, runtime: Path) -> Path:
    """Make `runtime/backends` with the Python backend and the stub of this Python version side by side."""
    folder = runtime / "backends" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    parts = [install.python_backend / "libtriton_python.so"]
    parts += [install.python_backend / "triton_python_backend_utils.py", install.stub]
    for part in parts:
        link = folder / part.name
        link.unlink(missing_ok=True)
        link.symlink_to(part)
    return folder.parent


def _system_install(binary: Path, origin: str) -> TritonInstall:
    """A server with the layout of NVIDIA's containers, or the bundled layout named by its binary."""
    if not binary.exists():
        raise SetupError(f"no Triton server here ({origin})", where=str(binary))
    root = binary.resolve().parent.parent
    if (root / "python_backend_stubs").is_dir():
        return _bundled_install(root, origin)
    backend = root / "backends" / "python"
    if not (backend / _STUB).exists():
        raise SetupError(
            f"this Triton server ({origin}) has no Python backend",
            where=str(backend),
            hint="use an image with it (nvcr.io/nvidia/tritonserver:<yy.mm>-py3 or -trtllm-python-py3)",
        )
    caches = root / "caches"
    return TritonInstall(binary, origin, backend, backend / _STUB, caches if caches.is_dir() else None)


def _bundled_install(root: Path, origin: str) -> TritonInstall:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / _STUB
    if not stub.exists():
        have = sorted(folder.name for folder in (root / "python_backend_stubs").iterdir())
        raise SetupError(
            f"this Triton server ({origin}) has no Python {version} stub, only {', '.join(have)}",
            where=str(root),
            hint="run trtspec with one of those Python versions",
        )
    return TritonInstall(root / "bin/tritonserver", origin, root / "backends/python", stub, root / "caches")


def _pytriton_root() -> Path | None:
    """Where nvidia-pytriton keeps its server. The package is not imported: that would start its machinery."""
    try:
        listed = files("nvidia-pytriton") or []
    except PackageNotFoundError:
        return None
    for path in listed:
        if path.parts[-2:] == ("bin", "tritonserver"):
            return Path(path.locate()).resolve().parent.parent
    return None
