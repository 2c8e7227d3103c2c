"""The run in the files of ModelOpt's specdec_bench, with its definitions, so that its readers take them.

    configuration.json          the settings, overwritten per run
    acceptance_rate.json        a list, one object appended per run
    timing.json                 a list, one object appended per run
    specbench_responses.jsonl   the answers of the latest run
    specbench_results.json      the acceptance object of the latest run

Its definitions differ from ours, and are reproduced here only:

                            specdec_bench (these files)                trtspec (run.json)
    a step                  any chunk, the prefill token's included    a verify step
    length of a step        new tokens in the chunk, bonus included    the same; accepted = without the bonus
    Request_AL              per question, over chunks of all turns     per request (turn)
    Average_AL              mean over questions                        that, and the token-weighted mean
    Conditional[k]          P(len ≥ k) / P(len ≥ previous key present),  P(i accepted | i−1 accepted, i drafted),
                            so a length that never occurs is skipped     every position present
    a draft cut by a stop   counts as a short step                     position not judged
    step time               with the interval before the first token   verify steps only
    Output TPS              tokens / (last end − first start)          tokens / busy time (equal here: the
                                                                       baseline's turns are not on this clock)

For one request with accepted 2, 0, 3 of 3 drafted and a prefill token: 9/4 = 2.25 here, 8/3 = 2.667 there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.errors import ConfigError
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.record import RequestRecord, RunRecord
from trtspec.files import files_below, sha256_file, write_atomic

_ALGORITHMS = {"ngram": "NGRAM", "draft_model": "DRAFT_TARGET", "eagle": "EAGLE", "eagle2": "EAGLE"}
_PLAIN_NAMES = {"tokenizer", "tokenizer_path", "tokenizer_mode", "tokenizer_revision"}
_SECRET = re.compile("token|key|secret|password", re.IGNORECASE)
_FROM_ENVIRONMENT = (
    *("SPECDEC_BENCH_SHA", "MODELOPT_VERSION", "MODELOPT_SHA", "NMM_SANDBOX_SHA"),
    *("CONTAINER_IMAGE", "JIRA_TICKET", "HUGGINGFACE_MODEL_ID"),
)


def write(record: RunRecord, prompts: Sequence[Prompt], folder: Path) -> None:
    """Write the five files of the speculative arm into `folder`. ConfigError when a list cannot be appended to."""
    questions = _questions(record)
    acceptance = acceptance_object(questions)
    write_atomic(folder / "configuration.json", _json(configuration(record)))
    _append(folder / "acceptance_rate.json", acceptance)
    _append(folder / "timing.json", timing_object(record.of("speculative"), record.tensor_parallel))
    write_atomic(folder / "specbench_results.json", _json(acceptance))
    answered = [prompt for prompt in prompts if prompt.question_id in questions]
    lines = (
        json.dumps(_response(prompt, questions[prompt.question_id]), ensure_ascii=False)
        for prompt in answered
    )
    write_atomic(folder / "specbench_responses.jsonl", "".join(f"{line}\n" for line in lines))


def acceptance_object(questions: Mapping[str, Sequence[RequestRecord]]) -> dict[str, Any]:
    """One entry of acceptance_rate.json (SpecBench class) from the turns of each question."""
    lengths = {question: list(chain(*map(_chunks, turns))) for question, turns in questions.items()}
    request_al = {question: float(np.mean(chunks)) for question, chunks in lengths.items()}
    categories: dict[str, list[float]] = {}
    for question, turns in questions.items():
        categories.setdefault(turns[0].category, []).append(request_al[question])
    histogram = dict(sorted(Counter(chain(*lengths.values())).items()))
    conditional, joint = {}, {}
    at_least, total, before = sum(histogram.values()), sum(histogram.values()), 1.0
    for length, count in histogram.items():
        joint[length] = at_least / total
        conditional[length] = joint[length] / before
        before = joint[length]
        at_least -= count
    return {
        "Request_AL": request_al,
        "Category_AL": {category: float(np.mean(values)) for category, values in categories.items()},
        "Average_AL": float(np.mean(list(request_al.values()))),
        "Acceptance_Length_Histogram": histogram,
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def timing_object(requests: Sequence[RequestRecord], tensor_parallel: int) -> dict[str, Any]:
    """One entry of timing.json; statistics are strings with four decimals, times in seconds."""
    times = [_times(request) for request in requests]
    counts = [len(request.token_ids) for request in requests]
    wall = max(t[-1] for t in times) - min(t[0] for t in times)
    output_tps = sum(counts) / wall
    found: dict[str, Any] = {
        "Output TPS": output_tps,
        "Output TPS/gpu": output_tps / tensor_parallel,
        "E2E Request Time": _statistics([t[-1] - t[0] for t in times]),
        "TTFT Time": _statistics([t[1] - t[0] for t in times]),
    }
    decoded = [(count, t) for count, t in zip(counts, times) if len(t) > 2]
    if decoded:
        found["Request Generation Step Time"] = _statistics(
            [b - a for _, t in decoded for a, b in pairwise(t)]
        )
        found["Request Generation Tokens Per Second"] = _statistics(
            [(n - 1) / (t[-1] - t[1]) for n, t in decoded]
        )
    found["Number of Output Tokens"] = _statistics(counts)
    return found


def configuration(record: RunRecord) -> dict[str, Any]:
    """configuration.json: specdec_bench's argument names with this run's values; secrets redacted at any depth."""
    facts, settings = record.speculative, record.settings
    environment = {name.lower(): os.environ.get(name) for name in _FROM_ENVIRONMENT}
    environment["modelopt_version"] = environment["modelopt_version"] or record.environment.packages.get(
        "nvidia-modelopt"
    )
    environment["huggingface_model_id"] = environment["huggingface_model_id"] or facts.model
    return _redact(
        {
            "tokenizer": facts.model,
            "model_dir": facts.location,
            "draft_model_dir": None,
            "dataset": "speed",
            "dataset_path": record.data.name,
            "num_requests": record.data.prompts,
            "engine": "TRTSPEC",
            "speculative_algorithm": _ALGORITHMS.get(facts.method, facts.method.upper()),
            "draft_length": facts.draft_length,
            "output_length": settings.output_length,
            "tp_size": record.tensor_parallel,
            "ep_size": 1,
            "concurrency": settings.concurrency,
            "temperature": settings.temperature,
            "ignore_eos": settings.ignore_eos,
            "serving_config": record.config,
            "engine_version": f"trtspec {record.environment.trtspec} ({facts.backend})",
            "gpu": facts.device,
            "python_version": record.environment.python,
            "argv": [record.command] if record.command else sys.argv,
            "specdec_bench_version": None,
            **environment,
            "checkpoint": _checkpoint(facts.location),
            "timestamp": record.created_at,
        }
    )


def _checkpoint(location: str | None) -> dict[str, Any]:
    """Identity of a local model folder: its size, and the hash of its index file (else of config.json)."""
    found: dict[str, Any] = {"path": location, "size_bytes": None, "index_sha256": None, "index_source": None}
    folder = Path(location) if location else None
    if folder is None or not folder.is_dir():
        return found
    found["size_bytes"] = sum(path.stat().st_size for path in files_below(folder))
    for name in ("model.safetensors.index.json", "config.json"):
        if (folder / name).is_file():
            return {**found, "index_sha256": sha256_file(folder / name), "index_source": name}
    return found


def _questions(record: RunRecord) -> dict[str, list[RequestRecord]]:
    found: dict[str, list[RequestRecord]] = {}
    for request in sorted(record.of("speculative"), key=lambda r: r.turn):
        found.setdefault(request.question_id, []).append(request)
    return found


def _chunks(request: RequestRecord) -> Iterator[int]:
    """New tokens of each streamed chunk: the prefill token, then what each step emitted."""
    yield len(request.token_ids) - sum(step.emitted for step in request.steps)
    yield from (step.emitted for step in request.steps)


def _times(request: RequestRecord) -> list[float]:
    """Time stamps on the arm's clock: request start, then the end of each chunk."""
    return [request.start_s + t for t in (0.0, request.ttft_s, *(step.at_s for step in request.steps))]


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    data = np.asarray(values, dtype=np.float64)
    named = {"min": data.min(), "max": data.max(), "mean": data.mean(), "std": data.std()}
    quantiles = {str(q): f"{np.quantile(data, q):.4f}" for q in (0.25, 0.5, 0.75)}
    return {**{name: f"{value:.4f}" for name, value in named.items()}, "quantiles": quantiles}


def _response(prompt: Prompt, turns: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "question_id": prompt.question_id,
        "category": prompt.category,
        "turns": list(prompt.turns),
        "choices": [{"index": 0, "turns": [turn.text for turn in turns]}],
    }


def _redact(value: Any, name: str = "") -> Any:
    if _SECRET.search(name) and name not in _PLAIN_NAMES:
        return "***REDACTED***"
    if isinstance(value, dict):
        return {key: _redact(part, key) for key, part in value.items()}
    return [_redact(part) for part in value] if isinstance(value, list) else value


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    try:
        runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON, so nothing can be appended: {error}", where=str(path)) from error
    if not isinstance(runs, list):
        raise ConfigError(
            "holds no list, so nothing can be appended",
            where=str(path),
            hint="move it away, or use another folder",
        )
    write_atomic(path, _json([*runs, entry]))


def _json(value: Any) -> str:
    return json.dumps(value, indent=4, ensure_ascii=False) + "\n"
