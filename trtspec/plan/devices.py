"""Devices the planner can plan for: numbers with units from devices.yaml."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from trtspec.errors import ConfigError

# Where a precision has no unit of its own the next wider one computes it.
_FALLBACK = {"fp4": "fp8", "fp8": "bf16", "int8": "bf16", "int4": "int8", "bf16": "fp32", "fp32": "bf16"}


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Peaks are dense. eff_*: achieved fractions of the peaks. overlap: memory and arithmetic overlap.

    assumed, unconfirmed: names of fields that are placeholders, respectively data-sheet values.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    arch: str
    memory_bytes: float
    mem_bw_bytes_per_s: float
    flops: tuple[tuple[str, float], ...]
    sms: int
    clock_hz: float
    link_bw_bytes_per_s: float
    launch_s: float
    allreduce_latency_s: float
    eff_compute: float
    eff_bandwidth: float
    overlap: bool
    source: str
    assumed: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()

    def peak_flops(self, compute: str) -> float:
        """Dense FLOP/s of the matrix unit that runs `compute`; the next wider precision where it has none."""
        table = dict(self.flops)
        seen: set[str] = set()
        while compute not in table and compute not in seen:
            seen.add(compute)
            compute = _FALLBACK.get(compute, "bf16")
        return table.get(compute) or max(table.values())

    def achieved_flops(self, compute: str) -> float:
        """Peak times the achieved fraction."""
        return self.peak_flops(compute) * self.eff_compute

    @property
    def achieved_bw(self) -> float:
        """Memory bytes per second times the achieved fraction."""
        return self.mem_bw_bytes_per_s * self.eff_bandwidth

    def ridge_flop_per_byte(self, compute: str = "bf16") -> float:
        """Arithmetic intensity at which peak compute and peak bandwidth meet."""
        return self.peak_flops(compute) / self.mem_bw_bytes_per_s


def device_names() -> tuple[str, ...]:
    """Names accepted by `load_device`, in the order of devices.yaml."""
    return tuple(_table())


def load_device(name: str) -> Device:
    """The device of that name. Raises ConfigError naming the known ones."""
    entry = _table().get(name)
    if entry is None:
        raise ConfigError(f"unknown device {name!r}", hint=f"devices: {', '.join(device_names())}")
    memory = entry["memory_bytes"]
    return Device(
        name=name,
        kind=entry["kind"],
        arch=platform.machine() if entry["kind"] == "cpu" else entry["arch"],
        memory_bytes=float(memory if memory is not None else _machine_memory()),
        mem_bw_bytes_per_s=float(entry["mem_bw_bytes_per_s"]),
        flops=tuple((precision, float(value)) for precision, value in entry["flops"].items()),
        sms=int(entry["sms"]),
        clock_hz=float(entry["clock_hz"]),
        link_bw_bytes_per_s=float(entry["link_bw_bytes_per_s"]),
        launch_s=float(entry["launch_s"]),
        allreduce_latency_s=float(entry["allreduce_latency_s"]),
        eff_compute=float(entry["eff_compute"]),
        eff_bandwidth=float(entry["eff_bandwidth"]),
        overlap=bool(entry["overlap"]),
        source=entry["source"],
        assumed=tuple(entry.get("assumed", ())),
        unconfirmed=tuple(entry.get("unconfirmed", ())),
    )


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    text = files("trtspec.plan").joinpath("devices.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["devices"]


def _machine_memory() -> float:
    """Physical memory of this machine in bytes, or what its container may use."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            text = limit.read().strip()
        return min(total, float(text)) if text != "max" else total
    except (OSError, ValueError):
        return total
