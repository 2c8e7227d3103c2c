"""New keys and values in an e4m3 cache: the nearest code of every number, in the right place, and no other byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trtspec_plugins.interpreter import Interpreter, launch_of
from trtspec_plugins.references.kv_append import VALUES, e4m3, kv_append

from tests.plugins.cases import DTYPES

WILD = 0x5A


def appended(
    new: torch.Tensor,
    capacity: int,
    start: list[int],
    q_len: list[int],
    scales: np.ndarray,
    interpreter: Interpreter,
) -> tuple[np.ndarray, np.ndarray]:
    """(keys, values) uint8 [B, HKV, S, d], wild before. new: [2, B, T, HKV, d]; scales: float32 [2, HKV]."""
    _, batch, rows, heads, dim = new.shape
    caches = torch.full((2, batch, heads, capacity, dim), WILD, dtype=torch.uint8)
    tensors = {
        "k_new": new[0], "v_new": new[1], "k": caches[0], "v": caches[1], "k_out": caches[0], "v_out": caches[1],
        "start": torch.tensor(start, dtype=torch.int32), "q_len": torch.tensor(q_len, dtype=torch.int32),
        "k_scale": torch.tensor(scales[0]), "v_scale": torch.tensor(scales[1]),
    }  # fmt: skip
    values = {"B": batch, "T": rows, "S": capacity, "HKV": heads}
    launch = launch_of("kv_append", values, tensors, {"HEAD_DIM": dim, "BLOCK_T": 16})
    *_, keys, stored = interpreter.run(launch).arguments
    return keys.numpy(), stored.numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_ragged_rows_of_any_scale(rows: int, dtype: str, interpreter: Interpreter) -> None:
    rng, heads, dim = np.random.default_rng(rows), 2, 16
    start, q_len = [3, 0, 20], [rows, rows // 2, 0]
    new = torch.tensor(
        rng.standard_normal((2, 3, rows, heads, dim)) * 10 ** rng.uniform(-4, 3, (2, 3, rows, 1, 1))
    )
    new = new.to(DTYPES[dtype])
    scales = rng.uniform(0.01, 2, (2, heads)).astype(np.float32)
    for b, count in enumerate(q_len):
        new[:, b, count:] = float("nan")
    found = appended(new, 64, start, q_len, scales, interpreter)
    wild = np.full((3, heads, 64, dim), WILD, np.uint8)
    for part in range(2):
        expected = kv_append(wild, new[part].float().numpy(), np.array(start), np.array(q_len), scales[part])
        assert np.array_equal(found[part], expected)


def test_every_code_tie_and_neighbour(interpreter: Interpreter) -> None:
    """All e4m3 numbers, the points between them, their float16 neighbours, and what lies past the last."""
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    points = np.concatenate([VALUES, middles, [0.0, 2.0**-10, 449, 464, 480, 1e4, 6e4, np.inf]]).astype(
        np.float16
    )
    around = np.concatenate(
        [points, np.nextafter(points, np.float16(0)), np.nextafter(points, np.float16(np.inf))]
    )
    every = np.concatenate([around, -around])
    every = np.pad(every, (0, -len(every) % 16)).reshape(1, -1, 1, 16)
    new, count = torch.tensor(np.stack([every, every])), every.shape[1]
    keys, values = appended(new, count, [0], [count], np.ones((2, 1), np.float32), interpreter)
    torchs = torch.tensor(every).float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    for found in (keys, values):
        assert np.array_equal(found[0, 0], torchs[0, :, 0])
    assert np.array_equal(e4m3(every), torchs)
