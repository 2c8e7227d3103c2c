"""The verify kernel against float64: every group size, drafts past two tiles, ragged lengths, poisoned memory."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from trtspec_plugins.interpreter import Interpreter

from tests.plugins.cases import TOLERANCE, Case, expected, launches, run, tensors_of
from trtspec.plan.tiles import mma_key_blocks, mma_tiles

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)


def draft_lengths(group: int, tile: int) -> tuple[int, ...]:
    """D at both ends of the first stair, and past the second tile."""
    return tuple(sorted({0, 1, max(0, tile // group - 1), tile // group, 2 * tile // group + 1}))


def random_case(group: int, draft_length: int, tile: int, salt: str = "") -> Case:
    """Every feature is drawn, with lengths that leave rows and keys of every sequence unused."""
    rng = np.random.default_rng(zlib.crc32(f"{group} {draft_length} {tile} {salt}".encode()))
    batch, rows = int(rng.integers(1, 3)), draft_length + 1
    tokens = (rows, *(int(rng.integers(0, rows + 1)) for _ in range(batch - 1)))
    return Case(
        group=group,
        past=tuple(int(rng.integers(0, 90)) for _ in range(batch)),
        tokens=tokens,
        kv_heads=int(rng.integers(1, 3)),
        block_m=tile,
        block_n=int(rng.choice([32, 64])),
        dtype=str(rng.choice(["fp16", "bf16"])),
        fp8=int(rng.choice([0, 0, 1, 2])),
        page=int(rng.choice([0, 0, 16, 64])),
        tree=bool(rng.integers(0, 2)),
        splits=int(rng.choice([0, 0, 1, 3])),
        padding=int(rng.integers(0, 2)),
        seed=int(rng.integers(0, 2**31)),
    )


def check(case: Case, interpreter: Interpreter) -> None:
    tensors = tensors_of(case)
    got, _ = run(case, tensors, interpreter)
    want = expected(case, tensors)
    worst = np.abs(got - want).max()  # a NaN that was read, or a row that was not written, fails here
    assert worst <= TOLERANCE[case.dtype] * max(np.abs(want).max(), 1e-6), case


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_and_stair(group: int, tile: int, interpreter: Interpreter) -> None:
    for draft_length in draft_lengths(group, tile):
        check(random_case(group, draft_length, tile), interpreter)


BASE = Case(group=4, past=(70, 33), tokens=(9, 5))


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, past=(0, 0), tokens=(1, 7)),  # a cache with nothing before the step
        replace(BASE, past=(0, 0), tokens=(1, 7), tree=True, splits=4),
        replace(BASE, past=(64, 32), tokens=(0, 0)),  # sequences that take no part
        replace(BASE, past=(64, 128)),  # the prefix ends where a key block ends
        replace(BASE, past=(63, 127), tree=True, block_n=64),  # a tree that straddles key blocks
        replace(BASE, past=(65, 31), tokens=(64, 33), tree=True, block_n=64),  # words that straddle them
        replace(BASE, past=(200, 3), splits=8),  # pieces without any key
        replace(BASE, page=16, block_n=64),  # several pages in a block
        replace(BASE, page=64, block_n=16, past=(130, 3)),  # several blocks in a page
        replace(BASE, fp8=1, dtype="bf16"),
        replace(BASE, fp8=2, dtype="bf16"),
        replace(BASE, head_dim=128, block_n=64),
        replace(BASE, group=64, kv_heads=2, tokens=(3, 1)),
    ],
)
def test_the_corners(case: Case, interpreter: Interpreter) -> None:
    check(case, interpreter)


@pytest.mark.parametrize("splits", [0, 3])
def test_rows_of_a_block_see_those_behind_them_too(splits: int, interpreter: Interpreter) -> None:
    """A block-diffusion head's mask is all ones, over tiles and words: no row may end with the last key of its own."""
    case = replace(BASE, past=(70, 0), tokens=(40, 33), tree=True, splits=splits)
    tensors = tensors_of(case)
    tensors["mask"] = torch.full_like(tensors["mask"], -1)
    for b, tokens in enumerate(case.tokens):
        tensors["q"][b, 1:tokens] = tensors["q"][b, :1]
    got, _ = run(case, tensors, interpreter)
    want = expected(case, tensors)
    assert np.abs(got - want).max() <= TOLERANCE[case.dtype] * np.abs(want).max()
    assert all((got[b, :tokens] == got[b, :1]).all() for b, tokens in enumerate(case.tokens))


def test_padding_rows_of_a_piece_weigh_nothing(interpreter: Interpreter) -> None:
    """Rows past q_len once kept a finite log-sum, and the merge of the pieces made them NaN."""
    case = replace(BASE, splits=3, padding=2)
    *_, partial, lse = interpreter.run(launches(case, tensors_of(case))).arguments
    for b, tokens in enumerate(case.tokens):
        assert torch.all(partial[:, b, tokens:] == 0)
        assert torch.all(torch.isneginf(lse[:, b, tokens:]))
        assert torch.all(torch.isfinite(lse[0, b, :tokens]))


def test_rows_of_a_batch_do_not_depend_on_each_other(interpreter: Interpreter) -> None:
    case = replace(BASE, past=(70,), tokens=(9,))
    alone, together = tensors_of(case), tensors_of(BASE)
    for name in "kv":
        together[name][0, :, : alone[name].shape[2]] = alone[name][0]
    together["q"][0] = alone["q"][0]
    first, _ = run(case, alone, interpreter)
    both, _ = run(BASE, together, interpreter)
    assert np.array_equal(first[0], both[0])


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("past", [0, 70, 250])
def test_a_row_does_not_depend_on_the_rows_after_it(past: int, splits: int, interpreter: Interpreter) -> None:
    """Bit for bit: a step with drafts gives what plain decoding gives, whatever the keys are divided into."""
    long = Case(group=4, past=(past,), tokens=(40,), splits=splits)
    tensors = tensors_of(long)
    every, _ = run(long, tensors, interpreter)
    for tokens in (1, 7, 33):
        short = replace(long, tokens=(tokens,))
        shorter = tensors | {"q": tensors["q"][:, :tokens].contiguous()}
        for name in "kv":
            shorter[name] = tensors[name][:, :, : short.values["S"]].contiguous()
        shorter["kv_len"], shorter["q_len"] = tensors["kv_len"] - 40 + tokens, torch.tensor([tokens]).int()
        some, _ = run(short, shorter, interpreter)
        assert np.array_equal(some[0], every[0, :tokens])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("group", GROUPS)
def test_the_planner_counts_what_the_kernel_multiplies(
    group: int, tile: int, tree: bool, interpreter: Interpreter
) -> None:
    """Each (row tile, key block) pair is two products, scores and values, of the tile's full height."""
    for draft_length in draft_lengths(group, tile):
        case = Case(group, past=(41,), tokens=(draft_length + 1,), block_m=tile, tree=tree)
        tensors = tensors_of(case)
        products = interpreter.run(launches(case, tensors)).products
        keys = int(tensors["kv_len"][0])
        pairs = mma_key_blocks(group, draft_length + 1, keys, tile, case.block_n, parents_known=not tree)
        assert len(products) == 2 * pairs
        assert {rows for rows, _, _ in products} == {tile}
        if not tree:  # one block that holds every key leaves nothing to count but the tiles
            products = interpreter.run(launches(replace(case, block_n=512), tensors)).products
            assert len(products) == 2 * mma_tiles(group, draft_length, tile)


def test_pieces_do_no_work_twice(interpreter: Interpreter) -> None:
    case = replace(BASE, past=(300, 10))
    tensors = tensors_of(case)
    whole = interpreter.run(launches(case, tensors)).products
    for splits in (1, 4, 16):
        assert interpreter.run(launches(replace(case, splits=splits), tensors)).products == whole


@pytest.mark.long
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("group", GROUPS)
def test_wide_sweep(group: int, tile: int, interpreter: Interpreter) -> None:
    """Real head sizes and longer caches."""
    for draft_length in (*draft_lengths(group, tile), 3, 2 * tile // group + 7):
        for salt in ("a", "b", "c"):
            case = random_case(group, draft_length, tile, salt)
            rng = np.random.default_rng(case.seed)
            past = tuple(int(rng.integers(0, 600)) for _ in case.past)
            check(replace(case, past=past, head_dim=int(rng.choice([64, 128]))), interpreter)
