"""Greedy decoding with every mechanism against greedy decoding without one, token for token, in float32.

    python -m tests.mechanisms.lossless [--tokens 10000] [--only METHOD …] [--form chain|tree]

builds each mechanism's config with unquantized weights, compares, and keeps one row a mechanism and form in
tests/bench/results/lossless-mechanisms.json and .md. A run takes minutes for each row; rows of earlier runs stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.conftest import ROOT
from tests.mechanisms.table import CASES, FORMS, MECHANISMS, Form, decode
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.evaluate.data import load_prompts
from trtspec.evaluate.environment import read_environment
from trtspec.pipeline import build
from trtspec.values import Completion, GenerationRequest, SamplingParams

FLOAT32 = ("target.quantization=none", "target.quantize_lm_head=false")
NEW_TOKENS = 144
RESULTS = ROOT / "tests" / "bench" / "results" / "lossless-mechanisms.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. tokens: compared; drafted, accepted: of the speculative run. different: requests that differ."""

    method: str
    form: Form
    weights: str
    prompts: int
    tokens: int
    steps: int
    drafted: int
    accepted: int
    different: int


def missing(method: str) -> str | None:
    """Why a mechanism cannot be built here; None where it can."""
    absent = [
        f"{path} is not there: {how}" for path, how in MECHANISMS[method].needs if not (ROOT / path).exists()
    ]
    return "; ".join(absent) or None


def build_engine(method: str, out: Path, *overrides: str) -> Path:
    """Build a mechanism's config on the real model into `out`; its engine folder."""
    mechanism = MECHANISMS[method]
    path = ROOT / "build_configs" / f"{mechanism.config}.yaml"
    return build(load_config(path, [*mechanism.overrides, *overrides]), out, until="compile").out / "engine"


def prompts(engine: Path, tokens: int) -> list[GenerationRequest]:
    """First turns of the built-in prompts, as many as give `tokens` tokens at 100 an answer, or all."""
    from trtspec.checkpoints.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(engine)
    texts = [prompt.turns[0] for prompt in load_prompts("builtin").prompts]
    count = min(len(texts), -(-tokens // 100))
    return [
        GenerationRequest(
            str(i),
            tuple(tokenizer.chat([{"role": "user", "content": text}])),
            SamplingParams(max_tokens=NEW_TOKENS),
        )
        for i, text in enumerate(texts[:: max(1, len(texts) // count)][:count])
    ]


def compare(
    method: str, form: Form, engine: Path, requests: Sequence[GenerationRequest], plain: Sequence[Completion]
) -> Row:
    """Decode with a mechanism and hold the tokens against those of plain decoding."""
    drafted = decode(engine, requests, form)
    steps = [step for completion in drafted for step in completion.steps]
    return Row(
        method=method,
        form=form,
        weights=EngineInfo.read(engine).weights,
        prompts=len(requests),
        tokens=sum(len(completion.token_ids) for completion in plain),
        steps=len(steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
        different=sum(d.token_ids != p.token_ids for d, p in zip(drafted, plain, strict=True)),
    )


def markdown(rows: Sequence[Row], machine: str, date: str) -> str:
    """The rows as a table."""
    lines = [
        "# Every mechanism against plain decoding, token for token",
        "",
        f"{date}; SmolLM2-135M-Instruct, float32 weights, on {machine}; first turns of the built-in prompts, greedy, "
        f"at most {NEW_TOKENS} new tokens, eight sequences decoded together, drafts as long as the mechanism makes "
        "them. Chain and tree: a tree mechanism that is given room for one path drafts a chain; a chain mechanism's "
        "chain gets wrong branches beside it. Made by `python -m tests.mechanisms.lossless`.",
        "",
        "| mechanism | form | prompts | tokens | verify steps | drafted | accepted | requests that differ |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r.method} | {r.form} | {r.prompts} | {r.tokens:,} | {r.steps:,} | {r.drafted:,} | {r.accepted:,} "
            f"| {r.different} |"
            for r in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens to compare, at least")
    parser.add_argument("--only", action="append", choices=list(MECHANISMS), metavar="METHOD")
    parser.add_argument("--form", choices=FORMS)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE.json")
    given = parser.parse_args(arguments)
    cases = [
        (m, f) for m, f in CASES if m in (given.only or MECHANISMS) and given.form in (None, f)
    ]  # fmt: skip
    kept = json.loads(given.results.read_text())["rows"] if given.results.is_file() else []
    rows = {(row["method"], row["form"]): Row(**row) for row in kept}
    plain: list[Completion] = []
    for method in dict.fromkeys(m for m, _ in cases):
        if why := missing(method):
            print(f"{method}: skipped, {why}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as place:
            engine = build_engine(method, Path(place) / "build", *FLOAT32)
            requests = prompts(engine, given.tokens)
            own = MECHANISMS[method].own_target
            reference = decode(engine, requests, None) if own or not plain else plain
            plain = plain if own else reference
            for form in (f for m, f in cases if m == method):
                row = rows[method, form] = compare(method, form, engine, requests, reference)
                print(row, flush=True)
                _write(given.results, [rows[case] for case in CASES if case in rows])
    return 1 if any(row.different for row in rows.values()) else 0


def _write(file: Path, rows: Sequence[Row]) -> None:
    machine = read_environment().processor
    file.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(rows, machine, f"{datetime.now(UTC):%Y-%m-%d}"))


if __name__ == "__main__":
    sys.exit(main())
