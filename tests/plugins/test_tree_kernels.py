"""Token trees on the device: ancestor bits as the host has them, and the accepted path moved together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trtspec_plugins.interpreter import Interpreter, launch_of
from trtspec_plugins.references.kv_compact import kv_compact
from trtspec_plugins.references.tree_mask import tree_mask
from trtspec_plugins.references.verify_attention import unpack_bits

from tests.plugins.cases import random_tree
from trtspec.verify.tree import TokenTree


def int32(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def masked(parents: np.ndarray, q_len: list[int], interpreter: Interpreter) -> tuple[np.ndarray, np.ndarray]:
    batch, rows = parents.shape
    given = {
        "parents": int32(parents),
        "q_len": int32(q_len),
        "mask": int32(np.full((batch, rows, -(-rows // 32)), 123)),
        "depth": int32(np.full((batch, rows), 55)),
    }
    launch = launch_of("tree_mask", {"B": batch, "T": rows}, given, {"BLOCK_T": 64})
    *_, mask, depth = interpreter.run(launch).arguments
    return mask.numpy(), depth.numpy()


@pytest.mark.parametrize("rows", [1, 2, 8, 31, 32, 33, 64, 128, 200])
def test_ancestors_and_depths(rows: int, interpreter: Interpreter) -> None:
    rng = np.random.default_rng(rows)
    q_len = [rows, rows // 2, 0]
    parents = np.full((3, rows), 99, np.int32)  # parents of padding rows are wild
    for b, count in enumerate(q_len):
        parents[b, :count] = random_tree(rng, count)
    mask, depth = masked(parents, q_len, interpreter)
    wanted_mask, wanted_depth = tree_mask(parents, np.array(q_len))
    assert np.array_equal(mask, wanted_mask)
    assert np.array_equal(depth, wanted_depth)


def test_the_device_and_the_host_agree_on_a_tree(interpreter: Interpreter) -> None:
    tree = TokenTree.merge([[1, 2, 3], [1, 4], [5, 6, 7, 8], [5, 9]])
    parents = np.array([[-1, *(parent + 1 for parent in tree.parents)]], np.int32)  # row 0 is the root
    mask, depth = masked(parents, [len(tree) + 1], interpreter)
    seen = np.array([unpack_bits(row, len(tree) + 1) for row in mask[0]])
    assert np.array_equal(seen[1:, 1:], tree.ancestor_mask())
    assert seen[:, 0].all()
    assert tuple(depth[0, 1:]) == tree.depths


def test_a_parent_that_does_not_come_first_ends_the_climb(interpreter: Interpreter) -> None:
    """A cycle would keep a GPU busy for ever."""
    mask, _ = masked(np.array([[-1, 2, 1]], np.int32), [3], interpreter)
    assert mask[0, :, 0].tolist() == [1, 2, 6]


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("block", [4, 8, 32])
def test_accepted_rows_move_together(page: int, block: int, interpreter: Interpreter) -> None:
    """In place: a block must not overwrite rows that are still to be moved."""
    rng = np.random.default_rng(page + block)
    batch, heads, keys, dim, width = 4, 2, 96, 8, 30
    table = rng.permutation(batch * keys // page).reshape(batch, -1) if page else None
    shape = (batch * keys // page, heads, page, dim) if page else (batch, heads, keys, dim)
    k, v = (rng.integers(-9999, 9999, shape).astype(np.int16) for _ in "kv")
    counts, start = np.array([30, 7, 0, 5]), np.array([20, 3, 60, 40])
    path = np.full((batch, width), 5000, np.int32)  # past path_len: wild
    for b, count in enumerate(counts):
        path[b, :count] = np.sort(rng.choice(np.arange(1, 50), count, replace=False))
    path[3, :5] = [1, 2, 3, 4, 5]  # already in place
    keys_out, values_out = torch.tensor(k), torch.tensor(v)
    given = {
        "k": keys_out,
        "v": values_out,
        "path": int32(path),
        "path_len": int32(counts),
        "start": int32(start),
        "k_out": keys_out,
        "v_out": values_out,
    }
    if table is not None:
        given["block_table"] = int32(table)
    values = {"B": batch, "HKV": heads, "S": keys, "A": width}
    launch = launch_of("kv_compact", values, given, {"HEAD_DIM": dim, "BLOCK_A": block, "PAGE": page})
    *_, k_out, v_out = interpreter.run(launch).arguments
    assert np.array_equal(k_out.numpy(), kv_compact(k, path, counts, start, table))
    assert np.array_equal(v_out.numpy(), kv_compact(v, path, counts, start, table))
