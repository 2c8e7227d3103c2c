"""The same deployment in four servers' flags: exact commands, and nothing lost without a word."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from trtspec.cli import main
from trtspec.config import load_config
from trtspec.errors import PlanInfeasible
from trtspec.plan import make_plan
from trtspec.translate import SERVERS, Translation, translate
from trtspec.trtllm.check import check_file

GOLDEN = Path(__file__).parent / "golden_translations"
ENGINE = {
    "gpu": 'backend: tensorrt_llm, device: h200-sxm, version: "1.3.0rc29", max_batch_size: 16, max_seq_len: 4096',
    "cpu": "backend: onnxruntime, device: cpu, threads: 8, max_batch_size: 4, max_seq_len: 2048",
}
DRAFT = "draft: {model: org/draft}, draft_length: 4"
# Name: method, its options, the engine, further sections.
DEPLOYMENTS: dict[str, tuple[str, str, str, str]] = {
    "none": ("none", "", "gpu", ""),
    "ngram": (
        "ngram",
        "draft_length: 5, max_ngram: 3, min_ngram: 2",
        "cpu",
        "target: {model: org/model, quantization: int8_weight_only}",
    ),
    "suffix": ("suffix", "draft_length: 6, max_tree_depth: 32", "gpu", ""),
    "draft_model": (
        "draft_model",
        "draft: {model: org/draft, quantization: fp8}, draft_length: 4",
        "gpu",
        "target: {model: org/model, quantization: fp8, kv_cache: fp8}",
    ),
    "eagle3": (
        "eagle3",
        DRAFT + ", shape: chain",
        "gpu",
        "workload: {temperature: 0.7, acceptance: [0.9, 0.8, 0.7, 0.6]}",
    ),
    "eagle3-tree": ("eagle3", DRAFT + ", top_k: 2", "cpu", ""),
    "mtp": ("mtp", DRAFT, "gpu", ""),
    "dflash": ("dflash", DRAFT, "gpu", "target: {model: org/model, quantization: fp8}"),
    "dspark": ("dspark", DRAFT, "gpu", ""),
    "pard": ("pard", DRAFT, "gpu", ""),
    "p_eagle": ("p_eagle", DRAFT, "cpu", ""),
    "medusa": ("medusa", "draft: {model: org/draft}, draft_length: 3", "cpu", ""),
}


@pytest.fixture
def deployment(tmp_path: Path, smollm2, draft_of):
    """(config, plan, target's facts) of one of DEPLOYMENTS; the plan's method is the config's."""

    def make(name: str, *overrides: str) -> tuple[Any, dict[str, Any], Any]:
        method, options, engine, more = DEPLOYMENTS[name]
        sections = {"target": "{model: org/model}", "workload": "{acceptance: [0.9, 0.8, 0.7, 0.6]}"}
        if more:
            section, _, text = more.partition(": ")
            sections[section] = text
        text = f"name: t\nspeculation: {{method: {method}, {options}}}\nengine: {{{ENGINE[engine]}}}\n"
        text += "".join(f"{key}: {value}\n" for key, value in sections.items())
        (tmp_path / "config.yaml").write_text(text)
        config = load_config(tmp_path / "config.yaml", overrides)
        if method in ("p_eagle", "medusa"):  # heads without a tiny config here: what a plan says of them
            ngram = load_config(tmp_path / "config.yaml", ["speculation={method: ngram, draft_length: 3}"])
            return config, make_plan(ngram, smollm2).as_json() | {"method": method}, smollm2
        plan = make_plan(config, smollm2, draft=draft_of(method)).as_json()
        assert plan["method"] == method
        return config, plan, smollm2

    return make


def text_of(made: Translation) -> str:
    parts = [made.line, *(f"lost: {text}" for text in made.lost), *(f"note: {text}" for text in made.notes)]
    parts += [f"--- {name}\n{text}" for name, text in made.files.items()]
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_translation_is_exactly_this(name: str, server: str, deployment):
    try:
        made = text_of(translate(*deployment(name), server))
    except PlanInfeasible as refused:
        made = f"refused: {refused}\n"
    assert made == (GOLDEN / f"{name}.{server}.txt").read_text()


@pytest.mark.parametrize("server", SERVERS)
def test_a_command_is_one_shell_line_with_the_configs_sizes(server: str, deployment):
    made = translate(*deployment("eagle3"), server)
    assert shlex.split(made.line) == made.command
    assert "4096" in made.line.replace(str(16 * 4096), "4096") or made.files
    if server == "vllm":
        speculative = json.loads(made.command[made.command.index("--speculative-config") + 1])
        assert speculative == {"method": "eagle3", "num_speculative_tokens": 4, "model": "org/draft"}


def test_trtllm_serve_gets_a_file_that_its_version_takes(deployment, tmp_path: Path):
    made = translate(*deployment("eagle3"), "trtllm-serve")
    (tmp_path / "made.yaml").write_text(made.files["trtllm-serve.yaml"])
    assert check_file(tmp_path / "made.yaml", "1.3.0rc29") == ()
    assert "speculative_model: org/draft" in made.files["trtllm-serve.yaml"]


def test_a_schedule_is_kept_where_there_is_one_and_missed_where_not(deployment):
    config, plan, facts = deployment("eagle3")
    plan |= {"draft_length_policy": "schedule", "schedule": {"4": 4, "8": 2, "16": 0}}
    vllm = translate(config, plan, facts, "vllm")
    speculative = json.loads(vllm.command[-1])
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 4, 4], [5, 8, 2], [9, 16, 0]]
    for server in ("sglang", "llama.cpp"):
        assert any("schedule" in text for text in translate(config, plan, facts, server).lost)
    assert "{4: 4, 8: 2}" in translate(config, plan, facts, "trtllm-serve").files["trtllm-serve.yaml"]


def test_what_no_other_server_keeps_is_said(deployment):
    config, plan, facts = deployment("ngram", "speculation.pool_tokens=4096", "serving.instances=2")
    for server in ("vllm", "sglang", "llama.cpp"):
        lost = " | ".join(translate(config, plan, facts, server).lost)
        for word in ("pool_tokens", "instances", "numerics exact", "int8_weight_only"):
            assert word in lost, (server, word)


def test_the_command_prints_a_line_a_shell_can_run(tmp_path: Path, monkeypatch, capsys):
    from tests.bare_configs import SMOLLM2

    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "c.yaml").write_text(
        "name: t\ntarget: {model: ./config.json}\nspeculation: {method: ngram, draft_length: 4}\n"
        "engine: {max_seq_len: 2048}\nworkload: {acceptance: [0.9, 0.8]}\n"
    )
    assert main(["translate", "c.yaml", "--to", "vllm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm serve ") and all(line.startswith("# ") for line in lines[1:])
    assert main(["translate", "c.yaml", "--to", "trtllm-serve", "--out", "made", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["command"][0] == "trtllm-serve"
    assert (tmp_path / "made" / "trtllm-serve.yaml").is_file()
    assert main(["translate", "c.yaml", "--to", "ollama"]) == 2
