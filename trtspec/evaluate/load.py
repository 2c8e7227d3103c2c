"""How prompts are sent: a number of conversations at any time, or at times that no answer delays.

In a closed loop a slow server is asked less, which hides how long its users would wait. In an open loop conversations
begin at the times of a Poisson process. Each is timed from its scheduled arrival on, not from when the client sent it,
so that a client that falls behind makes no number look better. Later turns follow when the turn before is answered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from trtspec.errors import ConfigError
from trtspec.evaluate.data import Prompt
from trtspec.evaluate.record import RunSettings


def arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Seconds from the start to each of `count` arrivals; the first n of more arrivals are the n of fewer."""
    return np.random.default_rng(seed).exponential(1 / rate_per_s, count).cumsum().tolist()


def in_blocks(prompts: Sequence[Prompt], settings: RunSettings) -> list[Sequence[Prompt]]:
    """The prompts in the blocks that arms serve in turns.

    Closed loop: one prompt a block at concurrency 1, else two for each request in flight. Open loop: all in one block,
    as a queue that is drained after every few prompts is never the queue of that rate; those that arrive after the
    time limit are left out. Raises ConfigError when none arrives before it.
    """
    if settings.rate_per_s is None:
        size = 1 if settings.concurrency == 1 else 2 * settings.concurrency
        return [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
    if settings.time_limit_s is not None:
        due = arrivals(len(prompts), settings.rate_per_s, settings.seed)
        prompts = prompts[: bisect_left(due, settings.time_limit_s)]
        if not prompts:
            raise ConfigError(
                f"the first prompt arrives after {due[0]:.3g} s, past the time limit of {settings.time_limit_s:g} s",
                where="evaluation.time_limit_s",
                hint="raise the time limit or the rate",
            )
    return [prompts]
