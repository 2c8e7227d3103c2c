"""`trtspec validate`: a user's files explained at their line, and drafts against targets as people publish them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.conftest import LLAMA, write_safetensors
from tests.checkpoints.test_heads import EAGLE3, ints, layer
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.trtllm.check import check_file

OLD = """\
# an old file, served by a newer container
model: meta-llama/Llama-3.1-8B-Instruct
tp_size: 2
max_batch_szie: 16
kv_cache_config:
  dtype: float16
  enable_block_reuse: false
speculative_config:
  decoding_type: DraftTarget
  speculative_model_dir: meta-llama/Llama-3.2-1B-Instruct
  max_draft_len: 4
  draft_len_schedule: {1: 4, 5: 2}
"""


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def asked(capsys, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["validate", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    return code, answer["result"] if answer["ok"] else answer["error"]


def test_each_fault_is_at_its_line_with_what_to_write(tmp_path: Path, capsys):
    (tmp_path / "model.yaml").write_text(OLD)
    code, result = asked(capsys, "model.yaml", "--version", "1.3.0rc29")
    assert code == 2 and not result["valid"]
    found = {f["rule"] + f["where"].partition(":")[2]: f["instead"] for f in result["findings"]}
    assert found["renamed-key3:1"] == "tensor_parallel_size"
    assert found["unknown-key4:1"] == "max_batch_size"
    assert found["value6:10"] == "dtype: auto"
    assert found["decoding-type9:18"] == "decoding_type: Draft_Target"
    assert main(["validate", "model.yaml", "--version", "1.3.0rc29"]) == 2
    assert "model.yaml:3:1: error: " in capsys.readouterr().out


def test_a_container_stands_for_its_version_and_one_of_both_is_needed(tmp_path: Path, capsys):
    (tmp_path / "model.yaml").write_text("max_seq_len: 4096\n")
    code, result = asked(capsys, "model.yaml", "--container", "26.07-trtllm-python-py3")
    assert code == 0 and result["version"] == "1.2.1" and result["findings"] == []
    assert asked(capsys, "model.yaml")[0] == 2
    assert asked(capsys, "model.yaml", "--version", "1.2.1", "--container", "26.07")[0] == 2
    code, error = asked(capsys, "model.yaml", "--version", "0.21.0")
    assert code == 2 and "nothing is known" in error["message"]


@pytest.mark.parametrize("name", ["speculative_config.json", "speculative_config.yaml"])
def test_a_bare_speculative_config_is_read_by_itself(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text('{"decoding_type": "NGram",\n "max_draft_len": 4, "max_ngram": 3}')
    (found,) = [f for f in check_file(path, "1.3.0rc29") if f.level == "error"]
    assert found.where.endswith(":2:22") and found.rule == "unknown-key"
    (missing,) = [f for f in check_file(path, "1.2.1") if f.rule == "missing-key"]
    assert "max_matching_ngram_size is missing" in missing.message


@pytest.mark.parametrize("text", ["- a\n", "model: [\n", "model: a\nmodel: b\n", "", "7\n"])
def test_what_is_no_settings_file_is_a_config_error(text: str, tmp_path: Path):
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(ConfigError):
        check_file(tmp_path / "model.yaml", "1.2.1")


PUBLIC = {
    "a latency recipe with MTP": (
        "1.2.1",
        {
            "tensor_parallel_size": 8,
            "moe_expert_parallel_size": 2,
            "max_batch_size": 4,
            "max_num_tokens": 32768,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.75},
            "moe_config": {"backend": "TRTLLM"},
            "speculative_config": {
                "decoding_type": "MTP",
                "num_nextn_predict_layers": 3,
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": 10,
                "relaxed_delta": 0.6,
            },
        },
        {"relaxed"},
    ),
    "the same spelling in a newer version": (
        "1.4.0rc1",
        {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3}},
        {"renamed-key"},
    ),
    "EAGLE-3 for gpt-oss": (
        "1.3.0rc20",
        {
            "enable_chunked_prefill": True,
            "kv_cache_config": {"enable_block_reuse": False, "dtype": "fp8"},
            "speculative_config": {
                "decoding_type": "Eagle3",
                "max_draft_len": 3,
                "eagle3_one_model": True,
                "eagle3_layers_to_capture": [23, 29, 35],
                "speculative_model_dir": "head",
            },
        },
        set(),
    ),
    "a dynamic tree": (
        "1.3.0rc29",
        {
            "kv_cache_config": {"enable_block_reuse": False},
            "speculative_config": {
                "decoding_type": "Eagle3",
                "max_draft_len": 6,
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": 10,
                "max_total_draft_tokens": 60,
                "speculative_model": "head",
            },
        },
        set(),
    ),
    "a fraction in two places": (
        "1.3.0rc29",
        {
            "kv_cache_free_gpu_memory_fraction": 0.9,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.75},
        },
        {"renamed-key"},
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_files_people_published(name: str, tmp_path: Path):
    version, settings, expected = PUBLIC[name]
    (tmp_path / "model.json").write_text(json.dumps(settings))
    assert {f.rule for f in check_file(tmp_path / "model.json", version)} == expected


TARGET = LLAMA | {
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 12,
    "num_hidden_layers": 36,
    "eos_token_id": [10, 11],
}
Tensors = Mapping[str, Any]


@pytest.fixture
def pair(tmp_path: Path, capsys) -> Callable[..., tuple[int, str]]:
    """Judge a head against a target: exit code, and all that was said."""

    def judge(head: dict[str, Any], tensors: Tensors | None = None, **target: Any) -> tuple[int, str]:
        for name, config in (("head", EAGLE3 | head), ("target", TARGET | target)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            write_safetensors(tmp_path / "head" / "model.safetensors", tensors)
        code, result = asked(capsys, "head", "--target", "target")
        return code, "\n".join(f"{f['level']}: {f['message']}" for f in result["findings"])

    return judge


def aux(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


REDUCED = layer(0, 8) | {"lm_head.weight": ("BF16", [5, 4])}
WIDE = {"hidden_size": 6, "num_attention_heads": 1, "head_dim": 6}
CASES: dict[str, tuple[dict[str, Any], Tensors | None, dict[str, Any], int, str]] = {
    "padded vocabularies": ({}, None, {"vocab_size": 16}, 0, "warning: padded vocabularies differ"),
    "ids of another family": (
        {"bos_token_id": 14, "eos_token_id": 15},
        None,
        {},
        0,
        "ignored, stop ids come from the target",
    ),
    "a shorter context": (
        {"max_position_embeddings": 8},
        None,
        {"max_position_embeddings": 64},
        0,
        "drafting stops",
    ),
    "RoPE scaling lost": (
        {},
        None,
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        0,
        "RoPE differs from the target's beyond position 8192",
    ),
    "an unknown RoPE": ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, None, {}, 2, "'foo'"),
    "a reduced vocabulary": (
        {"draft_vocab_size": 5},
        REDUCED | {"d2t": ints([0, 0, 3, 3, 6])},
        {},
        0,
        "captured layers",
    ),
    "an offset past the vocabulary": (
        {"draft_vocab_size": 5},
        REDUCED | {"d2t": ints([0, 0, 3, 3, 9])},
        {},
        2,
        "13",
    ),
    "one width where two are taken": ({}, layer(0, 4), {}, 2, "input width 4, expected 8"),
    "another width without a table": (
        WIDE,
        layer(0, 12, heads=1, head_dim=6, hidden=6) | {"fc.weight": ("BF16", [6, 24])},
        {"hidden_size": 8},
        2,
        "cannot share",
    ),
    "layers counted as finished blocks": (
        aux(24, 30, 36),
        None,
        {},
        0,
        "eagle3_layers_to_capture [23, 29, 35]",
    ),
    "layers past the model": (aux(25, 31, 37), None, {}, 2, "37 > 36"),
    "both dtypes": (
        {},
        layer(0, 8),
        {"quantization_config": {"quant_method": "fp8"}},
        0,
        "target weights FP8, head weights bfloat16",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_head_against_its_target(name: str, pair):
    head, tensors, target, expected, says = CASES[name]
    code, said = pair(head, tensors, **target)
    assert code == expected and says in said, said


@pytest.fixture
def named(tmp_path: Path, capsys) -> Callable[..., list[str]]:
    """Rules that a settings file breaks which names a target and a head lying here."""

    def judge(
        version: str, target: dict[str, Any], head: dict[str, Any] | None, **settings: Any
    ) -> list[str]:
        for name, config in (("target", TARGET | target), ("head", head)):
            if config is not None:
                (tmp_path / name).mkdir(exist_ok=True)
                (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.yaml").write_text(json.dumps({"model": "target", **settings}))
        _, result = asked(capsys, "model.yaml", "--version", version)
        return [f["rule"] for f in result["findings"] if f["level"] == "error"]

    return judge


def eagle(**more: Any) -> dict[str, Any]:
    base = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "head"}
    return {"speculative_config": base | more, "kv_cache_config": {"enable_block_reuse": False}}


def test_settings_against_the_models_they_name(named):
    version, head = "1.3.0rc29", EAGLE3 | aux(24, 30, 36)
    assert named(version, {}, head, **eagle(eagle3_layers_to_capture=[23, 29, 35])) == []
    assert named(version, {}, head, **eagle(eagle3_layers_to_capture=[24, 30, 36])) == ["captured-layers"]
    assert named(version, {}, head, **eagle(), tensor_parallel_size=4) == ["tensor-parallel"]
    plain = {**EAGLE3, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    assert named(version, {}, plain, **eagle()) == ["head"]
    flash = {
        **EAGLE3,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"target_layer_ids": [1, 17, 33]},
        "block_size": 4,
    }
    assert "head" in named(version, {}, flash, **eagle())
    tree = eagle(use_dynamic_tree=True, dynamic_tree_max_topK=4)
    assert named(
        version,
        {"sliding_window": 8, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        head,
        **tree,
    ) == ["dynamic-tree"]


def test_norms_a_version_ignores_are_an_error_there(named):
    head = EAGLE3 | {"norm_before_fc": True}
    settings = eagle(decoding_type="Eagle")
    assert "head-norms" in named("1.2.1", {}, head, **settings)
    assert "head-norms" not in named("1.3.0rc29", {}, head, **eagle())


def test_an_fp8_cache_beside_a_16_bit_head_is_wrong_with_chunked_prefill_where_it_was(named):
    settings = eagle(decoding_type="Eagle") | {"enable_chunked_prefill": True}
    settings["kv_cache_config"] = {"enable_block_reuse": False, "dtype": "fp8"}
    head = EAGLE3 | aux(24, 30, 36)
    assert named("1.2.0rc8", {}, head, **settings) == ["kv-dtype"]
    assert named("1.2.0rc8", {}, head, **settings | {"enable_chunked_prefill": False}) == []
    assert named("1.2.1", {}, head, **settings) == []
    quantized = head | {"quantization_config": {"quant_method": "fp8"}}
    assert named("1.2.0rc8", {}, quantized, **settings) == []


def test_mtp_needs_layers_to_reuse(named):
    mtp = {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3}}
    assert named("1.4.0rc1", {"num_nextn_predict_layers": 0}, None, **mtp) == ["mtp-layers"]
    assert named("1.4.0rc1", {"num_nextn_predict_layers": 1}, None, **mtp) == []
    both = {"speculative_config": mtp["speculative_config"] | {"num_nextn_predict_layers": 1}}
    assert named("1.4.0rc1", {"num_nextn_predict_layers": 1}, None, **both) == ["mtp-length"]


def test_doctor_tells_what_a_container_runs(capsys):
    assert main(["doctor", "--target-container", "26.07-trtllm-python-py3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["tensorrt_llm"] == "1.2.1" and result["methods"]["eagle3"] == "Eagle"
    assert result["features"]["acceptance_statistics"]["has"] is False
    assert main(["doctor", "--target-container", "1.4.0rc4"]) == 0
    assert "dspark (DSpark)" in capsys.readouterr().out
    assert main(["doctor", "--target-container", "26.07-vllm-python-py3"]) == 2
    assert "carries no TensorRT-LLM" in capsys.readouterr().err
