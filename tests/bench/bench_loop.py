"""The decode loop's own time per step, with an engine that takes none.

    python tests/bench/bench_loop.py [--steps 300]

Prints the median CPU microseconds of a step per sequence for plain and n-gram decoding by context and batch,
at the vocabulary of SmolLM2. The argmax over that vocabulary is part of it. Nothing may grow with the
context.
"""

import argparse
import statistics
import time

import numpy as np

from trtspec.drafters.ngram import NgramDrafter
from trtspec.engines.base import EngineSpec, SlotLogits
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.text import ByteLevelDecoder, StreamingText

VOCABULARY = 49_152


class NullEngine:
    """Returns ready-made logits that prefer a rotating token."""

    def __init__(self, max_batch: int, max_seq_len: int) -> None:
        self.spec = EngineSpec(VOCABULARY, VOCABULARY, max_batch, max_seq_len, max_rows=512)
        rng = np.random.default_rng(0)
        self._logits = rng.standard_normal((64, VOCABULARY)).astype(np.float32)
        self._turn = 0

    def forward(self, steps):
        self._turn = (self._turn + 1) % 7
        return [
            SlotLogits(self._logits[self._turn : self._turn + len(step.tokens) - step.logits_from])
            for step in steps
        ]

    def commit(self, slot, start, rows):
        pass

    def copy(self, source, destination, length):
        pass

    def close(self):
        pass


def measure(context: int, batch: int, drafter, sampling: dict, steps: int) -> float:
    # room for what the first sequences emit while the others' prompts come in
    engine = NullEngine(batch, context + 8 * (steps + batch * context // 512))
    loop = DecodeLoop(
        engine,
        drafter,
        draft_length=5 if drafter else 0,
        open_text=lambda stops: StreamingText(ByteLevelDecoder(lambda token: b"word "), stops),
    )
    rng = np.random.default_rng(1)
    for n in range(batch):
        prompt = tuple((rng.zipf(1.3, context) % VOCABULARY).tolist())
        loop.submit(GenerationRequest(str(n), prompt, SamplingParams(stop=("never",), seed=n, **sampling)))
    started = set()
    while len(started) < batch:
        started.update(delta.request_id for delta in loop.step().deltas)
    assert loop.active == batch
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        loop.step()
        times.append(time.thread_time() - begin)
    return statistics.median(times) / batch * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    samplings = {
        "greedy": {},
        "sampled": {"temperature": 0.8, "top_p": 0.95},
        "penalties": {"presence_penalty": 0.5},
    }
    print(f"{'sampling':<11}{'drafter':<9}{'context':>9}{'batch':>7}{'µs per sequence':>17}")
    for name, sampling in samplings.items():
        for drafter in (None, NgramDrafter):
            for context, batch in ((1024, 1), (32_768, 1), (32_768, 8)):
                taken = measure(context, batch, drafter and drafter(), sampling, steps)
                label = "ngram" if drafter else "none"
                print(f"{name:<11}{label:<9}{context:>9}{batch:>7}{taken:>17.0f}")


if __name__ == "__main__":
    main()
