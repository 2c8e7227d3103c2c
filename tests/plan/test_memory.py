"""Memory: weights, drafts, both caches; what does not fit is said with the nearest change."""

from __future__ import annotations

import pytest

from tests.plan.conftest import LLAMA_8B
from trtspec.checkpoints.facts import facts_from
from trtspec.errors import PlanInfeasible
from trtspec.plan import plan_bare
from trtspec.plan.deployment import deploy
from trtspec.plan.devices import load_device
from trtspec.plan.drafter import Drafter
from trtspec.plan.drafting import drafter_for
from trtspec.plan.memory import plan_memory, split_kv_budget


def shape(layers: int, kv_heads: int, head_dim: int, **more: object):
    keys = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return facts_from(LLAMA_8B | keys | more, "config.json")


def test_the_kv_budget_is_split_so_that_both_hold_the_same_tokens() -> None:
    target, draft = shape(80, 8, 128), shape(16, 8, 64)
    assert (target.kv_bytes_per_token(), draft.kv_bytes_per_token()) == (327_680, 32_768)
    assert split_kv_budget(33e9, 327_680, 32_768) == pytest.approx((30e9, 3e9))
    assert split_kv_budget(33e9, 327_680, 0) == (33e9, 0)


def test_a_draft_models_cache_is_a_tenth_of_the_pool(published) -> None:
    target = deploy(shape(80, 8, 128), load_device("b200"), backend="tensorrt_llm")
    drafter = drafter_for("draft_model", target, shape(16, 8, 64))
    plan = plan_memory(target, drafter, batch=4, sequence_tokens=4000, draft_length=3)
    assert plan.kv_bytes / plan.draft_kv_bytes == pytest.approx(10)
    assert plan.sequence_tokens == 4032  # 4000 + 3 drafts + 1, in blocks of 32


def test_only_attention_layers_of_a_hybrid_hold_a_cache() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    linear = {
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    hybrid, dense = shape(32, 8, 128, layer_types=kinds, **linear), shape(32, 8, 128)
    assert hybrid.kv_bytes_per_token() * 4 == dense.kv_bytes_per_token()
    device = load_device("h200-sxm")
    plans = [
        plan_memory(
            deploy(hybrid, device, backend="tensorrt_llm"),
            Drafter("none", "none"),
            batch=1,
            sequence_tokens=4096,
            draft_length=d,
        )
        for d in (0, 7)
    ]
    # a rejected tail is rolled back from the states kept after each of the D+1 tokens
    state = hybrid.recurrent_state_elements * 4
    assert plans[1].sequence_bytes - plans[0].sequence_bytes == pytest.approx(7 * state, rel=0.02)


def test_a_sliding_layer_keeps_its_window_only() -> None:
    device = load_device("h200-sxm")
    sliding = shape(32, 8, 128, model_type="mistral", sliding_window=1024)
    plan = plan_memory(
        deploy(sliding, device, backend="tensorrt_llm"),
        Drafter("none", "none"),
        batch=1,
        sequence_tokens=32768,
        draft_length=0,
    )
    assert plan.sequence_bytes == pytest.approx(1056 * 131_072)


def test_fp8_cache_halves_and_replicated_kv_heads_do_not_shrink() -> None:
    facts, device = shape(32, 2, 128), load_device("h200-sxm")

    def per_sequence(**keys: object) -> float:
        deployment = deploy(facts, device, backend="tensorrt_llm", **keys)
        return plan_memory(
            deployment, Drafter("none", "none"), batch=1, sequence_tokens=4064, draft_length=0
        ).sequence_bytes

    assert per_sequence(kv_cache="fp8") == per_sequence() / 2
    assert per_sequence(tensor_parallel=2) == per_sequence() / 2
    assert per_sequence(tensor_parallel=8) == per_sequence(
        tensor_parallel=2
    )  # one KV head on each of eight ranks


def test_too_much_is_refused_with_the_nearest_change(make_config, published) -> None:
    from trtspec.plan import make_plan

    engine = {"backend": "tensorrt_llm", "device": "h100-sxm", "version": "1.3.0"}
    config = make_config(engine=engine, speculation={"method": "none"})
    with pytest.raises(PlanInfeasible, match=r"141\.1 GB of weights do not fit 80 GB") as caught:
        make_plan(config, published("meta-llama--Meta-Llama-3.1-70B"))
    assert "engine.tensor_parallel: 2" in caught.value.hint
    assert "target.quantization: fp8" in caught.value.hint


def test_an_exploration_says_what_a_build_refuses(published) -> None:
    plan = plan_bare(published("meta-llama--Meta-Llama-3.1-70B"), device="h100-sxm", tensor_parallel=1)
    assert plan.as_json()["memory"]["fits"] is False
    assert any("do not fit" in w for w in plan.warnings)
    roomy = plan_bare(published("meta-llama--Meta-Llama-3.1-70B"), device="h100-sxm")
    assert roomy.deployment.tensor_parallel == 4
    assert roomy.memory.fits
