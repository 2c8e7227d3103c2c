"""Predicted against measured on the real engine: probe, record one run, predict every draft length, measure them.

Times are processor time of one thread, so that a busy machine does not decide the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from trtspec.checkpoints.facts import read_facts
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.plan import probe
from trtspec.plan.measured import Measured, measured_curve
from trtspec.plan.planner import solve
from trtspec.plan.request import PlanRequest
from trtspec.values import Completion, GenerationRequest, SamplingParams

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
TOKENS = 48
PROMPTS = (
    "Rewrite this sentence in the past tense and repeat it twice: The cat sits on the mat and looks at the bird.",
    "Write a Python class Stack with push, pop and peek, then a class Queue with the same three methods.",
    "List the numbers from one to twenty in words, separated by commas.",
    "What is the capital of France, and why do people visit it?",
    "Translate into French, sentence by sentence, quoting each one first: I like tea. I like coffee. I like milk.",
    "Explain in two sentences how rain forms.",
)

pytestmark = [pytest.mark.long, pytest.mark.model]


def _completions(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, list[Completion], object]]:
    from trtspec.drafters.factory import open_drafter
    from trtspec.drafters.policy import StepCost
    from trtspec.engines.onnxruntime import OnnxRuntimeEngine
    from trtspec.verify.loop import DecodeLoop

    runner = OnnxRuntimeEngine(engine, max_batch=1, threads=1)
    tokenizer, info = TextTokenizer.load(engine), runner.info
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=time.process_time))
    table = probe.probe_engine(runner, contexts=(64,), repeats=5)
    rows = tuple(range(1, max(LENGTHS) + 2))
    cost = StepCost(rows, tuple(table.ms(1, count, 64) for count in rows))
    requests = [tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    for length in LENGTHS:
        drafter = (
            open_drafter(info.speculation, special_ids=tokenizer.special_ids, cost=cost) if length else None
        )
        loop = DecodeLoop(
            runner, drafter, draft_length=length, stop_token_ids=info.stop_token_ids, open_text=tokenizer.stream,
            max_queue=4, clock=time.process_time,
        )  # fmt: skip
        done: list[Completion] = []
        for index, prompt in enumerate(requests):
            loop.submit(
                GenerationRequest(f"{length}-{index}", tuple(prompt), SamplingParams(max_tokens=TOKENS))
            )
            while len(done) <= index:
                done += loop.step().completions
        yield length, done, table
    runner.close()


def test_predicted_speedups_are_within_15_percent_at_the_median(
    quickstart_build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        length: (done, table)
        for length, done, table in _completions(quickstart_build / "engine", monkeypatch)
    }
    rates = {
        d: sum(len(c.token_ids) - 1 for c in done) / sum(c.total_s - c.ttft_s for c in done)
        for d, (done, _) in runs.items()
    }
    longest, table = runs[max(LENGTHS)]
    steps = [(s.drafted, s.accepted) for c in longest for s in c.steps]
    curve = measured_curve(steps, draft_length=max(LENGTHS), retrieval=True, source="this run")
    facts = read_facts(quickstart_build / "engine")
    request = PlanRequest(
        device="cpu", backend="onnxruntime", method="ngram", context=64, output_length=TOKENS
    )
    points = solve(request, facts, measured=Measured("probe", "ngram", curve, table)).batches[0].points
    errors = []
    with capsys.disabled():
        print("\n  D  predicted  measured")
        for length in LENGTHS[1:]:
            measured = rates[length] / rates[0]
            errors.append(abs(points[length].speedup / measured - 1))
            print(f"{length:>3}  {points[length].speedup:>8.3f}×  {measured:>7.3f}×")
        print(f"  median error {median(errors):.1%}")
    assert median(errors) <= 0.15
