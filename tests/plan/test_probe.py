"""The probe against an engine whose step time is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from trtspec.engines.base import EngineSpec, SlotLogits, SlotStep
from trtspec.plan import probe
from trtspec.plan.devices import load_device
from trtspec.plan.probe import ProbeResult, probe_engine, probe_memory_bandwidth, probed_device


class Clock:
    """Time that passes only when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(probe, "time", made)
    return made


class SlowEngine:
    """2 ms a step and 0.5 ms a row."""

    def __init__(self, clock: Clock, max_batch: int = 2, max_seq_len: int = 64, max_rows: int = 8) -> None:
        self.clock = clock
        self.spec = EngineSpec(4, 4, max_batch=max_batch, max_seq_len=max_seq_len, max_rows=max_rows)

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        for step in steps:
            assert len(step.tokens) <= self.spec.max_rows
            assert step.start + len(step.tokens) <= self.spec.max_seq_len
        self.clock.now += 2e-3 + 5e-4 * sum(len(step.tokens) for step in steps)
        return [SlotLogits(np.zeros((len(s.tokens) - s.logits_from, 4), np.float32)) for s in steps]


def test_step_times_by_rows_and_batch(clock: Clock) -> None:
    table = probe_engine(SlowEngine(clock), rows=(1, 2, 4, 8), contexts=(32,), batches=(1, 2, 3), repeats=3)
    assert table.ms(1, 8, 32) - table.ms(1, 1, 32) == pytest.approx(3.5)
    assert table.ms(2, 4, 32) == pytest.approx(6.0)
    assert {s.batch for s in table.samples} == {1, 2}  # a third slot does not exist


def test_long_prompts_go_in_pieces_and_long_steps_are_left_out(clock: Clock) -> None:
    engine = SlowEngine(clock, max_rows=8, max_seq_len=40)
    table = probe_engine(engine, rows=(1, 4, 16), contexts=(1000,), repeats=1)
    assert {s.rows for s in table.samples} == {1, 4}
    assert all(s.context == 24 for s in table.samples)  # what the slot holds, less the longest step


def test_time_limit_stops_the_probe(clock: Clock) -> None:
    table = probe_engine(SlowEngine(clock), rows=(1, 8), contexts=(16,), repeats=10_000, seconds=0.2)
    assert clock.now < 0.5
    assert len(table.samples) == 2


def test_bandwidth_is_plausible_and_replaces_the_assumed_one() -> None:
    bandwidth = probe_memory_bandwidth(1, megabytes=64, seconds=0.05)
    assert 5e8 < bandwidth < 1e12
    profile = ProbeResult("m", 1, bandwidth).as_json()
    device = probed_device(load_device("cpu"), profile)
    assert device.mem_bw_bytes_per_s == bandwidth
    assert "mem_bw_bytes_per_s" not in device.assumed
    assert probed_device(load_device("cpu"), {}) == load_device("cpu")
