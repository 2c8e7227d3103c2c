"""What QuantSpec costs: on the CPU engine weights twice, a small cache shared, and its expansion at every pass."""

from __future__ import annotations

import pytest

from tests.plan.test_draft_model_cost import smol
from trtspec.plan import plan_bare
from trtspec.plan.deployment import HIERARCHICAL, deploy
from trtspec.plan.devices import load_device
from trtspec.plan.drafting import drafter_for

CPU = {"device": "cpu", "backend": "onnxruntime", "batch_sizes": (1,), "output_length": 64, "draft_length": 3}


def memory(method: str, context: int = 4000, **settings: object):
    return plan_bare(smol(30), method=method, context=context, **CPU, **settings).memory


def test_a_long_sequence_takes_a_fraction_of_its_float32_cache() -> None:
    quantized, float32 = memory("quantspec"), memory("ngram")
    assert quantized.kv_dtype == HIERARCHICAL
    assert quantized.draft_kv_bytes == 0, "draft and target read one cache"
    assert quantized.sequence_bytes < 0.4 * float32.sequence_bytes


def test_a_short_one_is_mostly_recent_rows() -> None:
    tokens = 64
    elements = 30 * 2 * 3 * 64
    assert memory("quantspec", 10).sequence_bytes > 4 * elements * 3 * tokens


def test_larger_groups_keep_more_in_full_precision() -> None:
    assert memory("quantspec", kv_group=256).sequence_bytes > memory("quantspec", kv_group=64).sequence_bytes


def test_the_draft_keeps_weights_of_its_own_format() -> None:
    on = deploy(smol(30), load_device("cpu"), backend="onnxruntime", kv_cache=HIERARCHICAL)
    small, whole = (
        drafter_for("quantspec", on, None, quantization=name, quantize_lm_head=True)
        for name in ("int4_weight_only", "none")
    )
    usual = drafter_for("quantspec", on, None)
    assert small.memory_bytes < 0.5 * whole.memory_bytes
    assert usual.bytes == pytest.approx(small.bytes)


def test_the_expansion_of_the_cache_takes_time_at_every_length_of_the_context() -> None:
    plans = [plan_bare(smol(30), method="quantspec", context=context, **CPU) for context in (256, 4000)]
    near, far = ([c["step_ms"] for c in plan.as_json()["candidates"]] for plan in plans)
    assert all(later > sooner for sooner, later in zip(near, far, strict=True))
    assert any("expanded" in note for note in plans[0].notes)


def test_on_tensorrt_the_draft_reads_half_of_the_target_s_cache() -> None:
    on = deploy(smol(30), load_device("h200-sxm"), backend="tensorrt", kv_cache=HIERARCHICAL)
    drafter = drafter_for("quantspec", on, None, kv_group=128)
    elements = 30 * 2 * 3 * 64
    assert drafter.kv_bytes_per_token == 0, "draft and target read one cache"
    assert drafter.shared_kv_bytes_per_token == elements * on.kv_moved_bytes / 2
    assert not any("expanded" in note for note in drafter.notes)
    plan = plan_bare(
        smol(30), method="quantspec", device="h200-sxm", backend="tensorrt", batch_sizes=(1,), draft_length=3
    )
    assert plan.memory.kv_dtype == HIERARCHICAL and plan.memory.draft_kv_bytes == 0


def test_on_a_gpu_a_4_bit_cache_is_counted_beside_the_target_s() -> None:
    plan = plan_bare(
        smol(30), method="quantspec", device="h200-sxm", batch_sizes=(1,), context=4000, draft_length=3
    )
    assert plan.memory.draft_kv_bytes > 0
