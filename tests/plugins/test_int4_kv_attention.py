"""QuantSpec's two-nibble cache: the draft reads one nibble, the target both, and new tokens stay in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trtspec_plugins.interpreter import Interpreter, launch_of
from trtspec_plugins.references.int4_kv_attention import Quantized, int4_kv_attention, quantize

from tests.plugins.cases import DTYPES, TOLERANCE
from trtspec.engines import hierarchical_kv
from trtspec.plan.tiles import mma_key_blocks

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)

GROUP, DIM, HEADS, KEYS = 32, 16, 2, 96


def stored(quantized: Quantized, dtype: torch.dtype) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
    """With scale and zero as `dtype` holds them, and those two as tensors without the broadcast axis."""
    scale, zero = torch.tensor(quantized.scale).to(dtype), torch.tensor(quantized.zero).to(dtype)
    real = Quantized(quantized.upper, quantized.lower, scale.double().numpy(), zero.double().numpy())
    return real, scale, zero


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_past_two_tiles(group: int, interpreter: Interpreter) -> None:
    """Draft and target, fp16 and bf16 in turn."""
    turn = GROUPS.index(group)
    tokens = (2 * 128 // group + 2, 1, turn)
    check(group, tokens, ("fp16", "bf16")[turn % 2], turn // 2 % 2, interpreter)


@pytest.mark.parametrize("both", [0, 1])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ragged_steps(dtype: str, both: int, interpreter: Interpreter) -> None:
    """Sequences without quantized keys, without drafts, and without part in the step."""
    check(4, (5, 0, 33), dtype, both, interpreter)


def check(group: int, tokens: tuple[int, ...], dtype: str, both: int, interpreter: Interpreter) -> None:
    rng, kind, batch, rows = np.random.default_rng(group), DTYPES[dtype], 3, max(tokens) + 1
    old = (64, 0, 96)
    recent = tuple(count + extra for count, extra in zip(tokens, (3, 0, 40)))
    width = max(recent) + 4

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape)).to(kind)

    def poisoned(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=kind)

    keys, k_scale, k_zero = stored(
        quantize(rng.standard_normal((batch, HEADS, KEYS // GROUP, GROUP, DIM)), -2), kind
    )
    values, v_scale, v_zero = stored(quantize(rng.standard_normal((batch, HEADS, KEYS, DIM)), -1), kind)
    q = poisoned(batch, rows, HEADS * group, DIM)
    k_recent, v_recent = poisoned(batch, HEADS, width, DIM), poisoned(batch, HEADS, width, DIM)
    for b in range(batch):
        q[b, : tokens[b]] = normal(tokens[b], HEADS * group, DIM)
        k_recent[b, :, : recent[b]] = normal(HEADS, recent[b], DIM)
        v_recent[b, :, : recent[b]] = normal(HEADS, recent[b], DIM)
        for scales in (k_scale, k_zero):
            scales[b, :, old[b] // GROUP :] = float("nan")
        for scales in (v_scale, v_zero):
            scales[b, :, old[b] :] = float("nan")
    packed = (batch, HEADS, KEYS, DIM // 2)
    given = {
        "q": q,
        "k_upper": torch.tensor(keys.upper.reshape(packed)),
        "v_upper": torch.tensor(values.upper),
        "k_scale": k_scale[:, :, :, 0].contiguous(),
        "k_zero": k_zero[:, :, :, 0].contiguous(),
        "v_scale": v_scale[..., 0].contiguous(),
        "v_zero": v_zero[..., 0].contiguous(),
        "k_recent": k_recent,
        "v_recent": v_recent,
        "quant_len": torch.tensor(old, dtype=torch.int32),
        "recent_len": torch.tensor(recent, dtype=torch.int32),
        "q_len": torch.tensor(tokens, dtype=torch.int32),
        "out": poisoned(batch, rows, HEADS * group, DIM),
    }
    if both:
        given["k_lower"] = torch.tensor(keys.lower.reshape(packed))
        given["v_lower"] = torch.tensor(values.lower)
    shape = {"B": batch, "T": rows, "S": KEYS, "R": width, "HKV": HEADS, "G": group}
    constants = {"HEAD_DIM": DIM, "BLOCK_M": 128, "BLOCK_N": 32, "SM_SCALE": DIM**-0.5, "GROUP": GROUP}
    constants |= {"BOTH": both, "UPCAST": int(dtype == "bf16")}
    outcome = interpreter.run(launch_of("int4_kv_attention", shape, given, constants))
    got = outcome.arguments[-1].double().numpy()
    want = int4_kv_attention(
        q.double().numpy(),
        keys.values(bool(both)).reshape(batch, HEADS, KEYS, DIM),
        values.values(bool(both)),
        k_recent.double().numpy(),
        v_recent.double().numpy(),
        np.array(old),
        np.array(recent),
        np.array(tokens),
    )
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * np.abs(want).max()
    pairs = (
        sum(  # quantized keys come in whole blocks, so those of the recent ones begin where they would anyway
            mma_key_blocks(group, count, kept + new, 128, 32)
            for count, kept, new in zip(tokens, old, recent)
            if count
        )
    )
    assert len(outcome.products) == 4 * HEADS * pairs  # two halves of scores and of values


def test_the_planes_are_the_bytes_of_the_cpu_engine() -> None:
    """Both engines read one value from one cache: byte · scale + low there, upper and lower code here."""
    values = np.random.default_rng(1).standard_normal((3, 64, 16)).astype(np.float32)
    codes, scale, low = hierarchical_kv.quantize(values, -2)
    planes = quantize(values, -2, np.float64)
    assert np.allclose(planes.values(both=True), codes * scale + low, atol=1e-6)
    draft = (codes | 15) - 15 + hierarchical_kv.HALF  # a lower half with nothing left over
    assert np.allclose(planes.values(both=False), draft * scale + low, atol=1e-6)
    assert (
        np.abs(planes.values(both=True) - values).max() < np.abs(planes.values(both=False) - values).max() / 8
    )
