"""Proof, on the machine that serves, that an engine is what `EngineSpec.exact` claims.

Which kernel runs depends on the processor, so exactness is checked where it is needed: when an engine is
opened, in a fraction of a second, and not only when it was built.
"""

from __future__ import annotations

import numpy as np

from trtspec.engines.base import Engine, SlotStep

_PREFIX = 37
_ROWS = 9


def inexact_steps(engine: Engine) -> list[str]:
    """Descriptions of the steps whose logits differ, bit for bit, from those of one long step; empty when exact.

    Uses slots 0 and 1 (slot 0 alone when the engine has one) and leaves their KV overwritten. Tries the same rows
    one by one, in steps of two to four, behind a prompt split elsewhere, and beside another sequence.
    """
    spec = engine.spec
    room = min(spec.max_seq_len, spec.max_rows)
    rows = min(_ROWS, room // 2)
    prefix = min(_PREFIX, room - rows)
    tokens = np.random.default_rng(20260101).integers(0, spec.tokenizer_vocab_size, prefix + rows)
    engine.forward([SlotStep(0, 0, tokens[:prefix], logits_from=prefix)])
    reference = engine.forward([SlotStep(0, prefix, tokens[prefix:])])[0].logits.copy()

    def differs(*steps: SlotStep) -> bool:
        logits = engine.forward(steps)[0].logits
        start = steps[0].start - prefix
        return not np.array_equal(logits, reference[start : start + len(logits)])

    failures = []
    for size in (1, 2, 3, 4):
        for start in range(0, rows - size + 1, size):
            step = SlotStep(0, prefix + start, tokens[prefix + start : prefix + start + size])
            if differs(step):
                failures.append(f"{size} of {rows} rows at {start}")
    split = prefix // 2
    engine.forward([SlotStep(0, 0, tokens[:split], logits_from=split)])
    engine.forward([SlotStep(0, split, tokens[split:prefix], logits_from=prefix - split)])
    if differs(SlotStep(0, prefix, tokens[prefix:])):
        failures.append(f"a prompt in pieces of {split} and {prefix - split}")
    if spec.max_batch > 1:
        neighbour = SlotStep(1, 0, tokens[: min(5, prefix)])
        if differs(SlotStep(0, prefix, tokens[prefix : prefix + 1]), neighbour):
            failures.append("one row beside another sequence's prompt")
        if differs(SlotStep(0, prefix, tokens[prefix:]), SlotStep(1, 0, tokens[:1])):
            failures.append(f"{rows} rows beside another sequence's single one")
    return failures
