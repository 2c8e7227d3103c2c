"""From a plan to settings: every shipped config on every version passes the contract or is refused for a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trtllm.conftest import CONFIGS, VERSIONS
from trtspec.config import Config, load_config
from trtspec.errors import ConfigError, PlanInfeasible
from trtspec.plan import make_plan
from trtspec.trtllm.check import check_settings
from trtspec.trtllm.contract import contract_for
from trtspec.trtllm.derive import Settings, check_runs, derive, settings_text

ON_GPU = ("engine.backend=tensorrt_llm", "engine.device=h200-sxm", "engine.threads=null")
PLAIN = ("target.quantization=fp8", "target.quantize_lm_head=false", "target.block_size=null")
ACCEPTED = "workload.acceptance=[0.85, 0.8, 0.75, 0.7, 0.65, 0.6]"
# Methods by the first of VERSIONS that runs them; MTP modules in a folder of their own came later than MTP.
RUNS = {"ngram": 0, "draft_model": 0, "eagle3": 0, "mtp": 0, "suffix": 1, "pard": 1, "dflash": 1, "dspark": 2}
SEPARATE_MTP = 2
FOR_TENSORRT_LLM = [path for path in CONFIGS if path.stem.endswith("-trtllm")]


def planned(config: Config, facts: Any, draft: Any) -> tuple[dict[str, Any], Settings]:
    plan = make_plan(config, facts, draft=draft)
    check_runs(config, plan.method)
    return plan.as_json(), derive(config, plan.as_json(), facts)


def gpu(path: Path, version: str, *more: str) -> Config:
    return load_config(path, [*ON_GPU, f'engine.version="{version}"', *more])


def models_of(config: Config, smollm2, draft_of, published) -> tuple[Any, Any]:
    """(target, draft) of a shipped config: those it names on the hub, or SmolLM2 and a draft made for it."""
    target, draft = published(config.target.model), getattr(config.speculation, "draft", None)
    if target is None:
        return smollm2, draft_of(config.speculation.method)
    return target, draft and published(draft.model)


@pytest.mark.parametrize("path", FOR_TENSORRT_LLM, ids=lambda path: path.stem)
def test_a_config_for_tensorrt_llm_deploys_its_method_on_its_own_version(
    path: Path, smollm2, draft_of, published
):
    config = load_config(path)
    assert published(config.target.model) is not None, "its config.json belongs into tests/bare_configs.py"
    plan, settings = planned(config, *models_of(config, smollm2, draft_of, published))
    assert settings.version == config.engine.version and plan["method"] == config.speculation.method
    assert [str(f) for f in check_settings(settings.values, settings.version) if f.level != "note"] == []


def test_a_draft_model_runs_in_the_targets_llm_and_the_reason_is_said(smollm2, draft_of, published):
    path = next(path for path in FOR_TENSORRT_LLM if "draft-model" in path.stem)
    config = load_config(path)
    _, settings = planned(config, *models_of(config, smollm2, draft_of, published))
    assert settings.values["speculative_config"][contract_for(settings.version).draft_key]
    assert any("BLS" in note for note in settings.notes)


def test_every_mechanism_that_tensorrt_llm_runs_has_a_config():
    shown = {load_config(path).speculation.method for path in FOR_TENSORRT_LLM}
    assert shown == set(contract_for("1.4.0rc4").methods())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_as_it_is(path: Path, version: str, smollm2, draft_of, published):
    """Most have a CPU's weight format; that, or whatever else the version does not run, is what the refusal names."""
    try:
        config = gpu(path, version)
        plan, settings = planned(config, *models_of(config, smollm2, draft_of, published))
    except (ConfigError, PlanInfeasible) as refused:
        said = "\n".join(map(str, getattr(refused, "problems", ()) or [refused]))
        assert "hint: " in said, said
        return
    assert [f for f in check_settings(settings.values, version) if f.level != "note"] == []
    assert plan["method"] in ("none", *contract_for(version).methods())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_method_with_fp8_weights(path: Path, version: str, smollm2, draft_of, published):
    shipped = load_config(path)
    method, section = shipped.speculation.method, getattr(shipped.speculation, "draft", None)
    target, draft = models_of(shipped, smollm2, draft_of, published)
    more = [*PLAIN, ACCEPTED, "workload.temperature=0"]
    if target.quantization.algorithm:
        more.append("target.quantization=none")
    if section is not None:
        more += ["speculation.draft.quantization=none"]
    more += ["speculation.pool_tokens=0", "speculation.pool_prompts=false"] if "pool" in path.stem else []
    more += ["speculation.draft_length_policy=auto"] if "adaptive" in path.stem else []
    more += (
        ["verification.acceptance=exact", "verification.epsilon=null", "verification.delta=null"]
        if "lossy" in path.stem
        else []
    )
    more += ["speculation.draft_length=4"] if hasattr(load_config(path).speculation, "draft_length") else []
    config = gpu(path, version, *more)
    first = SEPARATE_MTP if method == "mtp" and section is not None else RUNS.get(method, len(VERSIONS))
    if method not in ("none", "auto") and VERSIONS.index(version) < first:
        with pytest.raises(PlanInfeasible) as refused:
            planned(config, target, draft)
        assert refused.value.hint and version in refused.value.message
        return
    plan, settings = planned(config, target, draft)
    assert [str(f) for f in check_settings(settings.values, version) if f.level != "note"] == []
    if plan["method"] != "none":
        decoding = contract_for(version).type_called(settings.values["speculative_config"]["decoding_type"])
        assert decoding.method == plan["method"]
        assert settings.values["speculative_config"][decoding.length] == plan["draft_length"]


@pytest.fixture
def write(tmp_path: Path):
    def make(method: str, **sections: str) -> Path:
        text = f"name: t\ntarget: {{model: m, {sections.pop('target', '')}}}\n"
        text += f"speculation: {{method: {method}, {sections.pop('speculation', '')}}}\n"
        text += f"engine: {{backend: tensorrt_llm, device: h200-sxm, {sections.pop('engine', '')}}}\n"
        text += f"workload: {{acceptance: [0.9, 0.85, 0.8, 0.75], {sections.pop('workload', '')}}}\n"
        text += "".join(f"{key}: {value}\n" for key, value in sections.items())
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return make


def of(path: Path, facts: Any, draft: Any = None) -> Settings:
    return planned(load_config(path), facts, draft)[1]


HEAD = "draft: {model: ./head}, draft_length: 4"


def test_eagle3_captures_the_layers_its_head_names_in_tensorrt_llms_numbering(write, smollm2, draft_of):
    values = of(write("eagle3", speculation=HEAD), smollm2, draft_of("eagle3")).values
    assert values["speculative_config"]["eagle3_layers_to_capture"] == [1, 14, 26]
    assert values["kv_cache_config"]["enable_block_reuse"] is False


def test_the_schedule_is_clipped_to_the_length_and_turned_over_at_1_3(write, smollm2, draft_of):
    engine = 'max_batch_size: 256, version: "{}"'
    workload = "batch_sizes: [1, 64, 256], context: 4096"
    spoken = {}
    for version in ("1.2.1", "1.3.0rc29"):
        path = write(
            "draft_model",
            speculation="draft: {model: ./d}, draft_length: 3, draft_length_policy: schedule",
            engine=engine.format(version),
            workload=workload,
        )
        plan, settings = planned(load_config(path), smollm2, draft_of("draft_model"))
        spoken[version] = settings.values["speculative_config"].get("draft_len_schedule")
        lengths = {int(batch): min(3, length) for batch, length in plan["schedule"].items()}
    if len(set(lengths.values())) < 2:
        assert spoken == {"1.2.1": None, "1.3.0rc29": None}
    else:
        assert spoken["1.2.1"][1] == 3 and spoken["1.3.0rc29"][min(spoken["1.3.0rc29"])] == 3


def test_a_varying_schedule_reaches_both_forms(write, smollm2, draft_of):
    path = write(
        "draft_model", speculation="draft: {model: ./d}, draft_length: 4", engine="max_batch_size: 64"
    )
    plan = make_plan(load_config(path), smollm2, draft=draft_of("draft_model")).as_json()
    plan |= {"draft_length_policy": "schedule", "schedule": {"4": 6, "8": 2, "64": 0}}
    forms = {"1.2.1": {1: 4, 5: 2, 9: 0}, "1.3.0rc29": {4: 4, 8: 2}}
    for version, expected in forms.items():
        config = load_config(path, [f'engine.version="{version}"'])
        values = derive(config, plan, smollm2).values
        assert values["speculative_config"]["draft_len_schedule"] == expected
        assert set(expected) <= {*values["cuda_graph_config"]["batch_sizes"], 5, 9}


def test_a_configured_length_above_the_best_one_stays_at_the_head_of_the_schedule(write, smollm2, draft_of):
    """The smallest range must hold max_draft_len; a plan that finds less best there made settings that none takes."""
    path = write("eagle3", speculation="draft: {model: ./head}, draft_length: 6", engine="max_batch_size: 64")
    plan = make_plan(load_config(path), smollm2, draft=draft_of("eagle3")).as_json()
    plan |= {"draft_length_policy": "schedule", "schedule": {"4": 3, "8": 2, "64": 0}}
    for version, expected in {"1.2.1": {1: 6, 5: 2, 9: 0}, "1.3.0rc29": {4: 6, 8: 2}}.items():
        values = derive(load_config(path, [f'engine.version="{version}"']), plan, smollm2).values
        assert values["speculative_config"]["draft_len_schedule"] == expected


def test_without_a_version_the_newest_stable_one_with_an_image_is_taken_and_said(write, smollm2, draft_of):
    settings = of(write("eagle3", speculation=HEAD), smollm2, draft_of("eagle3"))
    assert settings.version == "1.2.1" and any("26.07-trtllm" in note for note in settings.notes)
    settings = of(write("suffix", speculation="draft_length: 4"), smollm2)
    assert settings.version == "1.4.0rc4" and any(
        "no stable version runs it" in note for note in settings.notes
    )
    settings = of(
        write("eagle3", speculation=HEAD, engine='version: "1.3.0rc29"'), smollm2, draft_of("eagle3")
    )
    assert not any("Triton image" in note for note in settings.notes)


def test_auto_takes_only_what_the_version_runs(write, smollm2):
    """With a suffix automaton the best by prediction, 1.2.1 was planned for one and then refused it."""
    for engine in ("", 'version: "1.2.1"'):
        plan, settings = planned(load_config(write("auto", engine=engine)), smollm2, None)
        assert settings.version == "1.2.1" and plan["method"] in ("none", "ngram")
    plan, _ = planned(load_config(write("auto", engine='version: "1.3.0rc29"')), smollm2, None)
    assert {r["method"] for r in plan["ranking"] if r["available"]} == {"ngram", "suffix"}


def test_attention_dp_is_derived_from_memory_and_the_step_and_its_reason_is_written(
    write, published, smollm2
):
    large = "workload: {batch_sizes: [256], context: 2048, acceptance: [0.8]}"
    path = write("mtp", engine="tensor_parallel: 8, expert_parallel: 8, max_batch_size: 256")
    text = path.read_text().replace("workload: {acceptance: [0.9, 0.85, 0.8, 0.75], }", large)
    path.write_text(text)
    facts = published("deepseek-ai/DeepSeek-R1")
    settings = of(path, facts)
    assert settings.values["enable_attention_dp"] is True
    assert "a plain step at batch 256" in settings.reasons["enable_attention_dp"]
    assert "32 of 256 experts" in settings.reasons["moe_expert_parallel_size"]
    assert "on each of 8 rank(s)" in settings.reasons["tensor_parallel_size"]
    settings = derive(
        load_config(path, ["engine.attention_dp=never"]),
        make_plan(load_config(path, ["engine.attention_dp=never"]), facts).as_json(),
        facts,
    )
    assert settings.values["enable_attention_dp"] is False
    settings = of(write("none", engine="tensor_parallel: 1"), smollm2)
    assert settings.reasons["enable_attention_dp"] == "one rank serves all sequences"


def test_the_token_budget_holds_every_sequences_verify_step_and_a_prompt(write, smollm2, draft_of):
    path = write("eagle3", speculation=HEAD, engine="max_batch_size: 128, max_seq_len: 4096")
    values = of(path, smollm2, draft_of("eagle3")).values
    assert values["max_num_tokens"] == 128 * 5 + 4096 and values["enable_chunked_prefill"] is False
    path = write("eagle3", speculation=HEAD, engine="max_batch_size: 128, max_seq_len: 32768")
    values = of(path, smollm2, draft_of("eagle3")).values
    assert values["max_num_tokens"] == 128 * 5 + 8192 and values["enable_chunked_prefill"] is True


def test_prompts_are_not_cut_where_an_fp8_cache_meets_a_16_bit_head_and_that_was_wrong(
    write, smollm2, draft_of
):
    engine = 'max_batch_size: 8, max_seq_len: 32768, version: "{}"'
    for version, chunked in (("1.2.0rc8", False), ("1.2.1", True)):
        path = write("eagle3", speculation=HEAD, target="kv_cache: fp8", engine=engine.format(version))
        values = of(path, smollm2, draft_of("eagle3")).values
        assert values["enable_chunked_prefill"] is chunked
        assert values["max_num_tokens"] >= 8 * 5 + (8192 if chunked else 32768)


def test_a_draft_never_runs_past_the_end(write, smollm2, draft_of):
    workload = "context: 1000, output_length: 24"
    path = write("eagle3", speculation=HEAD, engine="max_seq_len: 1024", workload=workload)
    settings = of(path, smollm2, draft_of("eagle3"))
    assert settings.values["max_seq_len"] == 1000 + 24 + 5
    assert "past the end" in settings.reasons["max_seq_len"]
    path = write("eagle3", speculation=HEAD, engine="max_seq_len: 2048", workload=workload)
    assert of(path, smollm2, draft_of("eagle3")).values["max_seq_len"] == 2048


def test_the_overlap_scheduler_goes_where_a_method_cannot_have_it(write, smollm2, draft_of):
    def disabled(method: str, version: str, **sections: str) -> bool:
        sections["engine"] = f'version: "{version}", ' + sections.get("engine", "")
        return of(write(method, **sections), smollm2, draft_of(method)).values["disable_overlap_scheduler"]

    draft = "draft: {model: ./d}, draft_length: 4"
    assert disabled("ngram", "1.3.0rc29", speculation="draft_length: 4")
    assert disabled("draft_model", "1.2.1", speculation=draft)
    assert not disabled("draft_model", "1.3.0rc29", speculation=draft)
    assert not disabled("eagle3", "1.2.1", speculation=HEAD)


def test_sampled_traffic_asks_for_rejection_sampling_where_there_is_one(write, smollm2, draft_of):
    def sampled(version: str) -> Settings:
        path = write("eagle3", speculation=HEAD, engine=f'version: "{version}"', workload="temperature: 0.7")
        return of(path, smollm2, draft_of("eagle3"))

    assert sampled("1.3.0rc29").values["speculative_config"]["use_rejection_sampling"] is True
    old = sampled("1.2.1")
    assert "use_rejection_sampling" not in old.values["speculative_config"]
    assert any("exact match" in note for note in old.notes)


def test_what_a_version_does_not_run_is_refused_with_what_does(write, smollm2):
    path = write("suffix", speculation="draft_length: 4", engine='version: "1.2.1"')
    with pytest.raises(PlanInfeasible, match=r"TensorRT-LLM 1\.2\.1 does not run suffix") as refused:
        of(path, smollm2)
    assert "ngram" in refused.value.hint and "1.3.0rc1 to 1.3.0rc26" in refused.value.hint
    path = write("none", target="quantization: nvfp4", engine='version: "1.2.1"')
    with pytest.raises(PlanInfeasible, match="nvfp4"):
        of(path, smollm2)
    path = write("none", engine="tensor_parallel: 3, expert_parallel: 2")
    with pytest.raises(PlanInfeasible, match="expert_parallel 2 does not divide"):
        of(path, smollm2)
    path = write("eagle3", speculation="draft: {model: ./h, quantization: fp8}, draft_length: 4")
    with pytest.raises(PlanInfeasible, match="quantizes no eagle3 draft"):
        check_runs(load_config(path), "eagle3")
    path = write("mtp", speculation=HEAD, engine='version: "1.2.1"')
    with pytest.raises(PlanInfeasible, match="target's checkpoint only"):
        check_runs(load_config(path), "mtp")
    path = write("ngram", speculation="draft_length: 4", engine='version: "1.1.0"')
    with pytest.raises(ConfigError, match=r"nothing is known about the settings of TensorRT-LLM 1\.1\.0"):
        check_runs(load_config(path), "ngram")


def test_every_value_has_its_reason_and_the_text_is_the_values(write, smollm2, draft_of):
    from trtspec.trtllm.check import read_settings

    path = write("eagle3", speculation=HEAD, engine='max_batch_size: 64, version: "1.3.0rc29"')
    settings = of(path, smollm2, draft_of("eagle3"))

    def leaves(tree: dict[str, Any], path: str = "") -> list[str]:
        return [
            leaf
            for key, value in tree.items()
            for leaf in (
                leaves(value, f"{path}{key}.")
                if isinstance(value, dict) and f"{path}{key}" not in settings.reasons
                else [f"{path}{key}"]
            )
        ]

    assert sorted(leaves(dict(settings.values))) == sorted(settings.reasons)
    written = path.with_name("settings.yaml")
    written.write_text(settings_text(settings))
    assert read_settings(written).plain() == settings.values
