"""Verify steps of a request that a server describes in totals: from its answer, its counters, or its chunks.

A server over HTTP sends text. How often its drafts were accepted it says, if at all, as a histogram: so many steps
accepted 0, 1, 2, … drafts. Steps are rebuilt from that with the right counts; what the totals leave open (the order
of the steps, which of them drafted less) is filled in so that nothing shows that is not there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trtspec.values import StepRecord

_COUNTERS = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a source says of one request: accepted and drafted per step.

    ordered: in the order they happened. shared_out: only the sum of `drafted` is known, and drafts were not all of full
    length; acceptance by position is then approximate, length and rate are not.
    """

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    ordered: bool = False
    shared_out: bool = False


@dataclass(frozen=True, slots=True)
class Counters:
    """vLLM's speculation counters, summed over its engines. accepted_at: by draft position, from the first."""

    drafts: float
    drafted: float
    accepted_at: tuple[float, ...]


def from_answer(event: Mapping[str, Any]) -> Acceptance | None:
    """Acceptance from an event of a stream: vLLM's `metrics.speculative_decoding`, TensorRT-LLM's on a choice, or
    SGLang's `sglext.spec_tokens_details`.

    None where the event has neither, or one that counts no step (some versions send zeros that were never filled in)
    or contradicts itself.
    """
    sglang = (event.get("sglext") or {}).get("spec_tokens_details")
    if isinstance(sglang, dict) and sglang.get("spec_correct_drafts_histogram"):
        return _from_histogram(sglang["spec_correct_drafts_histogram"], sglang["spec_num_proposed_drafts"])
    places = [event.get("metrics"), *(event.get("choices") or ())]
    for place in places:
        found = place.get("speculative_decoding") if isinstance(place, dict) else None
        if not isinstance(found, dict):
            continue
        accepted, drafted = found.get("per_step_accepted"), found.get("per_step_drafted")
        if accepted and drafted and len(accepted) == len(drafted):
            return Acceptance(tuple(accepted), tuple(drafted), ordered=True)
        total = found.get("num_draft_tokens", found.get("total_draft_tokens"))
        histogram = found.get("acceptance_histogram")
        if histogram and total is not None:
            return _from_histogram(histogram, total)
    return None


def read_counters(text: str) -> Counters | None:
    """The counters of a Prometheus page; None where it has no speculation by position."""
    totals = {"drafts": 0.0, "draft_tokens": 0.0}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith(_COUNTERS) or not (sample := _SAMPLE.match(line)):
            continue
        name = sample[1].removeprefix(_COUNTERS).removesuffix("_total")
        if name in totals:
            totals[name] += float(sample[3])
        elif name == "accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', sample[2] or "")
            if position:
                positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(sample[3])
    if not positions:
        return None
    by_position = tuple(positions.get(i, 0.0) for i in range(max(positions) + 1))
    return Counters(totals["drafts"], totals["draft_tokens"], by_position)


def from_counters(before: Counters, after: Counters, tokens: int) -> Acceptance | None:
    """Acceptance of the one request of `tokens` tokens served between two readings.

    None where nothing was drafted, or more than the request can have emitted: it was not alone on the server.
    """
    drafts = round(after.drafts - before.drafts)
    earlier = (*before.accepted_at, *(0.0,) * (len(after.accepted_at) - len(before.accepted_at)))
    reached = [round(a - b) for a, b in zip(after.accepted_at, earlier, strict=True)]
    if drafts <= 0:
        return None
    # Of the drafts, reached[i] had more than i tokens accepted.
    levels = [drafts, *reached, 0]
    found = _from_histogram(
        [more - fewer for more, fewer in pairwise(levels)], round(after.drafted - before.drafted)
    )
    # A stop inside the last accepted draft cuts what was counted, by one whole draft at most.
    if found and sum(found.accepted) + drafts > tokens - 1 + len(reached) + 1:
        return None
    return found


def from_chunks(tokens: Sequence[int], draft_length: int) -> Acceptance | None:
    """Acceptance from the tokens of each chunk after the prefill token, one chunk a step.

    None where a chunk has more tokens than a step can emit: the transport merged steps.
    """
    counts = [count for count in tokens if count]
    if not counts or max(counts) > draft_length + 1:
        return None
    return Acceptance(tuple(count - 1 for count in counts), (draft_length,) * len(counts), ordered=True)


def build_steps(
    found: Acceptance,
    *,
    tokens: int,
    chunks: Sequence[tuple[float, int]],
    first_s: float,
    last_s: float,
    seed: int,
) -> tuple[StepRecord, ...]:
    """Step records of a request of `tokens` tokens, the prefill token among them.

    chunks: (seconds since submit, tokens) of each chunk after the prefill token. Where they are as many as the steps
    they time them, and where their tokens are the steps' own they order them. Otherwise steps stand in an order drawn
    from `seed`, which no trend can be read from, evenly spaced between first_s and last_s. Tokens no draft accounts
    for were plain steps; a last draft cut by a stop emitted less.
    """
    pairs = list(zip(found.accepted, found.drafted, strict=True))
    counts = [count for _, count in chunks]
    missing = tokens - 1 - sum(accepted + 1 for accepted, _ in pairs)
    pairs += [(0, 0)] * max(0, missing)
    if not found.ordered or missing > 0:
        if sorted(counts) == sorted(accepted + 1 for accepted, _ in pairs):
            by_size: dict[int, list[tuple[int, int]]] = {}
            for pair in sorted(pairs):
                by_size.setdefault(pair[0] + 1, []).append(pair)
            pairs = [by_size[count].pop() for count in counts]
        else:
            random.Random(seed).shuffle(pairs)
    emitted = [accepted + 1 for accepted, _ in pairs]
    surplus = max(0, -missing)
    for i in reversed(range(len(emitted))):
        cut = min(surplus, emitted[i] - 1)
        emitted[i] -= cut
        surplus -= cut
    gap = (last_s - first_s) / max(1, len(pairs))
    timed = len(chunks) == len(pairs)
    times = [at for at, _ in chunks] if timed else [first_s + gap * (i + 1) for i in range(len(pairs))]
    return tuple(
        StepRecord(drafted, min(accepted, out), out, at)
        for (accepted, drafted), out, at in zip(pairs, emitted, times, strict=True)
    )


def _from_histogram(histogram: Sequence[int], drafted: int) -> Acceptance | None:
    """Steps of a histogram (index: accepted drafts, bonus token excluded) that drafted so many tokens in all."""
    if any(count < 0 for count in histogram) or not sum(histogram):
        return None
    accepted = [taken for taken, count in enumerate(histogram) for _ in range(count)]
    rest = drafted - sum(accepted)
    if rest < 0:
        return None
    # Who drafted how much is not said: every step gets one refused token first, then all fill up alike. A histogram may
    # end before the draft length, where no step accepted that much.
    lengths, longest = list(accepted), max(len(histogram) - 1, -(-drafted // len(accepted)))
    while rest and min(lengths) < longest:
        for i, length in enumerate(lengths):
            if rest and length < longest:
                lengths[i] += 1
                rest -= 1
    return Acceptance(tuple(accepted), tuple(lengths), shared_out=min(lengths) < longest)
