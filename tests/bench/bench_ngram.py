"""What drafting by copying costs a step, by context length.

    python tests/bench/bench_ngram.py [--repeats 400] [--draft-length 8]

Prints medians of `observe` (three new tokens) and `propose` in microseconds, and megabytes held by one
sequence. The numbers must not grow with the context.
"""

import argparse
import gc
import statistics
import time
import tracemalloc

import numpy as np

from trtspec.drafters.base import Ask
from trtspec.drafters.ngram import NgramDrafter
from trtspec.drafters.policy import DraftPolicy, StepCost
from trtspec.drafters.suffix import SuffixDrafter
from trtspec.values import GenerationRequest

CONTEXTS = (1_024, 4_096, 16_384, 65_536, 131_072)
NO_STATES = np.empty((0, 0), np.float32)
COST = DraftPolicy(StepCost((1, 2, 16), (8.5, 10.2, 26.9)))
DRAFTERS = {
    "ngram 3..2": lambda: NgramDrafter(max_ngram=3, min_ngram=2, policy=COST),
    "ngram 5..1": lambda: NgramDrafter(max_ngram=5, min_ngram=1, policy=COST),
    "suffix": lambda: SuffixDrafter(policy=COST),
}


def text(length: int) -> list[int]:
    """Zipf-distributed ids with passages copied from earlier, as in editing and summarizing."""
    rng = np.random.default_rng(0)
    tokens = (rng.zipf(1.3, length) % 49_152).tolist()
    for start in range(1000, length - 200, 400):
        source = int(rng.integers(0, start - 200))
        tokens[start : start + 60] = tokens[source : source + 60]
    return tokens


def measure(make, context: int, repeats: int, draft_length: int) -> tuple[float, float, float]:
    tokens = text(context + 3 * repeats)
    drafter = make()
    gc.collect()
    tracemalloc.start()
    state = drafter.open(GenerationRequest("bench", tuple(tokens[:1])), 0)
    drafter.observe(state, tokens[1:context], NO_STATES)
    held = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    observed, proposed = [], []
    for step in range(repeats):
        start = context + 3 * step
        begin = time.perf_counter()
        drafter.propose([Ask(state, draft_length, draft_length)], rows=1)
        middle = time.perf_counter()
        drafter.observe(state, tokens[start : start + 3], NO_STATES)
        proposed.append(middle - begin)
        observed.append(time.perf_counter() - middle)
    return statistics.median(observed) * 1e6, statistics.median(proposed) * 1e6, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--draft-length", type=int, default=8)
    args = parser.parse_args()
    print(f"{'drafter':<12}{'context':>9}{'observe µs':>12}{'propose µs':>12}{'held MB':>9}")
    for name, make in DRAFTERS.items():
        for context in CONTEXTS:
            observe, propose, held = measure(make, context, args.repeats, args.draft_length)
            print(f"{name:<12}{context:>9}{observe:>12.1f}{propose:>12.1f}{held:>9.1f}")


if __name__ == "__main__":
    main()
