"""The engines of the side-by-side benchmark, each in a process of its own that answers one prompt at a time.

Every engine gets the same token ids, number of threads, limit of new tokens and stop id, decodes greedily, and
answers with its token ids and two times: until the first token and until the last.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. plain: the name of the row without speculation that it is compared with, its own
    when it is one. kind: an adapter below. folder: of the engine, or the GGUF file. options: the adapter's.
    """

    name: str
    plain: str
    kind: str
    weights: str
    folder: Path
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def speculates(self) -> bool:
        return self.plain != self.name


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: new ids, the stop id included. first_s: until the first of them. total_s: until the last.

    passes: target forward passes after the prompt, None where the engine does not tell. other_cores: how many
    cores other processes kept busy meanwhile. load: of the machine, one minute's average.
    """

    tokens: tuple[int, ...]
    first_s: float
    total_s: float
    passes: int | None
    other_cores: float = 0.0
    load: float = 0.0

    @property
    def decode_s(self) -> float:
        return self.total_s - self.first_s


Generate = Callable[[Prompt], Answer]


def open_trtspec(row: Row, threads: int, max_tokens: int, stop_id: int) -> Generate:
    """options: speculate, draft_length (None: the build's)."""
    from itertools import count

    from trtspec.runtime import Runtime
    from trtspec.values import GenerationRequest, SamplingParams

    options = dict(row.options)
    runtime = Runtime.open(
        row.folder,
        speculate=options.get("speculate", True),
        draft_length=options.get("draft_length"),
        max_concurrency=1,
        threads=threads,
    )
    sampling, ids = SamplingParams(max_tokens=max_tokens, stop_token_ids=(stop_id,)), count()

    def generate(prompt: Prompt) -> Answer:
        started = time.perf_counter()
        done = runtime.generate(GenerationRequest(str(next(ids)), prompt, sampling))
        total = time.perf_counter() - started
        return Answer(done.token_ids, done.ttft_s, total, len(done.steps))

    return generate


def open_genai(row: Row, threads: int, max_tokens: int, stop_id: int) -> Generate:
    """options: `set_speculative_options` of ONNX Runtime GenAI."""
    import onnxruntime_genai as genai

    config = genai.Config(str(row.folder))
    session = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}, "eos_token_id": stop_id}}))
    model = genai.Model(config)

    def generate(prompt: Prompt) -> Answer:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + max_tokens, do_sample=False, batch_size=1)
        if row.speculates:
            params.set_speculative_options(**dict(row.options))
        started = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt)
        first, calls = 0.0, 0
        while not generator.is_done():
            generator.generate_next_token()
            calls += 1
            first = first or time.perf_counter() - started
        total = time.perf_counter() - started
        tokens = tuple(int(token) for token in generator.get_sequence(0)[len(prompt) :])
        stopped = len(tokens) < calls  # the generator keeps the stop id out of its sequence
        passes = calls - 1
        if row.speculates:
            stats = generator.get_speculative_stats()
            passes = stats["target_forward_passes"] + stats["standard_fallback_steps"]
        return Answer(tokens + (stop_id,) * stopped, first, total, passes)

    return generate


def open_openvino(row: Row, threads: int, max_tokens: int, stop_id: int) -> Generate:
    """options: num_assistant_tokens and max_ngram_size of OpenVINO GenAI's prompt lookup."""
    import openvino
    import openvino_genai

    properties = {"INFERENCE_NUM_THREADS": threads}
    if row.speculates:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(str(row.folder), "CPU", **properties)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = max_tokens, False
    config.set_eos_token_id(stop_id)
    for name, value in row.options:
        setattr(config, name, value)

    def generate(prompt: Prompt) -> Answer:
        ids = openvino.Tensor(np.array([prompt], np.int64))
        started = time.perf_counter()
        result = pipeline.generate(ids, config)
        total = time.perf_counter() - started
        metrics = result.perf_metrics
        passes = len(metrics.raw_metrics.m_batch_sizes) - 1  # the first is the prompt's
        return Answer(tuple(result.tokens[0]), metrics.get_ttft().mean / 1e3, total, passes)

    return generate


ADAPTERS = {"trtspec": open_trtspec, "genai": open_genai, "openvino": open_openvino}


class Worker:
    """A row's engine in a process of its own: engines share neither thread pools nor allocators."""

    def __init__(self, row: Row, threads: int, max_tokens: int, stop_id: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, row, threads, max_tokens, stop_id))
        self._process.start()
        theirs.close()
        self.row = row
        self._receive()

    def answer(self, prompt: Prompt, *, tries: int = 1, quiet_cores: float = 0.1) -> Answer:
        """The least disturbed of up to `tries` answers; one with others on < quiet_cores cores is enough."""
        answers = []
        for _ in range(tries):
            self._pipe.send(prompt)
            answers.append(self._receive())
            if answers[-1].other_cores < quiet_cores:
                break
        return min(answers, key=lambda answer: answer.other_cores)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _receive(self) -> Any:
        try:
            outcome = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.row.name!r} ended") from None
        if isinstance(outcome, Exception):
            raise RuntimeError(f"{self.row.name}: {outcome}") from outcome
        return outcome


def _serve(pipe: Any, row: Row, threads: int, max_tokens: int, stop_id: int) -> None:
    try:
        generate = ADAPTERS[row.kind](row, threads, max_tokens, stop_id)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send("ready")
    while True:
        try:
            prompt: Sequence[int] = pipe.recv()
        except EOFError:
            return
        busy, own, wall = _busy_s(), time.process_time(), time.perf_counter()
        try:
            answer = generate(tuple(prompt))
        except Exception as error:
            pipe.send(error)
            return
        wall = time.perf_counter() - wall
        others = (_busy_s() - busy - (time.process_time() - own)) / wall
        pipe.send(replace(answer, other_cores=max(others, 0.0), load=os.getloadavg()[0]))


def _busy_s() -> float:
    """Seconds all cores together have worked since boot, by the kernel's account (Linux), in 10 ms ticks."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    user, nice, system, _idle, _wait, interrupt, soft, steal = ticks
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
