"""Where a run happened: machine, versions. Plain facts for the record; nothing heavy is imported."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import trtspec

_PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-llm",
    "nvidia-modelopt",
    "transformers",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """cores: those this process may use. packages: version by name, of the installed ones that decide results."""

    trtspec: str
    python: str
    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    packages: dict[str, str]


def read_environment() -> Environment:
    """The environment of this process."""
    return Environment(
        trtspec=_version("trtspec") or getattr(trtspec, "__version__", "unknown"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system without these names
        return None
