"""Packaging: the exact files written, and what an engine cannot do refused before anything is served."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import yaml

from trtspec.engines.base import EngineSpec
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, PlanInfeasible, SetupError
from trtspec.package import PackageRequest, lint_repository, package_triton
from trtspec.package.contract import INPUTS, LLMAPI, OUTPUTS
from trtspec.package.settings import load_settings

GOLDEN = Path(__file__).parent / "golden"

# TensorRT-LLM's llmapi config.pbtxt, name → (type, dims); a client written for it must find all of this.
LLMAPI_INPUTS = {
    "text_input": ("STRING", -1),
    "streaming": ("BOOL", 1),
    "sampling_param_best_of": ("INT32", 1),
    "sampling_param_temperature": ("FP32", 1),
    "sampling_param_top_k": ("INT32", 1),
    "sampling_param_top_p": ("FP32", 1),
    "sampling_param_frequency_penalty": ("FP32", 1),
    "sampling_param_presence_penalty": ("FP32", 1),
    "sampling_param_max_tokens": ("INT32", 1),
    "sampling_param_stop": ("STRING", -1),
    "sampling_param_seed": ("UINT64", 1),
    "sampling_param_exclude_input_from_output": ("BOOL", 1),
    "sampling_param_return_perf_metrics": ("BOOL", 1),
    "return_finish_reason": ("BOOL", 1),
    "return_stop_reason": ("BOOL", 1),
    "return_cumulative_logprob": ("BOOL", 1),
    "stop": ("BOOL", 1),
    "lora_id": ("UINT64", 1),
    "lora_name": ("STRING", 1),
    "lora_path": ("STRING", 1),
    "lora_ckpt_source": ("STRING", 1),
}
LLMAPI_OUTPUTS = {
    "text_output": ("STRING", -1),
    "finish_reason": ("STRING", -1),
    "stop_reason": ("STRING", -1),
    "cumulative_logprob": ("FP32", -1),
    "kv_cache_reused_block": ("INT32", -1),
    "kv_cache_missed_block": ("INT32", -1),
    "kv_cache_alloc_new_blocks": ("INT32", -1),
    "kv_cache_alloc_total_blocks": ("INT32", -1),
    "kv_cache_hit_rate": ("FP32", -1),
    "arrival_time_ns": ("INT64", 1),
    "first_scheduled_time_ns": ("INT64", 1),
    "first_token_time_ns": ("INT64", 1),
    "last_token_time_ns": ("INT64", 1),
    "acceptance_rate": ("FP32", 1),
    "total_accepted_draft_tokens": ("INT32", 1),
    "total_draft_tokens": ("INT32", 1),
}


@pytest.fixture
def engine(tmp_path) -> Path:
    folder = tmp_path / "engine"
    (folder / "tables").mkdir(parents=True)
    (folder / "tables" / "ids.bin").write_bytes(b"\0\1")
    (folder / "chat_template.jinja").write_text("${not a placeholder}")
    EngineInfo(
        trtspec_version="0",
        backend="onnxruntime",
        model="toy",
        spec=EngineSpec(300, 258, max_batch=4, max_seq_len=512, max_rows=4),
        layers=1,
        kv_heads=1,
        head_dim=1,
        least_rows=1,
        stop_token_ids=(2,),
        weights="none",
        speculation={"method": "ngram", "draft_length": 3},
    ).write(folder)
    return folder


def test_the_contract_holds_every_tensor_of_the_llmapi_model():
    for table, expected in ((INPUTS, LLMAPI_INPUTS), (OUTPUTS, LLMAPI_OUTPUTS)):
        found = {t.name: (t.data_type.removeprefix("TYPE_"), t.dims) for t in table if t.origin == LLMAPI}
        assert found == expected


def test_the_written_files_are_exactly_these(engine, tmp_path):
    request = PackageRequest(engine, "tensorrt_llm", max_concurrency=4, max_queue_size=16, threads=2)
    report = package_triton(request, tmp_path / "repository")
    model = tmp_path / "repository" / "tensorrt_llm"
    for written in (model / "config.pbtxt", model / "1" / "model.yaml", model / "1" / "model.py"):
        assert written.read_text() == (GOLDEN / written.name).read_text(), written.name
    assert report.files == (
        "tensorrt_llm/1/engine/chat_template.jinja",
        "tensorrt_llm/1/engine/engine.json",
        "tensorrt_llm/1/engine/tables/ids.bin",
        "tensorrt_llm/1/model.py",
        "tensorrt_llm/1/model.yaml",
        "tensorrt_llm/config.pbtxt",
    )
    assert report.linked == 3
    assert (model / "1/engine/tables/ids.bin").samefile(engine / "tables/ids.bin")
    assert lint_repository(tmp_path / "repository") == []


def test_settings_read_back_as_they_were_asked_for(engine, tmp_path):
    request = PackageRequest(engine, "m", max_queue_size=7, speculate=False, reuse_prefixes=False)
    package_triton(request, tmp_path / "repository")
    settings = load_settings(tmp_path / "repository/m/1/model.yaml")
    assert (settings.trtspec.max_queue_size, settings.trtspec.speculate) == (7, False)
    assert not settings.trtspec.reuse_prefixes
    assert settings.triton_config.model_dump() == {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": 50,
    }


def test_a_draft_longer_than_the_engine_verifies_is_refused_before_it_is_served(engine, tmp_path):
    with pytest.raises(PlanInfeasible, match="draft length 5 > 3"):
        package_triton(PackageRequest(engine, "m", draft_length=5), tmp_path / "repository")
    package_triton(PackageRequest(engine, "m", draft_length=5, speculate=False), tmp_path / "repository")


def test_more_concurrency_than_slots_is_refused(engine, tmp_path):
    with pytest.raises(PlanInfeasible, match="max_concurrency 5 > 4"):
        package_triton(PackageRequest(engine, "m", max_concurrency=5), tmp_path / "repository")


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a b", 'x"', "${name}"])
def test_names_a_folder_or_url_cannot_carry_are_refused(engine, tmp_path, name):
    with pytest.raises(ConfigError):
        package_triton(PackageRequest(engine, name), tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_folder_without_an_engine_is_refused(tmp_path):
    with pytest.raises(SetupError, match="not an engine folder"):
        package_triton(PackageRequest(tmp_path, "m"), tmp_path / "repository")


def packaged(engine, tmp_path, **request) -> Path:
    package_triton(PackageRequest(engine, "m", **request), tmp_path / "repository")
    return tmp_path / "repository"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


CONFIG, YAML = "m/config.pbtxt", "m/1/model.yaml"
FAULTS = {
    "a placeholder nobody filled": (
        YAML,
        "max_queue_size: 64",
        "max_queue_size: ${max_queue_size}",
        "template",
    ),
    "a placeholder in the config": (CONFIG, "count: 1", "count: ${instances}", "template"),
    "text that is no protobuf": (CONFIG, "backend: ", "backend ", "pbtxt"),
    "an unknown field": (CONFIG, "backend:", "backendd:", "pbtxt"),
    "batching in the wrong file": (CONFIG, "max_batch_size: 0", "max_batch_size: 64", "policy"),
    "batching at all": (YAML, "max_batch_size: 0", "max_batch_size: 64", "policy"),
    "files that disagree": (YAML, "decoupled: true", "decoupled: false", "streaming"),
    "no policy where TensorRT-LLM reads it": (YAML, "  decoupled: true\n", "", "policy"),
    "a policy outside triton_config": (YAML, "model: engine", "decoupled: true\nmodel: engine", "policy"),
    "settings that are no YAML": (YAML, "model: engine", "model: [", "model.yaml"),
    "a GPU instance": (CONFIG, "KIND_CPU", "KIND_GPU", "instances"),
    "no instance kind": (CONFIG, "instance_group [ { count: 1 kind: KIND_CPU } ]", "", "instances"),
    "another model's name": (CONFIG, 'name: "m"', 'name: "other"', "name"),
    "a response cache": (CONFIG, "max_batch_size: 0", "response_cache { enable: true }", "cache"),
    "GPUs for another number of instances": (
        CONFIG,
        "max_batch_size: 0",
        'parameters { key: "gpu_device_ids" value { string_value: "0;1" } }',
        "gpus",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_lint_finds(engine, tmp_path, fault):
    file, old, new, rule = FAULTS[fault]
    repository = packaged(engine, tmp_path)
    edit(repository / file, old, new)
    findings = lint_repository(repository)
    assert rule in {finding.rule for finding in findings}, findings
    assert all(finding.where for finding in findings)


def test_a_stock_llmapi_repository_is_clean_and_its_streaming_default_is_pointed_out(tmp_path):
    model = tmp_path / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text('if value.startswith("${"): pass')  # code, not a template
    settings = {"model": "org/x", "triton_config": {"max_batch_size": 0, "decoupled": False}}
    (model / "1" / "model.yaml").write_text(yaml.safe_dump(settings))
    (model / "config.pbtxt").write_text(
        'name: "tensorrt_llm" backend: "python" instance_group [ { count: 1 kind : KIND_CPU } ]\n'
        'input [ { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]'
    )
    assert lint_repository(tmp_path, streaming=False) == []
    assert [finding.rule for finding in lint_repository(tmp_path)] == ["streaming"]


@pytest.mark.parametrize(
    ("ids", "instances", "ranks", "says"),
    [
        ("0,1;2,3", 2, 2, None),
        ("0", 1, 1, None),
        ("0,1,2,3", 2, 2, "for 1 instance"),
        ("0,1;1,2", 2, 2, "GPU 1 is named twice"),
        ("0;1", 2, 2, "needs 2"),
        ("0,x", 1, 2, "not a list"),
        ("", 1, 1, "not a list"),
    ],
)
def test_gpu_lists_follow_instances_and_ranks(ids, instances, ranks, says):
    from trtspec.package.lint import check_gpu_device_ids

    problem = check_gpu_device_ids(ids, instances, ranks)
    assert problem is None if says is None else says in problem


def test_numpy_2_in_the_serving_interpreter_is_found(engine, tmp_path, monkeypatch):
    repository = packaged(engine, tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0")
    assert [finding.rule for finding in lint_repository(repository)] == ["numpy"]


def test_an_ensemble_that_reorders_streamed_tokens_is_found(tmp_path):
    def model(name: str, body: str) -> None:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text("")
        (tmp_path / name / "config.pbtxt").write_text(f'name: "{name}"\n{body}')

    python = 'backend: "python" instance_group [ {{ count: {} kind: KIND_CPU }} ]'
    model("engine", python.format(1) + " model_transaction_policy { decoupled: true }")
    model("post", python.format(2))
    model(
        "all",
        'platform: "ensemble" ensemble_scheduling { step [ { model_name: "engine" model_version: -1 },'
        ' { model_name: "post" model_version: -1 } ] }',
    )
    assert [finding.rule for finding in lint_repository(tmp_path)] == ["ensemble"]
    edit(tmp_path / "post/config.pbtxt", "count: 2", "count: 1")
    assert lint_repository(tmp_path) == []
