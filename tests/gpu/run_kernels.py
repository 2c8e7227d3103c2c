"""Every kernel on the card: correct, and how fast. Needs torch, triton and numpy, nothing else, and four minutes.

    python tests/gpu/run_kernels.py                what it finds, and a table; $OUT/kernels.json where OUT is a folder
    python tests/gpu/run_kernels.py --dry-run      the same code on a CPU: Triton interprets, shapes are small

Correctness: each operator of `torch.ops.trtspec` on the device against its own CPU reference (float64, NumPy).
Speed: a verify step of D drafts for G = 4 and 8 over 4k to 64k keys, as many sequences as make 64k keys in all, so
that the cache is larger than any L2. Bandwidth counts K and V once; the ceiling is the fastest read or copy that
PyTorch does on this card. SDPA gets the same step: grouped heads, and the step's causal mask as a bias. Times are
medians of CUDA graph replays, so launches cost what they do in an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from trtspec_plugins import torch_ops  # noqa: E402
from trtspec_plugins.references.int4_kv_attention import quantize  # noqa: E402

DEVICE = "cpu" if DRY_RUN else "cuda"
HEAD_DIM, KV_HEADS = (16, 1) if DRY_RUN else (128, 8)
TOTAL_KEYS = 192 if DRY_RUN else 65536
KV_LENGTHS = (96,) if DRY_RUN else (4096, 16384, 65536)
DRAFTS = (0, 7) if DRY_RUN else (0, 7, 15, 31, 63)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2}  # of the largest output


def moved(value: object) -> object:
    return value.to(DEVICE, copy=True) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Check:
    """One comparison. error: the largest, as a share of the largest output; exact outputs must have none."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Timing:
    """One verify step of the kernel. Seconds; bandwidth in bytes/s of K and V read once; None where it failed."""

    group: int
    keys: int
    batch: int
    drafts: int
    tile_rows: int
    splits: int
    seconds: float
    bandwidth: float
    sdpa_seconds: float | None


def attention_step(
    group: int,
    batch: int,
    rows: int,
    keys: int,
    dtype: torch.dtype = torch.float16,
    dim: int = HEAD_DIM,
    heads: int = KV_HEADS,
    ragged: bool = True,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Arguments of verify_attention on the CPU. Where lengths are ragged, what a kernel must not read is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = normal(batch, rows, heads * group, dim)
    k, v = normal(batch, heads, keys, dim), normal(batch, heads, keys, dim)
    q_len = torch.full((batch,), rows, dtype=torch.int32)
    kv_len = torch.full((batch,), keys, dtype=torch.int32)
    if ragged:
        q_len = torch.randint(0, rows + 1, (batch,), generator=generator, dtype=torch.int32)
        kv_len = q_len + torch.randint(0, keys - rows + 1, (batch,), generator=generator, dtype=torch.int32)
        for b in range(batch):
            k[b, :, kv_len[b] :] = v[b, :, kv_len[b] :] = float("nan")
    return {"q": q, "k": k, "v": v, "kv_len": kv_len, "q_len": q_len}


def paged(step: dict[str, torch.Tensor], page: int) -> dict[str, torch.Tensor]:
    """The same step with its caches cut into shuffled pages."""
    batch, heads, keys, dim = step["k"].shape
    count = keys // page
    table = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    cut = dict(step)
    for name in ("k", "v"):
        pages = step[name].view(batch, heads, count, page, dim).transpose(1, 2).reshape(-1, heads, page, dim)
        shuffled = torch.empty_like(pages)
        shuffled[table.long()] = pages
        cut[name] = shuffled
    return {**cut, "block_table": table.view(batch, count)}


def as_fp8(step: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    heads = step["k"].shape[1]
    scale = torch.linspace(0.5, 1.5, heads)
    caches = {name: step[name].to(torch.float8_e4m3fn) for name in ("k", "v")}
    return {**step, **caches, "k_scale": scale, "v_scale": scale.flip(0).contiguous()}


def attention_cases() -> Iterator[tuple[str, dict[str, object]]]:
    small = DRY_RUN
    groups = (3, 4) if small else (1, 3, 4, 7, 8, 16)
    drafts = (0, 5) if small else (0, 7, 31, 40, 127)
    keys = 64 if small else 320
    for group in groups:
        for length in drafts if group in (3, 4) else drafts[:3]:
            dtype = torch.float16 if (group + length) % 2 else torch.bfloat16
            yield f"G={group} D={length} {str(dtype)[6:]}", attention_step(group, 3, length + 1, keys, dtype)
    rows = 6 if small else 33
    step = attention_step(4, 2, rows, keys)
    parents = torch.tensor(np.random.default_rng(0).integers(0, np.maximum(1, np.arange(rows)), (2, rows)))
    parents[:, 0] = -1
    mask, _ = torch.ops.trtspec.tree_mask(parents.int(), step["q_len"])
    yield "tile of 64 rows", {**step, "tile_rows": 64}
    yield "3 splits", {**step, "splits": 3}
    yield "pages of 64", paged(attention_step(4, 2, rows, keys), 64 if not small else 16)
    yield "token tree", {**step, "mask": mask}
    yield "token tree, pages, 2 splits", {**paged(step, 64 if not small else 16), "mask": mask, "splits": 2}
    yield "e4m3 cache", as_fp8(step)
    yield "e4m3 cache, 64 rows, 2 splits", {**as_fp8(step), "tile_rows": 64, "splits": 2}
    if not small:
        yield "head of 64", attention_step(4, 2, rows, keys, dim=64)
        yield "one tile exactly, G=4 D=31, 4k keys", attention_step(4, 1, 32, 4096, heads=2)


def attempt(name: str, limit: float, error: Callable[[], float]) -> Check:
    """A check whose kernel may not even launch: one that fails must not cost the others their time on the card."""
    try:
        found = error()
    except Exception as failure:
        print(f"  {name}: {type(failure).__name__}: {failure}".splitlines()[0])
        found = float("inf")
    return Check(name, found if found == found else float("inf"), limit)


def share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error as a share of the largest output."""
    difference = (found.cpu().double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1e-9))


def check_attention() -> Iterator[Check]:
    for name, step in attention_cases():

        def error(step: dict[str, object] = step) -> float:
            expected = torch.ops.trtspec.verify_attention(**step)
            return share(
                torch_ops.verify_attention(**{key: moved(value) for key, value in step.items()}), expected
            )

        yield attempt(f"verify_attention {name}", TOLERANCE[step["q"].dtype], error)
    for tile_rows in (128, 64):
        name = f"verify_attention M={tile_rows}, rows alone and together, bit for bit"
        yield attempt(name, 0.0, lambda rows=tile_rows: rows_alone(rows))
    for both in (True, False):

        def error(both: bool = both) -> float:
            step = two_nibbles(both)
            expected = torch.ops.trtspec.int4_kv_attention(*step)
            return share(torch_ops.int4_kv_attention(*map(moved, step)), expected)

        yield attempt(f"int4_kv_attention, {'8-bit target' if both else '4-bit draft'}", 2e-3, error)


def rows_alone(tile_rows: int) -> float:
    """0 where a row among the rows of a step is, bit for bit, the row alone: what an exact engine takes from it."""
    rows, keys = (6, 90) if DRY_RUN else (32, 1000)
    step = {name: moved(value) for name, value in attention_step(4, 1, rows, keys, ragged=False).items()}
    together = torch_ops.verify_attention(**step, tile_rows=tile_rows)
    alone = []
    for row in range(rows):
        lengths = {"kv_len": step["kv_len"] - (rows - 1 - row), "q_len": torch.ones_like(step["q_len"])}
        one = {**step, **lengths, "q": step["q"][:, row : row + 1]}
        alone.append(torch_ops.verify_attention(**one, tile_rows=tile_rows))
    return 0.0 if torch.equal(together, torch.cat(alone, dim=1)) else 1.0


def two_nibbles(both: bool) -> tuple[torch.Tensor | None, ...]:
    rng = np.random.default_rng(0)
    group, groups, rows, recent, dim = (64, 1, 3, 9, 16) if DRY_RUN else (128, 3, 16, 40, HEAD_DIM)
    heads, per_head = 2, 4
    key = quantize(rng.standard_normal((2, heads, groups, group, dim)), axis=-2)
    value = quantize(rng.standard_normal((2, heads, groups * group, dim)), axis=-1)

    def plane(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(2, heads, groups * group, dim // 2)))

    def half(values: np.ndarray, *shape: int) -> torch.Tensor:
        return torch.tensor(values.reshape(shape)).half()

    by_channel, by_token = (2, heads, groups, dim), (2, heads, groups * group)
    lengths = [
        torch.tensor(v, dtype=torch.int32) for v in ([groups * group, 0], [recent, rows], [rows, rows - 1])
    ]
    new = torch.tensor(rng.standard_normal((2, 2, heads, recent, dim))).half()
    q = torch.tensor(rng.standard_normal((2, rows, heads * per_head, dim))).half()
    return (
        q,
        plane(key.upper), plane(key.lower) if both else None, half(key.scale, *by_channel), half(key.zero, *by_channel),
        plane(value.upper), plane(value.lower) if both else None, half(value.scale, *by_token),
        half(value.zero, *by_token), *new, *lengths,
    )  # fmt: skip


def check_tokens() -> Iterator[Check]:
    rng = np.random.default_rng(2)
    vocabulary, rows, batch = (17, 4, 3) if DRY_RUN else (32000, 16, 8)
    # Few likely tokens, drafted likely: of 32000 equal ones none would ever be accepted.
    p, q = (
        torch.tensor(rng.dirichlet(np.full(vocabulary, 0.05), (batch, rows)), dtype=torch.float32)
        for _ in "pq"
    )
    tokens = p.argmax(-1).roll(1, 1).int()
    q_len = torch.tensor(rng.integers(0, rows + 1, batch), dtype=torch.int32)
    seed = torch.tensor(rng.integers(-(2**31), 2**31, (batch, 2)), dtype=torch.int32)
    position = torch.tensor(rng.integers(0, 1000, batch), dtype=torch.int32)
    one_hot = torch.nn.functional.one_hot(p.argmax(-1), vocabulary).float()
    greedy = (one_hot, None, tokens, q_len, seed, position)
    yield exact("spec_accept, sampled", "spec_accept", p, q, tokens, q_len, seed, position, 2)
    yield exact("spec_accept, deterministic drafts", "spec_accept", p, None, *greedy[2:])
    yield exact("spec_accept, greedy", "spec_accept", *greedy, 3)

    count = 9 if DRY_RUN else 128
    parents = torch.tensor(rng.integers(0, np.maximum(1, np.arange(count)), (3, count)), dtype=torch.int32)
    parents[:, 0] = -1
    lengths = torch.tensor([count, count // 2, 0], dtype=torch.int32)
    yield exact("tree_mask", "tree_mask", parents, lengths)

    caches = torch.randn((2, 3, 2, 32 if DRY_RUN else 256, HEAD_DIM)).half()
    path = torch.tensor([[2, 5, 6], [1, 2, 9], [1, 1, 1]], dtype=torch.int32)
    where = (path, torch.tensor([3, 2, 0], dtype=torch.int32), torch.tensor([10, 0, 4], dtype=torch.int32))
    yield in_place("kv_compact", "kv_compact", caches[0], caches[1], *where)

    stored = torch.zeros(caches.shape, dtype=torch.uint8)
    new = 100 * torch.randn((2, 3, 5, 2, HEAD_DIM)).to(torch.bfloat16)
    places = (torch.tensor([10, 0, 4], dtype=torch.int32), torch.tensor([5, 3, 0], dtype=torch.int32))
    yield in_place("kv_append", "kv_append", stored[0], stored[1], *new, *places, *torch.rand((2, 2)) + 0.1)

    text = torch.tensor(rng.integers(0, 4, (4, 40 if DRY_RUN else 8192)), dtype=torch.int32)
    width = text.shape[1]
    ends = torch.tensor([width, width - 3, 7, 1], dtype=torch.int32)
    yield exact("ngram_lookup", "ngram_lookup", text, ends, 10, 2, 8, 3)


def exact(name: str, kernel: str, *arguments: object) -> Check:
    def error() -> float:
        expected = getattr(torch.ops.trtspec, kernel)(*arguments)
        found = getattr(torch_ops, kernel)(*map(moved, arguments))
        return 0.0 if all(torch.equal(f.cpu(), e) for f, e in zip(found, expected, strict=True)) else 1.0

    return attempt(name, 0.0, error)


def in_place(name: str, kernel: str, k: torch.Tensor, v: torch.Tensor, *rest: object) -> Check:
    def error() -> float:
        on_card, expected = [moved(k), moved(v)], [k.clone(), v.clone()]
        getattr(torch_ops, kernel)(*on_card, *map(moved, rest))
        getattr(torch.ops.trtspec, kernel)(*expected, *rest)
        return 0.0 if all(torch.equal(f.cpu(), e) for f, e in zip(on_card, expected)) else 1.0

    return attempt(name, 0.0, error)


def seconds_of(function: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of one call, replayed from a CUDA graph. The dry run times one call."""
    if DRY_RUN:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]
    for first, last in events:
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events) / 1e3


def ceiling() -> float:
    """Bytes/s of the fastest of a read and a copy of 2 GiB."""
    count = (1 << 12) if DRY_RUN else (1 << 30)
    source = torch.zeros(count, dtype=torch.float16, device=DEVICE)
    target = torch.empty_like(source)
    read = 2 * count / seconds_of(lambda: torch.sum(source, dtype=torch.float32))
    return max(read, 4 * count / seconds_of(lambda: target.copy_(source)))


def time_steps(deadline: float) -> Iterator[Timing]:
    processors = 1 if DRY_RUN else torch.cuda.get_device_properties(0).multi_processor_count
    for keys in KV_LENGTHS:
        for group in (4, 8):
            batch = max(1, TOTAL_KEYS // keys)
            full = attention_step(group, 1, max(DRAFTS) + 1, keys, torch.bfloat16, ragged=False)
            cache = {name: moved(full[name]).repeat(batch, 1, 1, 1) for name in ("k", "v")}
            for drafts in DRAFTS:
                if time.monotonic() > deadline:
                    return
                rows = drafts + 1
                step = {
                    "q": moved(full["q"][:, :rows]).repeat(batch, 1, 1, 1), **cache,
                    "kv_len": torch.full((batch,), keys, dtype=torch.int32, device=DEVICE),
                    "q_len": torch.full((batch,), rows, dtype=torch.int32, device=DEVICE),
                }  # fmt: skip
                sdpa = time_sdpa(step, group)
                for tile_rows in (128, 64):
                    tiles = -(-group * rows // tile_rows)
                    splits = max(1, processors // (tiles * KV_HEADS * batch))
                    options = {"splits": splits, "tile_rows": tile_rows}
                    seconds = seconds_or_none(
                        f"verify_attention, G={group}, D={drafts}, M={tile_rows}",
                        lambda s=step, o=options: torch_ops.verify_attention(**s, **o),
                    )
                    if seconds is not None:
                        bandwidth = 4 * batch * KV_HEADS * keys * HEAD_DIM / seconds
                        what = (group, keys, batch, drafts, tile_rows, splits)
                        yield Timing(*what, seconds, bandwidth, sdpa)


def time_sdpa(step: dict[str, torch.Tensor], group: int) -> float | None:
    """The same step with PyTorch's own attention; None where no backend takes it."""
    rows, keys = step["q"].shape[1], step["k"].shape[2]
    seen = torch.arange(keys, device=DEVICE) <= keys - rows + torch.arange(rows, device=DEVICE)[:, None]
    q = step["q"].transpose(1, 2)

    def attend() -> torch.Tensor:
        mask = None if rows == 1 else seen
        return scaled_dot_product_attention(q, step["k"], step["v"], attn_mask=mask, enable_gqa=group > 1)

    return seconds_or_none(f"SDPA, G={group}, {rows} rows", attend)


def seconds_or_none(name: str, function: Callable[[], object]) -> float | None:
    try:
        return seconds_of(function)
    except Exception as failure:  # as in `attempt`
        print(f"  {name}: {type(failure).__name__}: {failure}".splitlines()[0])
        return None


def table(timings: list[Timing], peak: float) -> Iterator[str]:
    yield f"ceiling {peak / 1e12:.2f} TB/s, bf16, {KV_HEADS} KV heads, head {HEAD_DIM}; times in µs, of M=128 / M=64"
    yield "   keys  batch  G   D |     kernel time | TB/s of best | of ceiling |    SDPA | SDPA / best"
    steps = {}
    for timing in timings:
        steps.setdefault((timing.keys, timing.batch, timing.group, timing.drafts), {})[timing.tile_rows] = (
            timing
        )
    for (keys, batch, group, drafts), by_tile in steps.items():
        best = min(by_tile.values(), key=lambda timing: timing.seconds)
        both = " / ".join(f"{t.seconds * 1e6:7.1f}" for t in by_tile.values())
        sdpa = (
            f"{best.sdpa_seconds * 1e6:7.1f} | {best.sdpa_seconds / best.seconds:10.2f}x"
            if best.sdpa_seconds
            else "      - |"
        )
        yield (
            f"{keys:7} {batch:6} {group:2} {drafts:3} | {both:>15} | {best.bandwidth / 1e12:12.2f} | "
            f"{best.bandwidth / peak:9.0%}  | {sdpa}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, in Triton's interpreter, with small shapes"
    )
    parser.add_argument("--seconds", type=float, default=210, help="timing stops after this long")
    options = parser.parse_args()
    if DRY_RUN:
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, in which the interpreter computes
    began = time.monotonic()
    print(
        "device:", "CPU, interpreted" if DRY_RUN else torch.cuda.get_device_name(), "torch", torch.__version__
    )
    checks = []
    for check in (*check_attention(), *check_tokens()):
        checks.append(check)
        print(
            f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.error:.2e}, limit {check.limit:.0e}",
            flush=True,
        )
    failed = [check for check in checks if not check.passed]
    print(
        f"{len(failed)} of {len(checks)} checks failed"
        if failed
        else f"all kernels agree ({len(checks)} checks)"
    )
    peak = ceiling()
    timings = list(time_steps(began + options.seconds))
    print("\n".join(table(timings, peak)))
    if out := os.environ.get("OUT"):
        found = {
            "checks": [asdict(c) for c in checks],
            "ceiling": peak,
            "timings": [asdict(t) for t in timings],
        }
        (Path(out) / "kernels.json").write_text(json.dumps(found, indent=1))
    print(f"done in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
