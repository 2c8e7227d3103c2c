"""Runs in the files of other tools: a table of requests as CSV or parquet, and prompts as AIPerf takes them.

The table has one row a request, failed ones included, with the settings of its run repeated, so that tables of several
runs are one. Units are in the names; an empty cell (null in parquet) was not measured. `drafted_per_step` and
`accepted_per_step` hold the raw record that every acceptance number can be recounted from.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtspec.errors import ConfigError, SetupError
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.metrics import step_times_ms, token_gap_s
from trtspec.evaluate.record import Failure, RequestRecord, RunRecord
from trtspec.files import write_atomic

AIPERF_FILE = "aiperf_prompts.jsonl"

# Columns of the table by type: texts, whole numbers, numbers, and lists of one value a verify step.
_TEXT = (
    *("run", "created_at", "data", "model", "method", "transport", "acceptance_source", "arm"),
    *("question_id", "category", "finish_reason", "prompt_sha256", "error"),
)
_INTEGER = (
    *("draft_length", "concurrency", "turn", "block", "seed", "prompt_tokens", "cached_tokens"),
    *("output_tokens", "steps", "drafted", "accepted"),
)
_NUMBER = (
    *("rate_per_s", "temperature", "acceptance_length", "start_s", "send_delay_ms", "ttft_ms"),
    *("inter_token_latency_ms", "request_latency_ms"),
)
_STEPS_INTEGER, _STEPS_NUMBER = ("drafted_per_step", "accepted_per_step"), ("step_latency_ms",)
COLUMNS = (*_TEXT, *_INTEGER, *_NUMBER, *_STEPS_INTEGER, *_STEPS_NUMBER)


def write_table(runs: Sequence[RunRecord], path: Path) -> None:
    """Write the requests of runs to a .csv or .parquet file. Lists are separated by spaces in CSV.

    Raises ConfigError for another suffix, SetupError when parquet needs a package that is not here.
    """
    rows = [{**_settings(run), **row} for run in runs for row in _rows(run)]
    if path.suffix == ".csv":
        write_atomic(path, _csv(rows))
    elif path.suffix == ".parquet":
        _write_parquet(rows, path)
    else:
        raise ConfigError("a table is a .csv or a .parquet file", where=str(path))


def aiperf_rows(prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Prompts as AIPerf's SPEED-Bench loader takes them (`--custom-dataset-type speed_bench_qualitative`).

    It wants ids of exactly 32 characters; others become the hash of the id. Prompts with a system message are left out:
    the loader would send it as a turn of its own.
    """
    for prompt in prompts:
        if prompt.system is None:
            given = prompt.question_id
            yield {
                "question_id": given if len(given) == 32 else hashlib.sha256(given.encode()).hexdigest()[:32],
                "category": prompt.category,
                "messages": [{"role": "user", "content": turn} for turn in prompt.turns],
            }


def write_aiperf(prompts: Sequence[Prompt], folder: Path) -> None:
    """Write `folder`/aiperf_prompts.jsonl."""
    lines = (json.dumps(row, ensure_ascii=False) for row in aiperf_rows(prompts))
    write_atomic(folder / AIPERF_FILE, "".join(f"{line}\n" for line in lines))


def _settings(run: RunRecord) -> dict[str, Any]:
    return {
        "run": run.name,
        "created_at": run.created_at,
        "data": run.data.name,
        "model": run.speculative.model,
        "method": run.speculative.method,
        "draft_length": run.speculative.draft_length,
        "transport": run.speculative.transport,
        "acceptance_source": run.speculative.acceptance_source,
        "concurrency": run.settings.concurrency,
        "rate_per_s": run.settings.rate_per_s,
        "temperature": run.settings.temperature,
    }


def _rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    for outcome in (*run.requests, *run.failures):
        asked = {name: getattr(outcome, name) for name in ("arm", "question_id", "category", "turn")}
        yield {**asked, **(_failed(outcome) if isinstance(outcome, Failure) else _finished(outcome))}


def _failed(failure: Failure) -> dict[str, Any]:
    return {"error": failure.message}


def _finished(request: RequestRecord) -> dict[str, Any]:
    steps, tokens = request.steps, len(request.token_ids)
    return {
        "block": request.block,
        "seed": request.seed,
        "finish_reason": request.finish_reason,
        "prompt_sha256": request.prompt_sha256,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": tokens,
        "steps": len(steps),
        "drafted": sum(step.drafted for step in steps),
        "accepted": sum(step.accepted for step in steps),
        "acceptance_length": sum(step.emitted for step in steps) / len(steps) if steps else None,
        "start_s": request.start_s,
        "send_delay_ms": None if request.late_s is None else 1e3 * request.late_s,
        "ttft_ms": 1e3 * request.ttft_s,
        "inter_token_latency_ms": 1e3 * token_gap_s(request) if tokens > 1 else None,
        "request_latency_ms": 1e3 * request.total_s,
        "drafted_per_step": [step.drafted for step in steps],
        "accepted_per_step": [step.accepted for step in steps],
        "step_latency_ms": [ms for _, ms in step_times_ms(request)],
    }


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, map(_cell, value)))
    return round(value, 6) if isinstance(value, float) else value


def _write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise SetupError(
            f"writing parquet needs pyarrow: {error}", where=str(path), hint="pip install 'trtspec[cpu]'"
        ) from error
    kinds = (
        (_TEXT, pyarrow.string()),
        (_INTEGER, pyarrow.int64()),
        (_NUMBER, pyarrow.float64()),
        (_STEPS_INTEGER, pyarrow.list_(pyarrow.int64())),
        (_STEPS_NUMBER, pyarrow.list_(pyarrow.float64())),
    )
    schema = pyarrow.schema([(name, kind) for names, kind in kinds for name in names])
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), path)
