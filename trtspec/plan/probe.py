"""A short measurement of this machine: memory bandwidth, and an engine's real step time by rows.

The result is a small JSON object that `read_measured` understands; the caller stores it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from trtspec.plan.devices import Device
from trtspec.plan.step_table import StepSample, StepTable

if TYPE_CHECKING:
    from trtspec.engines.base import Engine

DEFAULT_ROWS = tuple(range(1, 18))
_PROBE_TOKEN = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """mem_bw_bytes_per_s: read by all threads together. table: engine step times, None where no engine was probed."""

    machine: str
    threads: int
    mem_bw_bytes_per_s: float
    table: StepTable | None = None

    def as_json(self) -> dict[str, Any]:
        """The profile to store; with a table it holds `steps`, which `read_measured` takes."""
        base: dict[str, Any] = {
            "machine": self.machine,
            "threads": self.threads,
            "mem_bw_bytes_per_s": self.mem_bw_bytes_per_s,
        }
        return base | (self.table.as_json() if self.table else {})


def probe_memory_bandwidth(
    threads: int | None = None, *, megabytes: int = 256, seconds: float = 0.4
) -> float:
    """Bytes per second that `threads` threads read together from arrays larger than the caches; the best pass."""
    import numpy as np

    threads = threads or os.cpu_count() or 1
    arrays = [np.ones(megabytes * 131_072 // threads, np.float64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        ends = time.perf_counter() + seconds
        while best == 0.0 or time.perf_counter() < ends:
            began = time.perf_counter()
            list(pool.map(np.add.reduce, arrays))
            best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - began))
    return best


def probe_engine(
    engine: Engine,
    *,
    rows: Sequence[int] = DEFAULT_ROWS,
    contexts: Sequence[int] = (256,),
    batches: Sequence[int] = (1,),
    repeats: int = 7,
    seconds: float = 20.0,
) -> StepTable:
    """Median milliseconds of `engine.forward` by batch, rows and context; stops early after `seconds`.

    Rows are visited round-robin so that a machine that slows down slows all of them alike. Overwrites the KV of the
    slots it uses; points the engine cannot hold are skipped.
    """
    import numpy as np

    from trtspec.engines.base import SlotStep

    spec = engine.spec
    times: dict[tuple[int, int, int], list[float]] = {}
    ends = time.perf_counter() + seconds
    for context in contexts:
        start = min(context, spec.max_seq_len - max(rows))
        if start < 1:
            continue
        for batch in batches:
            if batch > spec.max_batch:
                continue
            for slot in range(batch):
                _fill(engine, slot, start)
            points = [r for r in rows if r <= spec.max_rows]
            for repeat in range(repeats + 1):
                for count in points:
                    steps = [
                        SlotStep(slot, start, np.full(count, _PROBE_TOKEN, np.int64)) for slot in range(batch)
                    ]
                    began = time.perf_counter()
                    engine.forward(steps)
                    elapsed = time.perf_counter() - began
                    if repeat:  # the first visit of a shape allocates and is not timed
                        times.setdefault((batch, count, start), []).append(elapsed * 1e3)
                if repeat and time.perf_counter() > ends:
                    break
    samples = tuple(StepSample(b, r, c, median(ms)) for (b, r, c), ms in sorted(times.items()))
    return StepTable(samples, f"probe of {machine_name()}")


def _fill(engine: Engine, slot: int, length: int) -> None:
    """Write `length` rows into a slot in pieces the engine takes."""
    import numpy as np

    from trtspec.engines.base import SlotStep

    done = 0
    while done < length:
        count = min(engine.spec.max_rows, length - done)
        engine.forward([SlotStep(slot, done, np.full(count, _PROBE_TOKEN, np.int64), logits_from=count)])
        done += count


def machine_name() -> str:
    """Processor model and core count."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            model = next(
                (line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model
            )
    except OSError:
        return f"{model}, {os.cpu_count()} cores"  # not Linux
    return f"{model}, {os.cpu_count()} cores"


def probed_device(device: Device, profile: Mapping[str, Any]) -> Device:
    """The device with the bandwidth a probe measured in place of the assumed one."""
    bandwidth = profile.get("mem_bw_bytes_per_s")
    if not isinstance(bandwidth, int | float) or bandwidth <= 0:
        return device
    assumed = tuple(name for name in device.assumed if name != "mem_bw_bytes_per_s")
    return replace(device, mem_bw_bytes_per_s=float(bandwidth), assumed=assumed)
