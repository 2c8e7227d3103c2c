"""The attention staircase: how draft tokens fill the row tiles of a verify-attention kernel.

Verifying D drafts gives R = G·(D+1) query rows per KV head. A kernel works in tiles of M rows; a partly filled
tile costs a full one. `mma_tiles` is the one work formula: the planner and the kernels' tests both use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import gcd
from typing import Any, Literal

import yaml

Rows = Literal["packed", "whole"]


def mma_tiles(group: int, draft_length: int, tile_rows: int, rows: Rows = "packed") -> int:
    """Row tiles one KV head of one sequence needs to verify `draft_length` drafts.

    packed: ceil(G·(D+1) / M), a token may straddle tiles. whole: ceil((D+1) / floor(M/G)), a tile holds whole
    tokens; a group larger than the tile takes ceil(G/M) tiles for every token.
    """
    tokens = draft_length + 1
    if rows == "packed":
        return -(-group * tokens // tile_rows)
    per_tile = tile_rows // group
    return -(-tokens // per_tile) if per_tile else tokens * -(-group // tile_rows)


def mma_key_blocks(
    group: int, query_length: int, kv_length: int, tile_rows: int, key_block: int, parents_known: bool = True
) -> int:
    """(row tile, key block) pairs that the packed verify kernel multiplies for one KV head and sequence.

    kv_length counts the new tokens. With a chain (`parents_known`) a tile stops at the last key its last row sees;
    with a tree mask every tile walks all keys. One pair is 4·d·M·key_block FLOP.
    """
    rows = group * query_length
    pairs = 0
    for first in range(0, rows, tile_rows):
        last_token = min(first + tile_rows, rows) - 1
        visible = kv_length - query_length + last_token // group + 1 if parents_known else kv_length
        pairs += -(-visible // key_block)
    return pairs


def tile_fill(group: int, draft_length: int, tile_rows: int, rows: Rows = "packed") -> float:
    """Share of the tiles' rows that hold query rows: 1 − the wasted share."""
    return group * (draft_length + 1) / (mma_tiles(group, draft_length, tile_rows, rows) * tile_rows)


def tile_draft_length(group: int, tile_rows: int = 128, tiles: int = 1, rows: Rows = "packed") -> int | None:
    """The largest D that needs no more than `tiles` tiles; for one tile floor(M/G) − 1.

    None where not even one token fits (the group is larger than the tiles together).
    """
    if rows == "packed":
        tokens = tiles * tile_rows // group
    else:
        per_tile = tile_rows // group
        tokens = tiles * per_tile if per_tile else tiles // -(-group // tile_rows)
    return tokens - 1 if tokens else None


def exact_alignment(group: int, tile_rows: int = 128) -> int:
    """The smallest number of tokens D+1 whose rows fill whole tiles exactly: M / gcd(M, G)."""
    return tile_rows // gcd(tile_rows, group)


def draft_lengths_by_tiles(group: int, tile_rows: int, rows: Rows, limit: int) -> Iterator[tuple[int, int]]:
    """(tiles, largest D of that tile count) for D up to `limit`: the right edge of every stair."""
    tiles = mma_tiles(group, 0, tile_rows, rows)
    previous = None
    while (length := tile_draft_length(group, tile_rows, tiles, rows)) is None or length <= limit:
        if length is not None and length != previous:
            yield tiles, length
            previous = length
        tiles += 1


@dataclass(frozen=True, slots=True)
class TileKernel:
    """A verify-attention kernel. tiles: row tiles it can use. relative_cost: main-loop cost by tile, if stated."""

    name: str
    title: str
    rows: Rows
    tiles: tuple[int, ...]
    choose: str
    swapped: tuple[int, ...]
    relative_cost: tuple[tuple[int, float], ...]
    power_of_two_group: bool
    latent: bool
    max_head_dim: int
    assumed: bool
    source: str

    def count(self, group: int, draft_length: int, tile_rows: int) -> int:
        """Tiles per KV head and sequence with this kernel's way of counting rows."""
        rows = "packed" if tile_rows in self.swapped else self.rows
        return mma_tiles(group, draft_length, tile_rows, rows)


def select_kernel(backend: str, arch: str, head_dim: int | None, latent: bool) -> TileKernel:
    """The kernel of a backend on an architecture; the guide's 128-row kernel, marked assumed, where none is known."""
    for kernel, entry in _kernels():
        fits = backend in entry["backends"] and any(arch.startswith(known) for known in entry["archs"])
        if fits and kernel.latent == latent and (head_dim is None or head_dim <= kernel.max_head_dim):
            return kernel
    return next(kernel for kernel, _ in _kernels() if kernel.name == "benchmarked")


def select_tile(kernel: TileKernel, group: int, draft_length: int, kv_bytes: float, compute: str) -> int:
    """M for this group, draft length and KV element size, by the kernel's own rule.

    compute: precision of the attention MMA; FP8 keys with an FP8 MMA keep the large tile.
    """
    rows = group * (draft_length + 1)
    match kernel.choose:
        case "fp8_kv_small":
            return 64 if kv_bytes < 2 and compute != "fp8" else 128
        case "swapped" if rows <= max(kernel.swapped):
            return min(tile for tile in kernel.swapped if rows <= tile)
        case "query_length":
            return 16 if draft_length + 1 <= 16 else 32
        case "latent_heads":
            return 16 if group <= 32 else 64
        case "cheapest":
            cost = dict(kernel.relative_cost)
            usable = [tile for tile in kernel.tiles if tile >= group] or [max(kernel.tiles)]
            return min(usable, key=lambda tile: (kernel.count(group, draft_length, tile) * cost[tile], tile))
        case _:
            return kernel.tiles[-1]


@cache
def _kernels() -> tuple[tuple[TileKernel, Mapping[str, Any]], ...]:
    text = files("trtspec.plan").joinpath("kernels.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["kernels"]
    return tuple((_kernel(name, entry), entry) for name, entry in table.items())


def _kernel(name: str, entry: Mapping[str, Any]) -> TileKernel:
    return TileKernel(
        name=name,
        title=entry["title"],
        rows=entry["rows"],
        tiles=tuple(entry["tiles"]),
        choose=entry["choose"],
        swapped=tuple(entry.get("swapped", ())),
        relative_cost=tuple(entry.get("relative_cost", {}).items()),
        power_of_two_group=bool(entry.get("power_of_two_group", False)),
        latent=bool(entry.get("latent", False)),
        max_head_dim=int(entry["max_head_dim"]),
        assumed=name == "benchmarked",
        source=entry["source"],
    )


def step_rows(group: int, draft_length: int, tile_rows: int) -> int:
    """Rows T of a verify step with static shapes: D + 1, rounded up to 8 within the row tiles that D + 1 rows take.

    Eight rows are the least a matrix unit multiplies at a time, and within the tiles attention costs the same.
    """
    rows = draft_length + 1
    inside = mma_tiles(group, draft_length, tile_rows) * tile_rows // group
    return max(rows, min(-(-rows // 8) * 8, inside))


def key_splits(sms: int, tiles: int, kv_heads: int, batch: int, kv_length: int, key_block: int = 64) -> int:
    """Pieces that attention divides the keys into, so that its programs fill the multiprocessors: at least 1.

    A piece has four key blocks at the least: below that, merging the pieces costs more than it saves.
    """
    programs = tiles * kv_heads * batch
    return max(1, min(sms // programs, kv_length // (4 * key_block)))
