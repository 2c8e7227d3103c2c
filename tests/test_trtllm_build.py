"""A whole build for TensorRT-LLM: with the weights here, and without them (a bare config.json, an unreachable hub)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.bare_configs import SMOLLM2
from tests.trtllm.toy_llm import FAKE, write_target
from trtspec.cli import main
from trtspec.config import load_config
from trtspec.errors import SetupError
from trtspec.pipeline import build
from trtspec.serve.openai.front import FrontOptions
from trtspec.serve.supervise import options_from_build
from trtspec.store import Store
from trtspec.trtllm.check import check_file

CONFIG = """\
name: served
target: {{model: {model}}}
speculation: {{method: ngram, draft_length: 4, max_ngram: 3}}
engine: {{backend: tensorrt_llm, version: "1.2.1", device: h100-sxm, max_batch_size: 8, max_seq_len: {longest}}}
workload: {{context: 64, output_length: 32, acceptance: [0.9, 0.8, 0.7, 0.6]}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(tmp_path: Path, model: str, longest: int = 256) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(model=model, longest=longest))
    return path


def test_a_build_with_weights_is_complete(tmp_path: Path, tiny_model):
    model = tiny_model("llama")
    config = load_config(write(tmp_path, str(model), 128))
    out = tmp_path / "out"
    built = build(config, out, store=Store(tmp_path / "cache"))
    assert [step.stage for step in built.steps] == ["quantize", "compile", "package"]
    assert (out / "target" / "config.json").is_file()
    served = out / "repository" / "tensorrt_llm" / "1" / "model.yaml"
    for file in (out / "trtllm" / "trtllm-serve.yaml", served):
        assert [f for f in check_file(file, "1.2.1") if f.level == "error"] == []
    values = yaml.safe_load(served.read_text())
    assert values["model"] == "/models/target"
    assert values["speculative_config"] == {
        "decoding_type": "NGram",
        "max_draft_len": 4,
        "max_matching_ngram_size": 3,
    }
    assert "trtllm/README.md" in (out / "README.md").read_text()
    again = build(config, out, store=Store(tmp_path / "cache"))
    assert not again.changed and {step.action for step in again.steps} == {"cached"}
    with pytest.raises(SetupError, match="TensorRT-LLM is not installed here"):
        options_from_build(out)


def test_a_build_is_served_with_trtspecs_own_model_where_tensorrt_llm_is(
    tmp_path: Path, tiny_model, monkeypatch
):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model("llama"), model)
    write_target(model)
    build(load_config(write(tmp_path, str(model), 128)), out, store=Store(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(FAKE))
    options = options_from_build(out)
    assert options.repository == out / "trtllm" / "repository" and options.load_timeout_s > 1000
    served = options.repository / "tensorrt_llm" / "1" / "model.yaml"
    assert [f for f in check_file(served, "1.2.1") if f.level == "error"] == []
    (model,) = FrontOptions.from_build(out).models
    assert (model.name, model.max_seq_len, model.draft_length) == ("tensorrt_llm", 128, 4)


def test_a_bare_config_gives_everything_but_the_weights_and_the_command_that_adds_them(
    tmp_path: Path, tiny_model, capsys
):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = write(tmp_path, "./config.json")
    assert main(["build", str(config), "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["build", str(config), "--out", "out/served", "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert "weights of" in error["message"] and error["kind"] == "setup"
    command = "trtspec build served/config.yaml --out served --set target.model=FOLDER"
    assert error["hint"].endswith(command)
    out = tmp_path / "out" / "served"
    assert not (out / "target").exists() and "not in it yet" in (out / "README.md").read_text()
    settings = (out / "repository" / "tensorrt_llm" / "1" / "model.yaml").read_text()
    # The weights arrive: the same folder is finished, and its settings stay as they were where the sizes do.
    finish = command.replace("served/", "out/served/").replace("--out served", "--out out/served")
    arguments = finish.replace("FOLDER", str(tiny_model("llama"))).split()[1:]
    assert main([*arguments, "--set", "engine.max_seq_len=128", "--json"]) == 0
    assert (out / "target" / "config.json").is_file()
    assert yaml.safe_load(settings)["model"] == "/models/target"


def test_a_hub_model_that_cannot_be_fetched_leaves_the_weights_to_another_machine(
    tmp_path: Path, monkeypatch, capsys
):
    """Its config.json is in the hub's cache, as after `trtspec plan`; the network is gone."""
    from trtspec.checkpoints import sources

    folder = tmp_path / "snapshot" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2))

    def unreachable(*_):
        raise SetupError("org/model could not be fetched from the hub")

    monkeypatch.setattr(sources, "_fetch", unreachable)
    monkeypatch.setattr(sources, "_fetch_config", lambda *_: folder)
    monkeypatch.setattr(sources, "_hub_commit", lambda *_: "a" * 40)
    assert main(["build", str(write(tmp_path, "org/model")), "--out", "served", "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["hint"].endswith("trtspec build served/config.yaml --out served")
    record = json.loads((tmp_path / "served" / "manifest.json").read_text())
    assert record["models"]["target"]["revision"] == "a" * 40
    assert (tmp_path / "served" / "trtllm" / "trtllm-serve.yaml").is_file()


def test_a_head_travels_beside_its_target(tmp_path: Path, tiny_model):
    from tests.tiny_heads import tiny_head
    from trtspec.checkpoints.head_layouts.eagle import write_head

    head = tmp_path / "head"
    write_head(tiny_head("eagle3"), head, "modelopt")
    config = load_config(
        write(tmp_path, str(tiny_model("llama")), 128),
        ["speculation={method: eagle3, draft_length: 3, draft: {model: " + str(head) + "}}"],
    )
    out = tmp_path / "out"
    built = build(config, out, store=Store(tmp_path / "cache"))
    assert [step.stage for step in built.steps] == ["quantize", "draft", "compile", "package"]
    assert {p.name for p in (out / "draft").iterdir()} >= {"config.json", "model.safetensors"}
    values = yaml.safe_load((out / "trtllm" / "trtllm-serve.yaml").read_text())
    assert values["speculative_config"]["speculative_model_dir"] == "/models/draft"
    assert values["speculative_config"]["eagle3_layers_to_capture"] == [0, 1, 2]
