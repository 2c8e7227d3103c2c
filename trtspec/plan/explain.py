"""A plan in words and pictures for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from math import log10

from trtspec.plan.result import Plan
from trtspec.plan.search import Point
from trtspec.plan.tiles import draft_lengths_by_tiles

WIDTH = 100
_TERMS = {
    "linear": "the linear layers: more rows cost matrix-multiply time",
    "attention": "attention: more query rows cost further tiles or keys",
    "recurrent": "recurrent state: every token's state is kept for the roll-back",
    "communication": "all-reduce traffic between tensor-parallel ranks",
    "launch": "kernel launches",
    "draft": "the drafter's own time",
    "measured": "the measured step time, which grows with the rows",
    "acceptance": "acceptance: a longer draft would cost almost nothing and still bring too little",
    "acceptance data": "the acceptance data: it ends here, and longer drafts would be a guess",
    "limit": "the drafter's own limit: it cannot draft further",
    "no drafter": "there is no drafter",
}


def explain(plan: Plan) -> str:
    """The whole explanation, sections separated by blank lines."""
    sections = (
        _decision(plan),
        _roofline(plan),
        _staircase(plan),
        _curve(plan),
        _candidates(plan),
        _ranking(plan),
        _batches(plan),
        _memory(plan),
        _list("Parallelism", tuple(f"{name}: {why}" for name, why in plan.parallelism.items())),
        _list("What would change the decision", plan.changes),
        _list("Notes", plan.notes),
        _list("Warnings", plan.warnings),
        _sources(plan),
    )
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section)))


def summary(plan: Plan) -> str:
    """One line: what is built and what it is expected to give."""
    chosen = plan.chosen
    if plan.method == "none":
        return f"plain decoding: {chosen.tokens_per_s:,.1f} tokens/s at batch {chosen.batch}"
    return (
        f"{plan.method}, draft length {plan.draft_length}: {chosen.speedup:.2f}× plain decoding at batch "
        f"{chosen.batch} "
        f"({chosen.tokens_per_s:,.1f} tokens/s), decided by {plan.binding}"
    )


def _decision(plan: Plan) -> Iterator[str]:
    d, chosen = plan.deployment, plan.chosen
    facts = d.facts
    size = f"{facts.parameters / 1e9:.3g}B parameters" if facts.parameters else "parameters not known"
    ranks = f", {d.tensor_parallel} ranks" if d.tensor_parallel > 1 else ""
    yield (
        f"{facts.model_type or 'model'}: {facts.layers} layers, {size}, G = {facts.group} on "
        f"{d.device.name}{ranks} ({d.backend})"
    )
    yield _title("Decision")
    yield from _wrap(summary(plan), "  ")
    if plan.method != "none":
        yield (
            f"  {chosen.acceptance_length:.2f} tokens per {chosen.step.total * 1e3:.2f} ms step; "
            f"{chosen.itl_ms:.2f} ms between tokens"
        )
    yield from _wrap(f"decided by {_TERMS.get(plan.binding, plan.binding)}", "  ")
    if plan.curve is not None:
        yield from _wrap(f"acceptance: {plan.curve.source}", "  ")


def _roofline(plan: Plan) -> Iterator[str]:
    r, device = plan.roofline, plan.deployment.device
    yield _title("Roofline")
    yield (
        f"  weights {_bytes(r.weight_bytes)} + cache {_bytes(r.cache_bytes)} over "
        f"{_bytes(device.mem_bw_bytes_per_s)}/s "
        f"= {r.ideal_ms:.2f} ms per plain step at best, {r.ideal_tokens_per_s:,.1f} tokens/s"
    )
    yield (
        f"  attention is {r.attention_share:.0%} of a plain step, compute-bound from {r.free_query_rows:,.0f} "
        "query rows per KV head"
    )
    yield f"  linear layers are compute-bound from {r.ridge_rows:,.0f} rows a step"
    verify = r.rows * (plan.draft_length + 1)
    span = max(4.0, log10(max(r.ridge_rows, verify, 10.0)) * 1.15)
    line = ["─"] * 72
    for rows, mark in ((r.ridge_rows, "│"), (r.rows, "○"), (verify, "●")):
        line[min(71, int(log10(max(1.0, rows)) / span * 71))] = mark
    yield f"  rows {''.join(line)}"
    side = "compute-bound" if verify >= r.ridge_rows else "memory-bound"
    yield (
        f"       ○ plain step {r.rows}   ● verify step {verify} ({side})   │ ridge {r.ridge_rows:,.0f}   "
        "(logarithmic)"
    )


def _staircase(plan: Plan) -> Iterator[str]:
    d = plan.deployment
    if not d.attention:
        return
    yield _title("Attention staircase")
    for shape in d.attention:
        group = shape.group_per_rank(d.head_ranks)
        if group is None:
            continue
        kernel, tile_rows, tiles = d.tile_of(shape, plan.draft_length)
        window = f", window {shape.window}" if shape.window else ""
        yield f"  {shape.layers} {shape.kind} layers{window}: G = {group} per rank, {kernel.title}"
        if tile_rows == 1:
            yield "    no tiles: every row adds its own time"
            continue
        steps = list(draft_lengths_by_tiles(group, tile_rows, kernel.rows, 63))[:5]
        if not steps:
            yield f"    M = {tile_rows}: more than 64 drafts fit one tile"
            continue
        stairs = ", ".join(f"{count} up to D = {length}" for count, length in steps)
        yield f"    M = {tile_rows}{' (assumed)' if kernel.assumed else ''}, tiles: {stairs}"
        rows = group * (plan.draft_length + 1)
        used = round(40 * min(1.0, rows / (tiles * tile_rows)))
        yield f"    D = {plan.draft_length}: {'█' * used}{'░' * (40 - used)} {rows} of {tiles * tile_rows} rows"


def _curve(plan: Plan) -> Iterator[str]:
    points = plan.batches[0].points
    if len(points) < 2:
        return
    yield _title(f"Speed-up over plain decoding against draft length, batch {plan.batches[0].batch}")
    yield from (f"  {line}" for line in plot_curve(points, plan.draft_length))


def plot_curve(points: Sequence[Point], chosen: int, height: int = 9, width: int = 66) -> list[str]:
    """A speed-up curve in characters: ● chosen, • predicted, ∘ on extrapolated acceptance, a rule at 1.

    The tail that lies under half of the best is cut off.
    """
    peak = max(p.speedup for p in points)
    last = max(p.draft_length for p in points if p.speedup >= peak / 2 or p.draft_length <= max(16, chosen))
    shown = points[: min(width, last) + 1]
    top = max(1.05, *(p.speedup for p in shown))
    low = min(0.95, *(p.speedup for p in shown))

    def level(value: float) -> int:
        return round((value - low) / (top - low) * (height - 1))

    stretch = max(1, width // len(shown))
    grid = [[" "] * (len(shown) * stretch) for _ in range(height)]
    for column in range(len(grid[0])):
        grid[level(1.0)][column] = "┈"
    for p in shown:
        mark = "●" if p.draft_length == chosen else "∘" if p.extrapolated else "•"
        grid[level(p.speedup)][p.draft_length * stretch] = mark
    lines = []
    for row in range(height - 1, -1, -1):
        value = low + (top - low) * row / (height - 1)
        lines.append(f"{value:5.2f}× ┤{''.join(grid[row]).rstrip()}")
    lines.append("       └" + "─" * len(grid[0]))
    axis = [" "] * (len(grid[0]) + 4)
    for d in range(0, len(shown), max(1, -(-len(shown) // 9))):
        for offset, digit in enumerate(str(d)):
            axis[d * stretch + offset] = digit
    lines.append(f"        {''.join(axis).rstrip()}   D")
    if any(p.extrapolated for p in shown):
        lines.append("        ∘ past the acceptance data: the last rate is repeated, a guess")
    return lines


def _candidates(plan: Plan) -> Iterator[str]:
    yield _title("Candidates")
    yield (
        f"  {'D':>3} {'tokens/step':>11} {'step ms':>9} {'tokens/s':>10} {'speed-up':>8} {'tiles':>6} "
        f"{'fill':>5}  where it comes from"
    )
    for p in plan.candidates:
        if not p.names and p.draft_length > 8:
            continue
        mark = "▶" if p.draft_length == plan.draft_length else " "
        head = (
            f" {mark}{p.draft_length:>3} {p.acceptance_length:>11.2f} {p.step.total * 1e3:>9.3f} "
            f"{p.tokens_per_s:>10,.1f} {p.speedup:>7.2f}× {p.tiles:>6} {p.tile_fill:>5.0%}  "
        )
        names = "; ".join(p.names) + (" (guess)" if p.extrapolated else "")
        first, *rest = textwrap.wrap(names, WIDTH - len(head)) or [""]
        yield (head + first).rstrip()
        yield from (" " * len(head) + line for line in rest)
    terms = plan.chosen.step.terms()
    total = plan.chosen.step.total
    parts = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in sorted(terms.items(), key=lambda item: -item[1])
    )
    yield f"  a step at D = {plan.draft_length}: {parts}"


def _ranking(plan: Plan) -> Iterator[str]:
    if not plan.ranking:
        return
    yield _title(f"Mechanisms (G5) at batch {plan.batches[0].batch}, each at its own best draft length")
    yield f"  {'':12} {'D':>3} {'tokens/step':>11} {'speed-up':>8} {'memory':>9}  why"
    for r in plan.ranking:
        if r.speedup is None:
            yield f"  {r.method:12} {'-':>3} {'-':>11} {'-':>8} {'-':>9}  {r.reason}"
            continue
        memory = _bytes(r.memory_bytes) if r.memory_bytes else "none"
        head = f"  {r.method:12} {r.draft_length:>3} {r.acceptance_length:>11.2f} {r.speedup:>7.2f}× {memory:>9}  "
        lines = textwrap.wrap(f"{r.reason}; training: {r.training}", WIDTH - len(head))
        yield head + lines[0]
        yield from (" " * len(head) + line for line in lines[1:])


def _batches(plan: Plan) -> Iterator[str]:
    yield _title("Draft length by batch size")
    previous = 0
    parts = []
    for batch, length in plan.schedule.entries:
        span = f"{previous + 1}-{batch}" if batch > previous + 1 else f"{batch}"
        parts.append(f"batch {span}: {'plain' if length == 0 else f'D = {length}'}")
        previous = batch
    yield from _wrap("; ".join(parts), "  ")
    if plan.crossover is not None:
        yield (
            f"  from batch {plan.crossover} on plain decoding is at least as fast: serve such load without "
            "speculation"
        )
    elif plan.method != "none":
        yield f"  speculation pays up to batch {max(b for b, _ in plan.schedule.entries)}"
    if plan.draft_length_policy != "fixed":
        followed = {"schedule": "follows this schedule", "adaptive": "adapts D to each request's acceptance"}
        yield f"  the running system {followed[plan.draft_length_policy]}"
    if plan.runtime_schedule:
        yield f"  draft_len_schedule for TensorRT-LLM {plan.backend_version}: {plan.runtime_schedule}"


def _memory(plan: Plan) -> Iterator[str]:
    m = plan.memory
    yield _title("Memory of one rank")
    for name, used in (
        ("weights", m.weight_bytes),
        ("draft", m.draft_bytes),
        ("cache", m.kv_bytes),
        ("draft cache", m.draft_kv_bytes),
    ):
        if used:
            share = min(1.0, used / m.device_bytes)
            yield f"  {name:12} {'█' * max(1, round(share * 50)):50} {_bytes(used):>9} of {_bytes(m.device_bytes)}"
    dtypes = f"cache {m.kv_dtype}" + (f", draft cache {m.draft_kv_dtype}" if m.draft_kv_dtype else "")
    yield (
        f"  {m.sequence_tokens:,} tokens a sequence ({_bytes(m.sequence_bytes)}, {dtypes}); {m.max_batch:,} "
        "sequences fit"
    )


def _list(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield _title(title)
        for item in items:
            yield from _wrap(item, "  · ", "    ")


def _sources(plan: Plan) -> Iterator[str]:
    device = plan.deployment.device
    yield _title("Sources")
    yield from _wrap(f"step times: {plan.step_source}", "  ")
    yield from _wrap(f"{device.name}: {device.source}", "  ")
    if device.assumed:
        yield from _wrap(f"assumed until measured: {', '.join(device.assumed)}", "  ")
    if device.unconfirmed:
        yield from _wrap(f"from data sheets, unconfirmed: {', '.join(device.unconfirmed)}", "  ")


def _title(text: str) -> str:
    return f"{text} {'─' * max(0, WIDTH - len(text) - 1)}"


def _wrap(text: str, first: str, rest: str | None = None) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest if rest is not None else first
    )


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.4g} {unit}"
    return f"{value:.0f} B"
