"""Roofline arithmetic against numbers worked out elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.plan.acceptance import expected_tokens
from trtspec.plan.deployment import deploy
from trtspec.plan.devices import device_names, load_device
from trtspec.plan.roofline import (
    allreduce_s,
    compute_bound_draft_length,
    distinct_experts,
    free_rows,
    linear_s,
    memory_bound_s,
    ridge_tokens,
)
from trtspec.plan.step_time import RooflineStepTimes


def test_a_70b_model_in_16_bit_on_an_h100_takes_41_8_ms_a_token() -> None:
    h100 = load_device("h100-sxm")
    seconds = memory_bound_s(140e9, h100.mem_bw_bytes_per_s)
    assert seconds * 1e3 == pytest.approx(41.8, abs=0.05)
    assert 1 / seconds == pytest.approx(24, abs=0.1)


def test_the_same_from_the_models_own_file(published) -> None:
    from trtspec.plan import plan_bare

    plan = plan_bare(
        published("meta-llama--Meta-Llama-3.1-70B"),
        device="h100-sxm",
        tensor_parallel=1,
        context=1,
        method="none",
    )
    assert plan.deployment.stored_bytes == pytest.approx(141e9, rel=0.01)
    assert plan.roofline.ideal_ms == pytest.approx(41.8, rel=0.01)
    assert plan.roofline.ideal_tokens_per_s == pytest.approx(24, rel=0.01)


@pytest.mark.parametrize(
    ("device", "ridge"), [("h100-sxm", 295), ("h200-sxm", 206), ("b200", 281), ("gb300", 312)]
)
def test_published_ridge_points(device: str, ridge: int) -> None:
    assert load_device(device).ridge_flop_per_byte("bf16") == pytest.approx(ridge, abs=0.6)


def test_gb300_fp4_ridge_is_the_corroborated_one() -> None:
    assert load_device("gb300").ridge_flop_per_byte("fp4") == pytest.approx(1875)


@pytest.mark.parametrize(
    ("device", "kv_bytes", "rows"),
    [("h200-sxm", 2, 170), ("h200-sxm", 1, 85), ("b200", 2, 232), ("b200", 1, 116)],
)
def test_free_rows(device: str, kv_bytes: int, rows: int) -> None:
    d = load_device(device)
    assert free_rows(d.achieved_flops("bf16"), d.achieved_bw, kv_bytes) == pytest.approx(rows, abs=0.5)


def test_h200_with_fp8_cache_has_no_free_128_row_tile() -> None:
    d = load_device("h200-sxm")
    assert (
        free_rows(d.achieved_flops("bf16"), d.achieved_bw, 1)
        < 128
        <= free_rows(d.achieved_flops("bf16"), d.achieved_bw, 2)
    )


@pytest.mark.parametrize(
    ("device", "kv_cache", "tile", "costs"),
    [
        ("h200-sxm", "auto", 128, {15: 1.00, 31: 1.00, 32: 1.51, 63: 1.51, 127: 3.02}),
        ("h200-sxm", "fp8", 128, {15: 1.51, 31: 1.51, 63: 3.02, 127: 6.03}),
        ("h200-sxm", "fp8", 64, {15: 1.00, 16: 1.51, 31: 1.51, 32: 2.26, 63: 3.02, 127: 6.03}),
        ("b200", "auto", 128, {15: 1.00, 31: 1.00, 63: 1.11, 127: 2.21}),
    ],
)
def test_attention_cost_relative_to_one_pass(llama_8b, monkeypatch, device, kv_cache, tile, costs) -> None:
    """G = 4, d = 128: the table of the tile cost model, for long contexts where new keys do not count."""
    from trtspec.plan import deployment as module

    monkeypatch.setattr(module, "select_tile", lambda *_: tile)
    deployment = deploy(llama_8b, load_device(device), backend="tensorrt", kv_cache=kv_cache)
    times = RooflineStepTimes(deployment)
    context = 4_000_000
    # One memory-bound pass: K and V once.
    pass_s = 2 * 8 * 128 * context * deployment.kv_element_bytes * 32 / deployment.device.achieved_bw
    for length, cost in costs.items():
        assert times.step(1, length, context).attention / pass_s == pytest.approx(cost, abs=0.008)


@pytest.mark.parametrize(
    ("batch", "length", "relative"),
    [
        (1, 15, 4.86),
        (1, 31, 5.00),
        (4, 31, 5.00),
        (4, 63, 3.31),
        (32, 3, 2.95),
        (32, 7, 3.58),
        (32, 15, 2.96),
        (32, 31, 1.92),
    ],
)
def test_tokens_per_second_of_an_8b_model_on_h200(llama_8b, batch: int, length: int, relative: float) -> None:
    """S = 8192, acceptance 0.8, no drafter and no launches: within the embedding's share of the tabulated values."""
    device = replace(load_device("h200-sxm"), launch_s=0.0)
    times = RooflineStepTimes(deploy(llama_8b, device, backend="tensorrt"))
    gain = (
        expected_tokens(0.8, length)
        * times.step(batch, 0, 8192).total
        / times.step(batch, length, 8192).total
    )
    assert gain == pytest.approx(relative, rel=0.03)


def test_guideline_one_an_eighth_of_the_batch_is_enough_at_seven_drafts() -> None:
    assert compute_bound_draft_length(256.0, 32) == 7
    assert compute_bound_draft_length(256.0, 256) == 0
    assert compute_bound_draft_length(206.0 * 128 / 8, 1) == 206 * 16 - 1


def test_ridge_tokens_scale_with_the_weights_bytes() -> None:
    assert ridge_tokens(1e15, 5e12, 1.0) == ridge_tokens(1e15, 5e12, 2.0) / 2


@given(st.integers(2, 512), st.integers(1, 16), st.integers(1, 4096))
def test_distinct_experts_stay_between_one_tokens_and_all(experts: int, per_token: int, tokens: int) -> None:
    per_token = min(per_token, experts)
    found = distinct_experts(experts, per_token, tokens)
    assert per_token - 1e-9 <= found <= experts + 1e-9
    assert distinct_experts(experts, per_token, 1) == pytest.approx(per_token)


def test_linear_layers_are_free_until_the_ridge_and_add_on_a_cpu() -> None:
    flat = [linear_s(1e9, 2e9, rows, 1e14, 1e12) for rows in (1, 64)]
    assert flat[0] == flat[1] == pytest.approx(2e-3)
    assert linear_s(1e9, 2e9, 640, 1e14, 1e12) > flat[0]
    cpu = [linear_s(1e8, 1e8, rows, 2e11, 2.5e10, overlap=False) for rows in (1, 2, 3)]
    assert cpu[1] - cpu[0] == pytest.approx(cpu[2] - cpu[1]) == pytest.approx(1e-3)


def test_all_reduce_costs_nothing_on_one_rank_and_latency_on_more() -> None:
    assert allreduce_s(1e6, 1, 1e11, 1e-5) == 0
    assert allreduce_s(0, 8, 1e11, 1e-5) == pytest.approx(1e-5)


def test_every_device_loads_with_its_source_and_units() -> None:
    wanted = {
        "cpu",
        "l4",
        "l40s",
        "a100-40gb",
        "a100-80gb",
        "h100-sxm",
        "h100-pcie",
        "h200-sxm",
        "b200",
        "gb200",
        "gb300",
        "rtx-4090",
        "rtx-5090",
    }
    assert set(device_names()) == wanted
    for name in device_names():
        device = load_device(name)
        assert device.source
        assert device.memory_bytes > 1e9
        assert device.achieved_bw <= device.mem_bw_bytes_per_s
        assert device.peak_flops("bf16") > 1e10
        assert device.peak_flops("fp4") >= device.peak_flops("bf16")
