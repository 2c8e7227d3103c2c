"""Is the client the bottleneck? Streams of a server that only keeps time, as `trtspec eval` reads and times them.

python -m tests.bench.bench_client [--streams 1 32 128 256] [--step-ms 50]

The server (`stream_stub`) is a process of its own and notes when it sends each chunk; both sides read the host's
monotonic clock. *Lag* is when the client stamped a chunk less when the server sent it: transport, waiting for the
interpreter and all. A client that is the bottleneck shows it as lag that grows with the streams, and as inter-token
latencies other than those that were sent. Writes results/client.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.bench.stream_stub import PER_STEP
from trtspec.checkpoints.chat_template import ChatTemplates
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.evaluate.data import Prompt, PromptSet
from trtspec.evaluate.environment import read_environment
from trtspec.evaluate.openai_target import OpenAIChat
from trtspec.evaluate.record import RunSettings, TargetFacts
from trtspec.evaluate.run import EvalRequest, evaluate
from trtspec.evaluate.targets import Answer, Target
from trtspec.evaluate.triton import TritonGrpc
from trtspec.events import silent

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results") / "client.md"
PROTOCOLS = ("openai", "triton")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. Lags in milliseconds; itl_error: of the mean inter-token latency, relative. client, server:
    cores each used; at one, Python has no more to give."""

    protocol: str
    streams: int
    chunks_per_s: float
    lag_p50: float
    lag_p99: float
    lag_max: float
    itl_error: float
    client: float
    server: float


class Clocked:
    """A target that keeps when each request began, by its seed: records hold times since then."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.begun: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def chat(self, request_id: str, messages: Any, sampling: Any) -> Answer:
        self.begun[sampling.seed] = time.monotonic()
        return self._target.chat(request_id, messages, sampling)


class Stub:
    """A running stub server: its port, and what it says in the end."""

    def __init__(self, protocol: str, step_ms: float) -> None:
        command = [sys.executable, "-m", "tests.bench.stream_stub", protocol, "--step-ms", str(step_ms)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._process.stdout.readline())

    def end(self) -> dict[int, list[float]]:
        """Stop it; when it sent each chunk, by the seed of the request."""
        told, _ = self._process.communicate(timeout=60)
        return {int(seed): times for seed, times in json.loads(told).items()}


def tokenizer() -> TextTokenizer:
    """One token a character."""
    vocabulary = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend, config={}, templates=ChatTemplates({}))


def measure(protocol: str, streams: int, *, step_ms: float, steps: int) -> Row:
    """Run 2 × `streams` conversations, `streams` of them at a time, each of `steps` steps after its first token."""
    settings = RunSettings(output_length=1 + PER_STEP * steps, concurrency=streams, warmup=1)
    prompts = tuple(Prompt(f"q{i}", "timing", (f"question {i}",)) for i in range(2 * streams))
    facts = TargetFacts(f"{protocol} stub", "stub", "unknown", None)
    server = Stub(protocol, step_ms)
    address = f"127.0.0.1:{server.port}"
    if protocol == "openai":
        target = Clocked(OpenAIChat(f"http://{address}/v1", "stub", tokenizer(), facts, alone=False))
    else:
        target = Clocked(TritonGrpc(address, "stub", facts))
    try:
        with tempfile.TemporaryDirectory() as folder:
            begin, busy = time.monotonic(), _cpu_s(resource.RUSAGE_SELF)
            asked = EvalRequest("client", target, None, PromptSet("stub", prompts, ()), prompts, settings)
            record = evaluate(asked, Path(folder), silent)
            took = time.monotonic() - begin
            client = (_cpu_s(resource.RUSAGE_SELF) - busy) / took
    finally:
        target.close()
        before = _cpu_s(resource.RUSAGE_CHILDREN)
        sent = server.end()
        served = (_cpu_s(resource.RUSAGE_CHILDREN) - before) / took
    if record.failures:
        raise RuntimeError(record.failures[0].message)
    lags, here, there = [], [], []
    for request in record.requests:
        begun, out = target.begun[request.seed], sent[request.seed]
        read = [begun + at for at in (request.ttft_s, *(step.at_s for step in request.steps))]
        lags += [1e3 * (b - a) for a, b in zip(out, read, strict=True)]
        here.append(read[-1] - read[0])
        there.append(out[-1] - out[0])
    p50, p99, most = (float(q) for q in np.quantile(lags, (0.5, 0.99, 1.0)))
    error = float(np.mean(here) / np.mean(there) - 1)
    rate = len(lags) / record.blocks[0].speculative_s
    return Row(protocol, streams, rate, p50, p99, most, error, client, served)


def _cpu_s(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def markdown(rows: Sequence[Row], step_ms: float) -> str:
    machine = read_environment()
    lines = [
        "# The evaluation client against a server that only keeps time",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}; {machine.processor}, {machine.cores} cores, server and client on the same; "
        f"a chunk of {PER_STEP} tokens every {step_ms:g} ms on each stream. Made by "
        "`python -m tests.bench.bench_client`.",
        "",
        "| protocol | streams | chunks/s | lag p50, ms | lag p99, ms | lag max, ms | error of mean inter-token latency "
        "| client, cores | server, cores |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r.protocol} | {r.streams} | {r.chunks_per_s:,.0f} | {r.lag_p50:.2f} | {r.lag_p99:.2f} "
            f"| {r.lag_max:.1f} | {100 * r.itl_error:+.2f} % | {r.client:.2f} | {r.server:.2f} |"
            for r in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    rows = []
    for protocol in PROTOCOLS:
        for streams in arguments.streams:
            rows.append(measure(protocol, streams, step_ms=arguments.step_ms, steps=arguments.steps))
            print(rows[-1], flush=True)
    RESULTS.write_text(markdown(rows, arguments.step_ms), encoding="utf-8")


if __name__ == "__main__":
    main()
