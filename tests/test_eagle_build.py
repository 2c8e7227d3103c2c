"""Heads of the EAGLE family and MTP modules from the config to text: planned, compiled, packaged, decoded.

The heads are random: hardly any draft is right, and the text must be the plain one all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.test_draft_model_build import accepted, requests
from tests.tiny_heads import REDUCED, tiny_head
from tests.tiny_models import with_tokenizer
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, PlanInfeasible, SetupError
from trtspec.pipeline import Build, build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import Completion, GenerationRequest

CONFIG = """
name: pair
target: {{model: {target}}}
speculation: {{method: {method}, draft_length: 4, draft: {{model: {draft}}}{options}}}
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""

# name → method, settings of the head, options of the config
PAIRS = {
    "eagle3 tree": ("eagle3", {"d2t": REDUCED}, ", top_k: 3"),
    "eagle3 chain": ("eagle3", {"own_lm_head": False, "bfloat16": True}, ", shape: chain"),
    "eagle3 int8": ("eagle3", {"intermediate_size": 128}, ""),
    "eagle3 own embedding": ("eagle3", {"hidden_size": 48, "own_embedding": True, "head_dim": 32}, ""),
    "eagle tree": ("eagle", {"own_lm_head": False}, ""),
    "eagle own tree": ("eagle", {}, ", choices: [[0], [1], [0, 0], [0, 1]]"),
    "eagle2": ("eagle2", {}, ""),
    "p_eagle": ("p_eagle", {"d2t": REDUCED}, ""),
    "mtp": ("mtp", {}, ""),
    "mtp two modules": ("mtp", {"num_hidden_layers": 2, "d2t": REDUCED}, ", min_path_probability: 0.001"),
}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    """A function from the name of a pair to its finished build."""
    place = tmp_path_factory.mktemp("builds")
    store = Store(place / "cache")
    builds: dict[str, Build] = {}

    def make(name: str) -> Build:
        if name not in builds:
            method, settings, options = PAIRS[name]
            folder, path = place / f"{name}-head", place / f"{name}.yaml"
            head = tiny_head("eagle" if method == "eagle2" else method, **settings)
            (mtp if method == "mtp" else eagle).write_head(head, folder)
            draft = f"{folder}, quantization: int8_weight_only" if "int8" in name else folder
            path.write_text(CONFIG.format(target=target, method=method, draft=draft, options=options))
            builds[name] = build(load_config(path), place / name, store=store)
        return builds[name]

    return make


def generate(engine: Path, asked: Sequence[GenerationRequest], **settings: object) -> list[Completion]:
    with Runtime.open(engine, **settings) as runtime:
        return runtime.generate_many(asked)


@pytest.mark.model
@pytest.mark.parametrize("name", PAIRS)
def test_greedy_and_sampled_text_is_the_plain_engine_s(made: Callable[[str], Build], name: str) -> None:
    engine = made(name).out / "engine"
    asked = [
        *requests(),
        *(replace(r, request_id=f"s{r.request_id}") for r in requests(temperature=0.8, top_p=0.9)),
    ]
    plain = generate(engine, asked, speculate=False)
    drafted = generate(engine, asked)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(step.drafted for c in drafted for step in c.steps) > sum(len(c.steps) for c in drafted)
    assert accepted(drafted) < 0.3
    alone = generate(engine, asked[:3], max_concurrency=1)
    assert [c.steps[3].accepted for c in alone] == [c.steps[3].accepted for c in drafted[:3]]


@pytest.mark.model
def test_the_engine_captures_what_the_head_reads_and_holds_all_of_it(made: Callable[[str], Build]) -> None:
    for name, taps in (("eagle3 tree", (0, 1, 2)), ("eagle tree", (2,)), ("mtp", (2,))):
        out = made(name).out
        assert EngineInfo.read(out / "engine").spec.taps == taps
        assert EngineInfo.read(out / "engine").spec.trees == ("tree" in name)
        listed = {file["name"] for file in json.loads((out / "manifest.json").read_text())["files"]}
        assert {"engine/head/head.json", "engine/head/model.onnx", "engine/head/engine.json"} <= listed
        served = out / "repository" / "tensorrt_llm" / "1" / "engine"
        asked = requests(2)
        assert [c.token_ids for c in generate(served, asked)] == [
            c.token_ids for c in generate(out / "engine", asked)
        ]


@pytest.mark.model
def test_an_engine_without_its_head_is_not_served_with_drafts(
    made: Callable[[str], Build], tmp_path: Path
) -> None:
    import shutil

    engine = tmp_path / "engine"
    shutil.copytree(made("eagle3 tree").out / "engine", engine)
    shutil.rmtree(engine / "head")
    with pytest.raises(SetupError, match="no draft head"):
        Runtime.open(engine)
    Runtime.open(engine, speculate=False).close()


@pytest.mark.parametrize(
    ("method", "head", "error", "said"),
    [
        ("eagle3", tiny_head("eagle"), ConfigError, "method is eagle3, the draft is a eagle head"),
        ("eagle", tiny_head("eagle3"), ConfigError, "method is eagle, the draft is a eagle3 head"),
        ("eagle3", tiny_head("eagle3", captured=(0, 1, 3)), ConfigError, "captured layer 4 does not exist"),
        ("eagle3", tiny_head("eagle3", num_target_layers=4), ConfigError, "made for a target of 4 layers"),
        (
            "eagle3",
            tiny_head("eagle3", hidden_size=48, head_dim=32),
            ConfigError,
            "no embedding of its own|cannot share",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_anything_is_built(
    target: Path, tmp_path: Path, method: str, head: object, error: type[Exception], said: str
) -> None:
    eagle.write_head(head, tmp_path / "head")
    path = tmp_path / "pair.yaml"
    path.write_text(CONFIG.format(target=target, method=method, draft=tmp_path / "head", options=""))
    with pytest.raises(error, match=said):
        build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)


def test_a_format_that_no_head_runs_in_is_refused(target: Path, tmp_path: Path) -> None:
    eagle.write_head(tiny_head("eagle3"), tmp_path / "head")
    path = tmp_path / "pair.yaml"
    draft = f"{tmp_path / 'head'}, quantization: fp8"
    path.write_text(CONFIG.format(target=target, method="eagle3", draft=draft, options=""))
    with pytest.raises(PlanInfeasible, match="does not run heads of eagle3 in fp8"):
        build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)


def test_modules_that_are_in_no_folder_and_not_in_the_target_are_asked_for(
    target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mtp.yaml"
    path.write_text(
        f"name: m\ntarget: {{model: {target}}}\nspeculation: {{method: mtp}}\n"
        "workload: {context: 32, output_length: 32}\n"
    )
    with pytest.raises(PlanInfeasible, match="no MTP layers"):
        build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)


def test_a_stretched_output_layer_is_refused(target: Path, tmp_path: Path) -> None:
    """One that has more rows than d2t maps."""
    head = tiny_head("eagle3", d2t=REDUCED)
    stretched = np.zeros((130, 64), np.float32)
    eagle.write_head(replace(head, tensors={**head.tensors, "lm_head.weight": stretched}), tmp_path / "head")
    path = tmp_path / "pair.yaml"
    path.write_text(CONFIG.format(target=target, method="eagle3", draft=tmp_path / "head", options=""))
    with pytest.raises(ConfigError, match=r"\[130, 64\], draft_vocab_size is 120"):
        build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)
