"""How a deployment lies over its ranks: what attention-DP moves, where it pays, and what excludes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtspec.errors import PlanInfeasible
from trtspec.plan import plan_bare
from trtspec.plan.deployment import deploy
from trtspec.plan.devices import load_device
from trtspec.plan.step_time import RooflineStepTimes

R1 = "deepseek-ai--DeepSeek-R1"
LOAD = {"device": "h200-sxm", "tensor_parallel": 8, "context": 2048, "method": "none"}


@pytest.fixture
def layouts(published):
    """(TP 8, TP 8 with attention-DP) of DeepSeek-R1 on H200s."""
    split = deploy(published(R1), load_device("h200-sxm"), backend="tensorrt_llm", tensor_parallel=8)
    return split, replace(split, attention_dp=True)


def test_each_rank_keeps_everything_but_the_routed_experts(layouts):
    split, whole = layouts
    experts = sum(w.bytes for w in split.weights if w.kind == "expert")
    assert split.rank_bytes == pytest.approx(split.stored_bytes / 8)
    assert whole.rank_bytes == pytest.approx(split.stored_bytes - experts + experts / 8)
    assert (split.sequences(20), whole.sequences(20)) == (20, 3)


def test_the_group_is_of_all_heads_where_a_rank_keeps_them_all(layouts):
    split, whole = layouts
    (shape,) = split.attention
    assert [shape.group_per_rank(d.head_ranks) for d in layouts] == [16, 128]
    assert split.tile_of(shape, 0)[2] == 1 and whole.tile_of(shape, 0)[2] == 2


def test_a_latent_cache_is_no_longer_read_by_every_rank(layouts):
    """MLA's one head lies on every rank of TP 8; of 64 sequences each rank then holds 8, and reading them no longer
    takes longer than the arithmetic, which stays as it was."""
    attention = [RooflineStepTimes(d).step(64, 0, 65536).attention for d in layouts]
    assert attention[0] / 8 < attention[1] < attention[0] / 4


def test_one_sequence_reads_more_and_many_read_less(published):
    small, large = (plan_bare(published(R1), batch_sizes=(b,), **LOAD) for b in (1, 1024))
    assert not small.deployment.attention_dp and large.deployment.attention_dp
    assert "it pays from batch" in small.parallelism["attention_dp"]
    assert (
        large.memory.max_batch
        > plan_bare(published(R1), batch_sizes=(1024,), attention_dp="never", **LOAD).memory.max_batch
    )
    assert large.as_json()["engine"]["attention_dp"] is True
    assert large.as_json()["kernels"][0]["group"] == 128


def test_a_dense_model_gains_nothing(published):
    plan = plan_bare(published("meta-llama--Meta-Llama-3.1-70B"), batch_sizes=(256,), **LOAD)
    assert not plan.deployment.attention_dp
    assert "no routed experts" in plan.parallelism["attention_dp"]


def test_a_draft_with_a_pool_of_its_own_excludes_it(published):
    asked = LOAD | {"method": "draft_model", "batch_sizes": (1024,)}
    plan = plan_bare(published(R1), **asked)
    assert not plan.deployment.attention_dp and "KV pool of its own" in plan.parallelism["attention_dp"]
    with pytest.raises(PlanInfeasible, match="KV pool of its own") as refused:
        plan_bare(published(R1), attention_dp="always", **asked)
    assert refused.value.hint == "engine.attention_dp: auto"


def test_the_sizes_beside_the_configured_one_are_named(llama_8b):
    plan = plan_bare(llama_8b, device="h100-sxm", tensor_parallel=2, batch_sizes=(8,), method="none")
    said = plan.parallelism["tensor_parallel"]
    assert "on each of 2 rank(s) of 80.0 GB" in said and " on 1" in said and " on 4" in said
    assert plan_bare(llama_8b, device="cpu", batch_sizes=(1,), method="none").parallelism == {}
