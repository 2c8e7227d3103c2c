"""The step-time model against published end-to-end speed-ups: not to the digit, but the same story.

Each case feeds the published acceptance and compares the predicted speed-up with the published one.
"""

from __future__ import annotations

import pytest

from trtspec.plan import plan_bare
from trtspec.plan.acceptance import alpha_from_acceptance_length

LLAMA70, GPT_OSS, R1 = "meta-llama--Meta-Llama-3.1-70B", "openai--gpt-oss-120b", "deepseek-ai--DeepSeek-R1"
LLAMA8, LLAMA1 = "meta-llama--Meta-Llama-3.1-8B", "meta-llama--Llama-3.2-1B-Instruct"


@pytest.mark.parametrize(
    ("name", "method", "device", "ranks", "batch", "al", "speedup"),
    [
        (LLAMA70, "eagle3", "b200", 1, 32, 2.44, 1.90),
        (LLAMA70, "draft_model", "b200", 1, 32, 2.44, 1.60),
        (LLAMA70, "ngram", "b200", 1, 32, 1.41, 0.88),
        (GPT_OSS, "eagle3", "b200", 1, 32, 2.25, 1.34),
        (R1, "mtp", "b200", 8, 32, 2.55, 1.45),
        (LLAMA8, "eagle3", "h100-sxm", 1, 2, 2.44, 1.81),
    ],
)
def test_published_speedups_within_a_fifth(
    published, name, method, device, ranks, batch, al, speedup
) -> None:
    draft = published(LLAMA1) if method == "draft_model" else None
    plan = plan_bare(
        published(name),
        device=device,
        method=method,
        tensor_parallel=ranks,
        batch_sizes=(batch,),
        context=1024,
        draft=draft,
        draft_length=3,
        acceptance=(alpha_from_acceptance_length(al, 3),) * 3,
    )
    assert plan.chosen.acceptance_length == pytest.approx(al, abs=1e-6)
    assert plan.chosen.speedup == pytest.approx(speedup, rel=0.2)


def test_lookups_on_a_small_active_mixture_lose_badly(published) -> None:
    """gpt-oss-120b with n-grams at batch 32: published at 0.29 times plain decoding."""
    plan = plan_bare(
        published(GPT_OSS), device="b200", method="ngram", tensor_parallel=1, batch_sizes=(32,), context=1024
    )
    assert plan.draft_length == 0
    assert plan.method == "none"
    assert any("do not speculate here" in w for w in plan.warnings)


def test_the_best_draft_length_falls_with_the_batch(published) -> None:
    plan = plan_bare(
        published(LLAMA8),
        device="h200-sxm",
        backend="tensorrt",
        method="eagle3",
        batch_sizes=(1, 8, 64, 256),
        context=1024,
        acceptance=(0.8,) * 16,
        quantization="none",
    )
    lengths = [b.best.draft_length for b in plan.batches]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert lengths[0] >= 5
