"""Broken files: a ConfigError with the file and the place, never a traceback, never a guess."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.checkpoints.conftest import LLAMA, write_safetensors
from trtspec.checkpoints.facts import facts_from, read_facts
from trtspec.checkpoints.safetensors_header import read_folder, read_header
from trtspec.errors import ConfigError, TrtspecError


def test_a_syntax_error_has_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n  "hidden_size": 64,\n  "num_layers" 4\n}')
    with pytest.raises(ConfigError) as caught:
        read_facts(file)
    assert caught.value.where == f"{file}:3:16"
    assert caught.value.hint


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"7", b"\xff\xfe\x00", b"version https://git-lfs.github.com/spec/v1\n", b"[" * 100_000],
)
def test_not_a_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_facts(tmp_path)
    assert str(tmp_path) in str(caught.value.where)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        read_facts(tmp_path)
    assert "Mistral" in caught.value.hint
    with pytest.raises(ConfigError, match="no such file"):
        read_facts(tmp_path / "absent.json")


def test_infinity_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    text = json.dumps(LLAMA)[:-1] + ', "time_step_limit": [0.0, Infinity], "x": NaN}'
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_facts(tmp_path).layers == 4


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": -8}, "num_attention_heads"),
        ({"num_hidden_layers": 3.5}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"text_config": 5}, "text_config"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers"),
    ],
)
def test_wrong_values_name_their_key(keys: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        facts_from(LLAMA | keys, "config.json")


def test_heads_that_kv_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"10 % 4 = 2"):
        facts_from(LLAMA | {"num_attention_heads": 10, "num_key_value_heads": 4}, "config.json")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"model_type": "llama"},
        {"medusa_num_heads": 5},
        {"hidden_size": None, "num_attention_heads": None},
    ],
)
def test_a_file_that_is_no_decoder_is_refused_with_a_hint(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        facts_from(keys, "config.json")
    assert caught.value.hint


def test_damaged_configurations_never_end_in_a_traceback() -> None:
    """Delete, null or replace keys of rich configurations at random: facts or a ConfigError, nothing else."""
    rng = random.Random(3)
    rich = LLAMA | {
        "layer_types": ["full_attention", "linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "rope_scaling": {"type": "yarn", "factor": 2},
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
        "eos_token_id": [1, 2],
        "num_nextn_predict_layers": 1,
    }
    values = [None, 0, -1, 1, 7, 2.5, "x", "", [], [1, 2], {}, {"a": 1}, True, 10**12]
    for _ in range(1500):
        config = dict(rich)
        for key in rng.sample(sorted(rich), rng.randint(1, 4)):
            if rng.random() < 0.3:
                del config[key]
            else:
                config[key] = rng.choice(values)
        try:
            facts_from(config, "config.json").as_json()
        except TrtspecError as error:
            assert isinstance(error, ConfigError), config
            assert error.where


def test_damaged_quantization_metadata_never_ends_in_a_traceback() -> None:
    rng = random.Random(5)
    weights = {"num_bits": 4, "group_size": 16, "type": "float"}
    forms: list[dict[str, object]] = [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head"]},
        {
            "config_groups": {"g": {"weights": weights, "input_activations": weights}},
            "ignore": ["re:.*attn.*"],
        },
        {
            "quant_algo": "NVFP4",
            "exclude_modules": ["lm_head", "model.layers.*"],
            "kv_cache_quant_algo": "FP8",
        },
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
    ]
    values = [None, 0, -1, 2.5, "x", [], ["re:(", "[a", "*"], {}, {"a": 1}, True, {"num_bits": "x"}]
    for _ in range(600):
        form = dict(rng.choice(forms))
        for key in rng.sample(sorted(form), rng.randint(1, len(form))):
            form[key] = rng.choice(values)
        inline = rng.random() < 0.5
        config = LLAMA | ({"quantization_config": form} if inline else {})
        facts_from(config, "config.json", None if inline else {"quantization": form}).as_json()


def test_headers_of_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": ("BF16", [2, 3]), "b": ("I64", [2])})
    header = read_header(file)
    assert header["a"].shape == (2, 3)
    assert header["b"].nbytes == 16
    assert read_folder(tmp_path) == header


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4],
        lambda data: data[:-3],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: data.replace(b'"BF16"', b'"F32" '),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, damage) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": ("BF16", [2, 3])})
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError):
        read_header(file)


def test_an_index_without_its_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    assert read_folder(tmp_path) is None  # configuration alone
    write_safetensors(tmp_path / "m-1.safetensors", {"a": ("BF16", [1])})
    with pytest.raises(ConfigError, match="1 of 2 weight files are missing"):
        read_folder(tmp_path)
