"""QuantSpec's draft against its target: acceptance of its two halves apart and together, time of a pass, memory.

    python tests/bench/bench_quantspec.py PROMPTS.jsonl [--prompts 16] [--draft-length 4] [--variants both kv …]

PROMPTS.jsonl: Spec-Bench's questions (`turns`). Builds smollm2-quantspec.yaml in variants (the first time:
minutes), decodes the same prompts greedily with and without drafts, and prints tables. Every text is compared with
plain decoding of its own engine. Times are CPU milliseconds of one thread, which neighbours disturb little.
"""

import argparse
import collections
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.config import load_config
from trtspec.drafters.draft_model import DRAFT_FOLDER
from trtspec.engines.base import SlotStep
from trtspec.engines.hierarchical import HierarchicalEngine, open_cpu_engine
from trtspec.engines.hierarchical_kv import HierarchicalKv
from trtspec.engines.info import EngineInfo
from trtspec.pipeline import build
from trtspec.runtime import Runtime
from trtspec.values import GenerationRequest, SamplingParams

CONFIG = Path(__file__).resolve().parents[2] / "build_configs" / "smollm2-quantspec.yaml"
FLOAT = ["target.quantization=none", "target.quantize_lm_head=false"]
CONTEXT = 1900
BEYOND = 1024  # a group no context here fills twice: the whole cache stays float32
VARIANTS = {
    "both": ("4-bit weights and 4-bit cache, G = 64", FLOAT),
    "both-128": ("the same, G = 128 as in the paper", [*FLOAT, "speculation.kv_group_size=128"]),
    "kv": ("4-bit cache alone, G = 64", [*FLOAT, "speculation.draft_quantization=none"]),
    "weights": ("4-bit weights alone", [*FLOAT, f"speculation.kv_group_size={BEYOND}"]),
    "config": ("as configured: int8 target, 4-bit weights and cache", []),
}


def requests(path: Path, count: int, engine: Path, new_tokens: int) -> list[GenerationRequest]:
    """Prompts spread evenly over the file, whose chat prompts leave room for the answer."""
    texts = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]
    chat = TextTokenizer.load(engine).chat
    prompts = [chat([{"role": "user", "content": text}]) for text in texts[:: max(1, len(texts) // count)]]
    return [
        GenerationRequest(str(i), tuple(prompt), SamplingParams(max_tokens=new_tokens))
        for i, prompt in enumerate(prompts[:count])
        if len(prompt) + new_tokens < 2 * BEYOND
    ]


def decode(engine: Path, asked, draft_length: int | None):
    """draft_length: None decodes plainly."""
    with Runtime.open(
        engine, speculate=draft_length is not None, draft_length=draft_length, max_concurrency=4, threads=1
    ) as runtime:
        return runtime.generate_many(asked)


def acceptance(completions, group: int, least_share: float = 0.0) -> str:
    """Cells of the table, of the steps at which at least this share of the context is in quantized groups."""
    reached, passed = collections.Counter(), collections.Counter()
    steps = drafted = 0
    for completion in completions:
        context = completion.prompt_tokens
        for step in completion.steps:
            quantized = max(0, context // group - 1) * group
            context += step.accepted + 1
            if step.drafted and quantized >= least_share * context:
                steps += 1
                drafted += step.drafted
                for position in range(1, step.drafted + 1):
                    reached[position] += step.accepted >= position - 1
                    passed[position] += step.accepted >= position
    if not steps:
        return "0 | | | "
    accepted = passed.total()
    rates = " ".join(f"{passed[p] / reached[p]:.2f}" for p in sorted(reached) if reached[p])
    return f"{steps} | {accepted / steps + 1:.2f} | {rates} | {accepted / drafted:.3f}"


def fill(engine, tokens: np.ndarray, context: int) -> None:
    """Put `context` tokens into slot 0."""
    for start in range(0, context, engine.spec.max_rows):
        fed = tokens[start : min(start + engine.spec.max_rows, context)]
        engine.forward([SlotStep(0, start, fed, logits_from=len(fed))])


def pass_ms(engine, tokens: np.ndarray, context: int, rows: int) -> float:
    """Median CPU milliseconds of a pass of `rows` rows after `context` tokens."""
    times = []
    for _ in range(9):
        begin = time.process_time()
        engine.forward([SlotStep(0, context, tokens[context : context + rows])])
        times.append(time.process_time() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    folders, texts, asked = {}, {}, []
    with tempfile.TemporaryDirectory() as scratch:
        print(
            "| draft | steps | acceptance length | conditional acceptance | of all drafted | equal to plain |"
        )
        print("|---|---:|---:|---|---:|---|", flush=True)
        for name in args.variants:
            title, overrides = VARIANTS[name]
            folders[name] = build(load_config(CONFIG, overrides), Path(scratch) / name).out / "engine"
            engine = folders[name]
            asked = asked or requests(args.prompts_file, args.prompts, engine, args.new_tokens)
            plain = decode(engine, asked, None)
            drafted = decode(engine, asked, args.draft_length)
            texts[name] = [c.token_ids for c in plain]
            equal = sum(c.token_ids == p.token_ids for c, p in zip(drafted, plain, strict=True))
            group = EngineInfo.read(engine).kv_group
            print(f"| {title} | {acceptance(drafted, group)} | {equal} of {len(asked)} |", flush=True)
            if name != "weights":
                print(
                    f"| those steps with half of the cache in 4 bits | {acceptance(drafted, group, 0.5)} | |",
                    flush=True,
                )
        lengths = sorted(len(r.prompt) for r in asked)
        print(f"\nprompt tokens: {lengths[0]} to {lengths[-1]}, median {statistics.median(lengths)}")
        if {"both", "weights"} <= set(texts):
            same = sum(a == b for a, b in zip(texts["both"], texts["weights"], strict=True))
            print(
                f"plain texts over the 8-bit cache equal to those over a float32 cache: {same} of {len(asked)}"
            )
        reference = build(load_config(CONFIG.with_name("smollm2-float32.yaml")), Path(scratch) / "float32")
        report_passes({"float32 cache": reference.out / "engine", **folders})


def report_passes(folders: dict[str, Path]) -> None:
    print("\n| engine | context | 1 row, CPU ms | 5 rows, CPU ms |\n|---|---:|---:|---:|")
    tokens = np.random.default_rng(0).integers(0, 49_152, 2048)
    sizes = []
    for name, folder in folders.items():
        target = open_cpu_engine(folder, max_batch=1, threads=1)
        engines = {"target": target}
        if target.info.kv_group:
            place = folder / DRAFT_FOLDER
            engines["draft"] = HierarchicalEngine(place, kv=target.kv, max_batch=1, threads=1)
            sizes.append(f"| {name} | {memory(target.kv)} |")
        for context in (256, 1024, CONTEXT):
            fill(target, tokens, context)
            for label, engine in engines.items():
                times = [f"{pass_ms(engine, tokens, context, rows):.1f}" for rows in (1, 5)]
                print(f"| {name}: {label} | {context} | {' | '.join(times)} |", flush=True)
        for engine in engines.values():
            engine.close()
    print(f"\n| {CONTEXT} tokens take | groups | codes and scales, MB | recent rows, MB | as float32, MB |")
    print("|---|---:|---:|---:|---:|", *sizes, sep="\n")


def memory(kv: HierarchicalKv) -> str:
    """Cells of the memory table, of one sequence."""
    groups = max(0, CONTEXT // kv.group - 1)
    scales = (kv.key_scales, kv.key_lows, kv.value_scales, kv.value_lows)
    coded = kv.codes[:, :, :, :, :groups].nbytes + sum(array[:, :, :, :groups].nbytes for array in scales)
    float32 = 4 * CONTEXT * kv.codes[:, :, 0, :, 0, 0].size
    return f"{groups} × {kv.group} | {coded / 1e6:.1f} | {kv.recent.nbytes / 1e6:.1f} | {float32 / 1e6:.1f}"


if __name__ == "__main__":
    main()
