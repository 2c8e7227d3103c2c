"""The staircase: rows G·(D+1) in tiles of M. A partly filled tile costs a full one; D is never rounded up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.plan.tiles import (
    draft_lengths_by_tiles,
    exact_alignment,
    mma_key_blocks,
    mma_tiles,
    select_kernel,
    select_tile,
    tile_draft_length,
    tile_fill,
)

# Largest D inside one tile, floor(M/G) − 1, as the draft length guide tabulates it; None: one token exceeds the tile.
GUIDE = {
    1: (15, 31, 63, 127),
    3: (4, 9, 20, 41),
    4: (3, 7, 15, 31),
    5: (2, 5, 11, 24),
    7: (1, 3, 8, 17),
    8: (1, 3, 7, 15),
    16: (0, 1, 3, 7),
    32: (None, 0, 1, 3),
    128: (None, None, None, 0),
}


@pytest.mark.parametrize("group", GUIDE)
def test_one_tile_as_the_guide_has_it(group: int) -> None:
    assert tuple(tile_draft_length(group, tile) for tile in (16, 32, 64, 128)) == GUIDE[group]


@pytest.mark.parametrize(
    ("group", "expected"), [(7, 17), (5, 24), (3, 41), (6, 20), (12, 9), (71, 0), (96, 0)]
)
def test_groups_that_do_not_divide_the_tile_take_the_floor(group: int, expected: int) -> None:
    assert tile_draft_length(group) == expected


def test_a_group_of_32_saturates_at_three_drafts() -> None:
    assert tile_draft_length(32) == 3
    assert mma_tiles(32, 3, 128) == 1
    assert mma_tiles(32, 4, 128) == 2


@given(st.integers(1, 128), st.integers(0, 300), st.sampled_from([8, 16, 32, 64, 128]))
def test_tiles_are_the_fewest_that_hold_the_rows(group: int, length: int, tile: int) -> None:
    tiles = mma_tiles(group, length, tile)
    rows = group * (length + 1)
    assert (tiles - 1) * tile < rows <= tiles * tile
    assert tile_fill(group, length, tile) == rows / (tiles * tile)


@given(st.integers(1, 256), st.integers(0, 64), st.sampled_from([8, 16, 64, 128]))
def test_whole_token_kernels_never_need_fewer_tiles(group: int, length: int, tile: int) -> None:
    whole = mma_tiles(group, length, tile, "whole")
    assert whole >= mma_tiles(group, length, tile)
    if group > tile:
        assert whole == (length + 1) * -(-group // tile)


@given(
    st.integers(1, 128),
    st.integers(1, 6),
    st.sampled_from([16, 64, 128]),
    st.sampled_from(["packed", "whole"]),
)
def test_the_largest_draft_of_a_tile_count_is_largest(group: int, tiles: int, tile: int, rows: str) -> None:
    length = tile_draft_length(group, tile, tiles, rows)
    if length is None:
        assert mma_tiles(group, 0, tile, rows) > tiles
    else:
        assert mma_tiles(group, length, tile, rows) <= tiles < mma_tiles(group, length + 1, tile, rows)


def test_stairs_end_at_right_edges() -> None:
    assert list(draft_lengths_by_tiles(4, 128, "packed", 63)) == [(1, 31), (2, 63)]
    assert list(draft_lengths_by_tiles(128, 64, "packed", 3)) == [(2, 0), (4, 1), (6, 2), (8, 3)]


def test_odd_groups_align_exactly_only_at_the_tile_itself() -> None:
    assert exact_alignment(7) == 128
    assert exact_alignment(12) == 32
    assert exact_alignment(8) == 16


@given(st.integers(1, 16), st.integers(1, 40), st.integers(0, 500), st.sampled_from([64, 128]))
def test_work_counter_agrees_with_counting_visible_keys(
    group: int, tokens: int, past: int, tile: int
) -> None:
    """Count, row by row, which 64-key blocks a tile must multiply: those up to the last key its last row sees."""
    kv_length = past + tokens
    rows = [(row // group) for row in range(group * tokens)]
    expected = 0
    for first in range(0, len(rows), tile):
        last_key = past + rows[first : first + tile][-1]
        expected += last_key // 64 + 1
    assert mma_key_blocks(group, tokens, kv_length, tile, 64) == expected
    tree = mma_key_blocks(group, tokens, kv_length, tile, 64, parents_known=False)
    assert tree == mma_tiles(group, tokens - 1, tile) * -(-kv_length // 64)


def test_fp8_cache_with_16_bit_mma_uses_the_small_tile() -> None:
    kernel = select_kernel("tensorrt", "sm_90", 128, latent=False)
    assert select_tile(kernel, 4, 3, 2.0, "bf16") == 128
    assert select_tile(kernel, 4, 3, 1.0, "bf16") == 64
    assert select_tile(kernel, 4, 3, 1.0, "fp8") == 128


@pytest.mark.parametrize(
    ("group", "length", "tile", "tiles"),
    [
        (4, 1, 8, 1),
        (4, 3, 16, 1),
        (4, 7, 32, 1),
        (4, 8, 64, 1),
        (4, 15, 64, 1),
        (4, 16, 64, 2),
        (8, 3, 32, 1),
        (7, 9, 64, 2),
    ],
)
def test_hopper_xqa_swaps_small_row_counts_and_keeps_tokens_whole(
    group: int, length: int, tile: int, tiles: int
) -> None:
    kernel = select_kernel("tensorrt_llm", "sm_90", 128, latent=False)
    assert select_tile(kernel, group, length, 2.0, "bf16") == tile
    assert kernel.count(group, length, tile) == tiles


def test_latent_attention_has_its_own_kernels() -> None:
    assert select_kernel("tensorrt_llm", "sm_100", 576, latent=True).name == "trtllm-gen-mla"
    assert select_kernel("tensorrt_llm", "sm_90", 576, latent=True).latent


def test_an_unknown_kernel_is_the_guides_128_rows_and_says_so() -> None:
    kernel = select_kernel("tensorrt_llm", "sm_70", 128, latent=False)
    assert kernel.assumed
    assert kernel.tiles == (128,)
