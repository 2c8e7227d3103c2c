"""The table itself, and that it catches every mistake users reported, for the version that makes it one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trtllm.conftest import MINIMAL, VERSIONS, decoding_types, settings
from trtspec.drafters.catalog import DRAFTERS
from trtspec.errors import ConfigError
from trtspec.trtllm.check import check_settings
from trtspec.trtllm.checks import CHECKS
from trtspec.trtllm.contract import (
    contract_for,
    default_version,
    format_support,
    parse_version,
    triton_image,
    triton_version,
)


def faults(tree: dict[str, Any], version: str, level: str | None = "error") -> list[str]:
    return [f.rule for f in check_settings(tree, version) if level is None or f.level == level]


@pytest.mark.parametrize("version", VERSIONS)
def test_minimal_forms_pass(version: str):
    for decoding in decoding_types(version):
        found = check_settings(settings(version, decoding), version)
        assert not found, (decoding, list(map(str, found)))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_writes_its_own_spelling(version: str):
    names = {name: t.spellings[0].name for name, t in contract_for(version).types.items()}
    old = version < "1.3"
    assert names["Eagle3"] == ("Eagle" if old else "Eagle3")
    assert names["DraftTarget"] == ("DraftTarget" if old else "Draft_Target")
    assert names["UserProvided"] == ("UserProvided" if old else "User_Provided")
    assert ("Medusa" in names) == old and ("SA" in names) != old


def test_every_planned_method_has_a_decoding_type_and_the_other_way_round():
    mine = {spec.method for spec in DRAFTERS if "tensorrt_llm" in spec.backends}
    assert set(contract_for("1.4.0rc4").methods()) == mine
    assert set(contract_for("1.2.1").methods()) == {"eagle3", "mtp", "ngram", "draft_model"}


def test_without_a_name_the_version_is_the_newest_stable_one_that_runs_the_method():
    for method in ("none", "auto", "ngram", "eagle3", "mtp", "draft_model", "medusa"):
        version, why = default_version(method)
        assert version == "1.2.1" and triton_image(version) in why
    for method in ("suffix", "pard", "dflash", "dspark"):
        version, why = default_version(method)
        assert version == "1.4.0rc4" and contract_for(version).type_of(method) and "pre-release" in why


def test_keys_that_tensorrt_llm_lists_are_no_mistakes():
    """The golden manifest and the reference of 1.2 name settings that speculation does not touch."""
    of_all = {"garbage_collection_gen0_threshold": 20000, "model_kwargs": {}, "peft_cache_config": {}}
    newer = {"encoder_max_batch_size": 8, "prometheus_metrics_config": {}, "num_serve_frontends": 2}
    for version in VERSIONS:
        assert check_settings(settings(version, "MTP", **of_all), version) == ()
        found = check_settings(settings(version, "MTP", **newer), version)
        assert len(found) == (len(newer) if version < "1.3" else 0)
    tree = settings("1.3.0rc29", "DFlash")
    tree["speculative_config"]["attention_backend"] = "FA4"
    assert check_settings(tree, "1.3.0rc29") == () and faults(tree, "1.3.0rc20") == ["value"]


def test_every_check_is_used_and_exists():
    used = {rule.check for version in VERSIONS for rule in contract_for(version).rules if rule.check}
    assert used == set(CHECKS)


def test_versions_are_ordered_as_they_were_released():
    order = ["1.2.0rc8", "1.2.0", "1.2.1", "1.3.0rc1", "1.3.0rc9", "1.3.0rc27", "1.3.0", "1.4.0rc1", "1.4.0"]
    assert sorted(order, key=parse_version) == order
    assert contract_for("1.3.0").era == "1.3b" and contract_for("1.3.0rc26").era == "1.3a"
    for version in ("1.1.0", "0.21.0", "1.5.0", "2.0"):
        with pytest.raises(ConfigError, match="nothing is known") as refused:
            contract_for(version)
        assert "1.2.0rc1 to 1.2.1" in refused.value.hint
    with pytest.raises(ConfigError, match="is not a TensorRT-LLM version"):
        parse_version("newest")


def test_containers_have_the_versions_nvidia_published():
    assert triton_version("nvidia/tritonserver:26.07-trtllm-python-py3") == "1.2.1"
    assert triton_version("26.03") == "1.2.0rc8" and triton_version("release:1.3.0rc27") == "1.3.0rc27"
    assert triton_image("1.2.1") == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert triton_image("1.4.0rc1") is None
    for tag in ("26.07-vllm-python-py3", "24.01", "latest"):
        with pytest.raises(ConfigError):
            triton_version(tag)


def test_checkpoint_formats_follow_the_hardware():
    assert format_support("FP8", 90, "1.2.1") is None
    assert "no W8A16" in format_support("W8A16", 90, "1.2.1")
    assert "came with 1.3.0rc20" in format_support("NVFP4", 90, "1.2.1")
    assert format_support("NVFP4", 90, "1.3.0rc20") is None
    assert "not for sm_100" in format_support("W4A16_AWQ", 100, "1.4.0rc1")


# What a mutation changes ("a.b": value; None deletes), the decoding type, versions (all: ""), rule, level.
MUTATIONS: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    ("pipeline parallel", {"pipeline_parallel_size": 2}, "Eagle3", "", "pipeline-parallel", "error"),
    ("C++ sampler", {"sampler_type": "TRTLLMSampler"}, "MTP", "", "sampler", "error"),
    (
        "logits processors",
        {"logits_post_processors": {"a": "b:c"}},
        "NGram",
        "",
        "logits-processors",
        "error",
    ),
    ("beam search", {"max_beam_width": 4}, "NGram", "", "beam", "error"),
    (
        "rejection with a lookup",
        {"speculative_config.use_rejection_sampling": True},
        "NGram",
        "1.3",
        "rejection-sampling",
        "error",
    ),
    (
        "rejection with SA",
        {"speculative_config.use_rejection_sampling": True},
        "SA",
        "1.3",
        "rejection-sampling",
        "error",
    ),
    (
        "rejection before it existed",
        {"speculative_config.use_rejection_sampling": True},
        "Eagle3",
        "1.2",
        "unknown-key",
        "error",
    ),
    (
        "rejection with relaxed acceptance",
        {
            "speculative_config.use_rejection_sampling": True,
            "speculative_config.use_relaxed_acceptance_for_thinking": True,
        },
        "MTP",
        "1.3",
        "rejection-sampling",
        "error",
    ),
    (
        "rejection with context parallelism",
        {"speculative_config.use_rejection_sampling": True, "context_parallel_size": 2},
        "MTP",
        "1.3",
        "rejection-sampling",
        "error",
    ),
    (
        "rejection with guided decoding",
        {"speculative_config.use_rejection_sampling": True, "guided_decoding_backend": "xgrammar"},
        "MTP",
        "1.3",
        "rejection-sampling",
        "error",
    ),
    ("FlashInfer", {"attn_backend": "FLASHINFER"}, "DraftTarget", "", "flashinfer", "warning"),
    (
        "attention-DP with a draft's pool",
        {"enable_attention_dp": True},
        "DraftTarget",
        "",
        "attention-dp",
        "error",
    ),
    (
        "attention-DP with a parallel draft",
        {"enable_attention_dp": True, "tensor_parallel_size": 2},
        "PARD",
        "1.3",
        "attention-dp",
        "warning",
    ),
    ("attention-DP on one rank", {"enable_attention_dp": True}, "MTP", "", "attention-dp", "warning"),
    (
        "KV-cache compression",
        {"kv_cache_compression_config": {"algorithm": "triattention"}},
        "Eagle3",
        "1.3",
        "kv-compression",
        "error",
    ),
    (
        "dynamic tree with sliding windows",
        {
            "speculative_config.use_dynamic_tree": True,
            "speculative_config.dynamic_tree_max_topK": 4,
            "kv_cache_config.max_attention_window": [4096],
        },
        "Eagle3",
        "",
        "dynamic-tree",
        "error",
    ),
    (
        "dynamic tree without topK",
        {"speculative_config.use_dynamic_tree": True},
        "Eagle3",
        "",
        "dynamic-tree",
        "error",
    ),
    (
        "dynamic tree too large",
        {
            "speculative_config.use_dynamic_tree": True,
            "speculative_config.dynamic_tree_max_topK": 2,
            "speculative_config.max_total_draft_tokens": 60,
        },
        "Eagle3",
        "",
        "dynamic-tree",
        "error",
    ),
    ("topK above 32", {"speculative_config.dynamic_tree_max_topK": 33}, "Eagle3", "", "value", "error"),
    ("static tree", {"speculative_config.eagle_choices": [[0]]}, "Eagle3", "1.2", "static-tree", "error"),
    (
        "static tree after it was dropped",
        {"speculative_config.eagle_choices": [[0]]},
        "Eagle3",
        "1.4",
        "renamed-key",
        "error",
    ),
    ("overlap with n-gram", {"disable_overlap_scheduler": False}, "NGram", "", "overlap", "note"),
    (
        "overlap with a draft model",
        {"disable_overlap_scheduler": False},
        "DraftTarget",
        "1.2",
        "overlap",
        "error",
    ),
    (
        "schedule with n-gram",
        {"speculative_config.draft_len_schedule": {1: 4}},
        "NGram",
        "",
        "ngram-schedule",
        "error",
    ),
    ("LoRA with n-gram", {"enable_lora": True}, "NGram", "", "ngram-lora", "error"),
    ("LoRA", {"enable_lora": True}, "Eagle3", "", "lora", "warning"),
    ("AUTO", {"speculative_config": {"decoding_type": "AUTO"}}, "NGram", "", "auto", "warning"),
    ("block reuse", {"kv_cache_config.enable_block_reuse": True}, "Eagle3", "", "kv-reuse", "warning"),
    ("block reuse by default", {"kv_cache_config": None}, "Eagle3", "", "kv-reuse", "warning"),
    (
        "relaxed acceptance",
        {"speculative_config.use_relaxed_acceptance_for_thinking": True},
        "MTP",
        "",
        "relaxed",
        "warning",
    ),
    (
        "permanent switch-off",
        {"speculative_config.acceptance_rate_threshold": 0.5},
        "MTP",
        "1.4",
        "switch-off",
        "warning",
    ),
    (
        "a rate as a length",
        {"speculative_config.acceptance_rate_threshold": 2.0},
        "MTP",
        "1.4",
        "value",
        "error",
    ),
    (
        "the old threshold",
        {"speculative_config.acceptance_length_threshold": 2.0},
        "MTP",
        "1.4",
        "renamed-key",
        "error",
    ),
    (
        "the new threshold too early",
        {"speculative_config.acceptance_rate_threshold": 0.5},
        "MTP",
        "1.2",
        "renamed-key",
        "error",
    ),
    (
        "schedule and max_concurrency",
        {"speculative_config.max_concurrency": 8},
        "Eagle3",
        "1.3",
        "schedule-concurrency",
        "error",
    ),
    (
        "1.3's schedule in 1.2",
        {"speculative_config.draft_len_schedule": {4: 3, 8: 2, 32: 1}},
        "Eagle3",
        "1.2",
        "schedule",
        "error",
    ),
    (
        "schedule above the length",
        {"speculative_config.draft_len_schedule": {4: 4, 8: 5}},
        "Eagle3",
        "1.3",
        "schedule",
        "error",
    ),
    (
        "schedule that begins low",
        {"speculative_config.draft_len_schedule": {4: 2, 8: 1}},
        "Eagle3",
        "1.3",
        "schedule",
        "error",
    ),
    (
        "schedule reaching 0 with guided decoding",
        {"speculative_config.draft_len_schedule": {4: 4, 32: 0}, "guided_decoding_backend": "xgrammar"},
        "Eagle3",
        "1.3",
        "schedule-guided",
        "error",
    ),
    (
        "open schedule with guided decoding",
        {"speculative_config.draft_len_schedule": {4: 4, 8: 2}, "guided_decoding_backend": "xgrammar"},
        "Eagle3",
        "1.3",
        "schedule-guided",
        "error",
    ),
    (
        "global pool size alone",
        {"speculative_config.global_pool_size": 64},
        "SA",
        "1.3",
        "global-pool",
        "error",
    ),
    (
        "unbounded n-gram of 0",
        {"speculative_config.max_matching_ngram_size": 0},
        "SA",
        "1.3",
        "value",
        "error",
    ),
    (
        "n-gram size missing",
        {"speculative_config.max_matching_ngram_size": None},
        "NGram",
        "1.2",
        "missing-key",
        "error",
    ),
    ("n-gram size 0", {"speculative_config.max_matching_ngram_size": 0}, "NGram", "", "value", "error"),
    (
        "two models",
        {"speculative_config.eagle3_one_model": False},
        "Eagle3",
        "1.3.0rc26",
        "two-model",
        "error",
    ),
    (
        "two models after the key went",
        {"speculative_config.eagle3_one_model": False},
        "Eagle3",
        "1.4",
        "renamed-key",
        "error",
    ),
    ("engines", {"backend": "tensorrt"}, "Eagle3", "1.2", "engine-speculation", "error"),
    ("engines after they went", {"backend": "tensorrt"}, "NGram", "1.3.0rc21", "value", "error"),
    (
        "forced acceptance",
        {"env_overrides": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "3"}},
        "MTP",
        "",
        "synthetic-acceptance",
        "error",
    ),
    ("disaggregation", {"cache_transceiver_config": {"backend": "UCX"}}, "MTP", "", "disagg", "note"),
    ("streaming not decoupled", {"triton_config": {"max_batch_size": 0}}, "MTP", "", "decoupled", "warning"),
    (
        "Triton batching",
        {"triton_config": {"max_batch_size": 64, "decoupled": True}},
        "MTP",
        "",
        "value",
        "error",
    ),
    (
        "unknown Triton key",
        {"triton_config": {"decoupled": True, "streaming": True}},
        "MTP",
        "",
        "unknown-key",
        "error",
    ),
    ("long prompts", {"max_seq_len": 16384}, "MTP", "", "prompt-cap", "warning"),
    (
        "budget below one step",
        {"max_num_tokens": 100, "enable_chunked_prefill": True},
        "MTP",
        "",
        "token-budget",
        "error",
    ),
    (
        "chunks beside MTP drafts",
        {"enable_chunked_prefill": True},
        "MTP",
        "1.2",
        "token-budget",
        "warning",
    ),
    (
        "zeros taken for a measurement",
        {"return_perf_metrics": True},
        "Eagle3",
        "1.2",
        "metrics-source",
        "note",
    ),
    (
        "PARD's rows",
        {"max_num_tokens": 200, "enable_chunked_prefill": True},
        "PARD",
        "1.3",
        "token-budget",
        "error",
    ),
    ("both graph sizes", {"cuda_graph_config.max_batch_size": 16}, "MTP", "", "cuda-graph-sizes", "error"),
    (
        "too many graphs",
        {"cuda_graph_config.batch_sizes": list(range(1, 66))},
        "MTP",
        "",
        "graph-mem",
        "warning",
    ),
    (
        "MTP lengths that differ",
        {"speculative_config.max_draft_len": 2, "speculative_config.num_nextn_predict_layers": 1},
        "MTP",
        "",
        "mtp-length",
        "error",
    ),
    (
        "the old MTP key",
        {"speculative_config.max_draft_len": None, "speculative_config.num_nextn_predict_layers": 3},
        "MTP",
        "1.3",
        "renamed-key",
        "warning",
    ),
    (
        "experts that do not divide",
        {"moe_expert_parallel_size": 3, "tensor_parallel_size": 8},
        "MTP",
        "",
        "moe-parallel",
        "error",
    ),
    ("no draft length", {"speculative_config.max_draft_len": None}, "Eagle3", "", "draft-length", "error"),
    ("draft length 0", {"speculative_config.max_draft_len": 0}, "NGram", "", "draft-length", "error"),
    (
        "no draft",
        {"speculative_config.speculative_model": None, "speculative_config.speculative_model_dir": None},
        "Eagle3",
        "",
        "draft-length",
        "error",
    ),
    (
        "Eagle from 1.3",
        {"speculative_config.decoding_type": "Eagle"},
        "Eagle3",
        "1.3",
        "decoding-type",
        "warning",
    ),
    (
        "Eagle3 in 1.2",
        {"speculative_config.decoding_type": "Eagle3"},
        "Eagle3",
        "1.2",
        "decoding-type",
        "warning",
    ),
    (
        "DraftTarget from 1.3",
        {"speculative_config.decoding_type": "DraftTarget"},
        "DraftTarget",
        "1.3",
        "decoding-type",
        "warning",
    ),
    (
        "User_Provided's old name",
        {"speculative_config": {"decoding_type": "UserProvided", "drafter": "x", "max_draft_len": 1}},
        "NGram",
        "1.3",
        "decoding-type",
        "error",
    ),
    ("Medusa", {"speculative_config": {"decoding_type": "Medusa"}}, "NGram", "", "decoding-type", "error"),
    (
        "a misspelled type",
        {"speculative_config.decoding_type": "eagel3"},
        "Eagle3",
        "",
        "decoding-type",
        "error",
    ),
    (
        "SA before 1.3",
        {"speculative_config": {"decoding_type": "SA", "max_draft_len": 4}},
        "NGram",
        "1.2",
        "decoding-type",
        "error",
    ),
    (
        "DSpark before rc27",
        {"speculative_config": {"decoding_type": "DSpark", "max_draft_len": 4, "speculative_model": "d"}},
        "NGram",
        "1.3.0rc20",
        "decoding-type",
        "error",
    ),
    (
        "documented, never a field",
        {"speculative_config.use_sa_spec": True},
        "MTP",
        "",
        "renamed-key",
        "error",
    ),
    ("16-bit KV by name", {"kv_cache_config.dtype": "bfloat16"}, "MTP", "", "value", "error"),
    ("NVFP4 KV before 1.3", {"kv_cache_config.dtype": "nvfp4"}, "MTP", "1.2", "value", "error"),
    (
        "old top-level keys",
        {"pytorch_backend_config": {"use_cuda_graph": True}},
        "MTP",
        "",
        "renamed-key",
        "error",
    ),
    ("old overlap key", {"enable_overlap_scheduler": True}, "MTP", "", "renamed-key", "error"),
    ("old KV key", {"kv_cache_dtype": "fp8"}, "MTP", "", "renamed-key", "error"),
    ("old fraction key", {"kv_cache_free_gpu_memory_fraction": 0.5}, "MTP", "", "renamed-key", "error"),
    ("quantization here", {"quantization": "fp8"}, "MTP", "", "renamed-key", "error"),
    ("unknown key", {"max_num_tokesn": 5}, "MTP", "", "unknown-key", "error"),
    (
        "of another decoding type",
        {"speculative_config.max_matching_ngram_size": 2},
        "MTP",
        "",
        "unknown-key",
        "error",
    ),
    ("text for a number", {"max_batch_size": "32"}, "MTP", "", "value", "error"),
    ("true for a number", {"tensor_parallel_size": True}, "MTP", "", "value", "error"),
    ("a list for a section", {"kv_cache_config": [1]}, "MTP", "", "value", "error"),
]


def mutated(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        inside, *steps = tree, *path.split(".")
        for step in steps[:-1]:
            inside = inside.setdefault(step, {})
        if value is None:
            inside.pop(steps[-1], None)
        else:
            inside[steps[-1]] = value
    return tree


def versions_of(mutation: tuple) -> list[str]:
    """The exact version a mutation names, or all of that beginning which run its decoding type."""
    _, _, decoding, since, _, _ = mutation
    if since.count(".") > 1:
        return [since]
    return [v for v in VERSIONS if v.startswith(since) and decoding in decoding_types(v)]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m[0])
def test_a_mistake_is_caught_by_the_version_that_makes_it_one(mutation: tuple):
    _, changes, decoding, _, rule, level = mutation
    concerned = versions_of(mutation)
    assert concerned
    for version in concerned:
        found = check_settings(mutated(settings(version, decoding), changes), version)
        assert (rule, level) in [(f.rule, f.level) for f in found], (version, list(map(str, found)))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m[0])
def test_what_is_an_error_names_what_to_write(mutation: tuple):
    _, changes, decoding, _, rule, _ = mutation
    version = versions_of(mutation)[0]
    found = [
        f for f in check_settings(mutated(settings(version, decoding), changes), version) if f.rule == rule
    ]
    assert found and (rule in ("value", "unknown-key", "renamed-key") or all(f.instead for f in found))


def test_the_length_that_1_2_overwrites_is_said():
    tree = settings("1.2.1", "MTP")
    tree["speculative_config"] = {"decoding_type": "MTP", "max_draft_len": 3}
    (found,) = check_settings(tree, "1.2.1")
    assert found.rule == "mtp-length" and found.instead == "num_nextn_predict_layers: 3"
    assert check_settings(tree, "1.3.0rc29") == ()


def test_junk_is_explained_and_never_a_crash():
    """A thousand files with values of the wrong kind in every place."""
    import random

    rng = random.Random(0)
    junk = [None, True, 0, -1, 1.5, float("nan"), "", "auto", [], [1, "a"], {}, {"1": 2}, {"a": [1]}, 10**18]
    for _ in range(1000):
        version = rng.choice(VERSIONS)
        contract = contract_for(version)
        tree = settings(version, rng.choice(decoding_types(version)))
        for _ in range(rng.randint(1, 6)):
            inside = rng.choice([tree, tree.get("speculative_config"), tree.get("kv_cache_config")])
            if isinstance(inside, dict):
                keys = [*contract.settings, *contract.speculative_fields, "batch_sizes", "surprise"]
                inside[rng.choice(keys)] = rng.choice(junk)
        assert all(isinstance(found.message, str) for found in check_settings(tree, version))


def test_a_schedule_means_the_opposite_on_the_two_sides_of_1_3():
    lower, upper = {1: 3, 5: 2, 9: 1}, {4: 3, 8: 2, 32: 1}
    for version, right, wrong in (("1.2.1", lower, upper), ("1.3.0rc29", upper, {1: 2, 5: 1})):
        tree = settings(version, "Eagle3")
        tree["speculative_config"] |= {"max_draft_len": 3, "draft_len_schedule": right}
        assert faults(tree, version) == []
        tree["speculative_config"]["draft_len_schedule"] = wrong
        assert "schedule" in faults(tree, version)


def test_the_message_says_where_else_a_key_exists_and_what_is_not_settled():
    tree = settings("1.2.1", "MTP")
    tree["speculative_config"]["draft_moe_dtype"] = "auto"
    (found,) = check_settings(tree, "1.2.1")
    assert "from 1.4.0rc4 on" in found.message
    tree = settings("1.3.0rc20", "Eagle3", kv_cache_config={"enable_block_reuse": True})
    (found,) = check_settings(tree, "1.3.0rc20")
    assert "unconfirmed: whether it was merged" in found.message and "PR 18280" in found.message


def test_minimal_forms_cover_every_mechanism():
    assert set(MINIMAL) == {"Eagle3", "MTP", "NGram", "DraftTarget", "PARD", "DFlash", "DSpark", "SA"}
