"""SpecInfer from the config to text: two drafts planned, quantized, compiled into the target's engine, and merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_draft_model_build import accepted, generate, requests
from tests.test_lossless_corpus import assert_equal, corpus
from tests.tiny_models import with_tokenizer
from trtspec.config import Config, load_config
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, SetupError
from trtspec.pipeline import Build, build
from trtspec.runtime import Runtime
from trtspec.store import Store

CONFIG = """
name: trio
target: {{model: {target}}}
speculation:
  method: specinfer
  draft_length: 6
  drafts: [{{model: {first}}}, {{model: {second}, quantization: {second_format}}}]
  min_token_probability: 0
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


def config_of(folder: Path, target: Path, drafts: Sequence[Path], second_format: str = "none") -> Config:
    path = folder / "trio.yaml"
    text = CONFIG.format(target=target, first=drafts[0], second=drafts[1], second_format=second_format)
    path.write_text(text)
    return load_config(path)


@pytest.fixture(scope="module")
def models(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a draft of other random weights."""
    return {
        name: with_tokenizer(tiny_model(variant), tmp_path_factory.mktemp(name))
        for name, variant in (("target", "llama"), ("stranger", "llama-tied"))
    }


@pytest.fixture(scope="module")
def made(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A draft that is hardly ever right, and one, the target itself, that always is."""
    place = tmp_path_factory.mktemp("trio")
    config = config_of(place, models["target"], (models["stranger"], models["target"]))
    return build(config, place / "out", store=Store(place / "cache"))


@pytest.mark.model
def test_output_is_the_plain_engine_s_and_the_better_draft_carries_it(made: Build) -> None:
    engine = made.out / "engine"
    plain = generate(engine, requests(), speculate=False)
    drafted = generate(engine, requests())
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    steps = [step for completion in drafted for step in completion.steps]
    whole = [step for step in steps if step.drafted == 6]
    assert sum(step.accepted for step in whole) > 0.7 * 3 * len(whole), (
        "three of the six nodes are the good draft's"
    )


@pytest.mark.model
def test_sampled_output_repeats_with_its_seed_and_in_any_company(made: Build) -> None:
    asked = requests(temperature=0.8, top_p=0.95)
    together = generate(made.out / "engine", asked)
    assert accepted(together) > 0.2  # of six nodes at most three can be
    with Runtime.open(made.out / "engine", max_concurrency=1) as runtime:
        assert [runtime.generate(r).token_ids for r in asked] == [c.token_ids for c in together]


@pytest.mark.model
def test_the_build_holds_every_draft(made: Build) -> None:
    assert [step.stage for step in made.steps] == [
        "quantize", "quantize_draft_0", "compile_draft_0", "quantize_draft_1", "compile_draft_1", "compile", "package",
    ]  # fmt: skip
    info = EngineInfo.read(made.out / "engine")
    assert info.spec.max_branches == 2
    assert [draft["quantization"] for draft in info.speculation["drafts"]] == ["none", "none"]
    listed = {file["name"] for file in json.loads((made.out / "manifest.json").read_text())["files"]}
    for number in (0, 1):
        assert {f"draft-{number}/config.json", f"engine/draft-{number}/model.onnx"} <= listed
    asked = requests(2)
    served = made.out / "repository" / "tensorrt_llm" / "1" / "engine"
    assert [c.token_ids for c in generate(served, asked)] == [
        c.token_ids for c in generate(made.out / "engine", asked)
    ]


def test_each_draft_has_its_own_format(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(tmp_path, models["target"], (models["target"],) * 2, "int8_weight_only")
    foreseen = build(config, tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)
    expected = {step.stage: step.expects for step in foreseen.steps}
    assert expected["quantize_draft_0"].endswith("none")
    assert expected["quantize_draft_1"].endswith("int8_weight_only")


@pytest.mark.model
def test_an_engine_that_lost_a_draft_is_not_served(made: Build, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(made.out / "engine", engine)
    (engine / "draft-1" / "engine.json").unlink()
    with pytest.raises(SetupError, match="not an engine folder"):
        Runtime.open(engine)


def test_every_drafts_tokenizer_is_checked_before_anything_is_built(
    models: dict[str, Path], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("config.json", "model.safetensors"):
        (foreign / name).symlink_to(models["stranger"] / name)
    words = json.loads((models["stranger"] / "tokenizer.json").read_text())
    words["model"]["vocab"] = {{"a": "b", "b": "a"}.get(w, w): i for w, i in words["model"]["vocab"].items()}
    (foreign / "tokenizer.json").write_text(json.dumps(words))
    config = config_of(tmp_path, models["target"], (models["stranger"], foreign))
    with pytest.raises(ConfigError, match="'a' is id"):
        build(config, tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)


@pytest.mark.model
def test_the_real_trio_writes_what_its_target_writes(build_of: Callable[[str], Path], shared: Path) -> None:
    config = load_config(ROOT / "build_configs" / "smollm2-specinfer.yaml")
    if not all(Path(draft.model).is_dir() for draft in config.speculation.drafts):
        pytest.skip(
            "no drafts yet: build_configs/smollm2-specinfer.yaml names the two commands that make them"
        )
    assert_equal(build_of("smollm2-specinfer"), corpus(shared)[9::60])
