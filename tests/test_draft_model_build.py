"""A draft model from the config to text: planned, quantized, compiled into the target's engine, packaged, decoded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_lossless_corpus import assert_equal, corpus
from tests.tiny_models import with_tokenizer
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, SetupError
from trtspec.pipeline import Build, build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import Completion, GenerationRequest, SamplingParams

CONFIG = """
name: pair
target: {{model: {target}}}
speculation: {{method: draft_model, draft_length: 3, draft: {{model: {draft}}}, min_token_probability: 0}}
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""
PADDED = 384  # rows of the twin's embedding table; the target has 320


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def twin(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target again, with its vocabulary padded further and a shorter context: every draft should be accepted."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(tiny_model("llama"))
    model.resize_token_embeddings(PADDED, mean_resizing=False)
    model.config.max_position_embeddings = 96
    saved = tmp_path_factory.mktemp("saved")
    model.save_pretrained(saved)
    return with_tokenizer(saved, tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def stranger(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other random weights: hardly any draft is accepted."""
    return with_tokenizer(tiny_model("llama-tied"), tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def made(
    target: Path, twin: Path, stranger: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Build]:
    """A function from "twin" or "stranger" to the finished build with that draft."""
    place = tmp_path_factory.mktemp("builds")
    store = Store(place / "cache")
    builds: dict[str, Build] = {}

    def make(name: str) -> Build:
        if name not in builds:
            path = place / f"{name}.yaml"
            path.write_text(CONFIG.format(target=target, draft={"twin": twin, "stranger": stranger}[name]))
            builds[name] = build(load_config(path), place / name, store=store)
        return builds[name]

    return make


def requests(count: int = 6, **sampling: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 7 + k * k) % 50 + 10 for k in range(8 + 5 * i)),
            SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": i, **sampling}),
        )
        for i in range(count)
    ]


def generate(engine: Path, asked: Sequence[GenerationRequest], *, speculate: bool = True) -> list[Completion]:
    with Runtime.open(engine, speculate=speculate) as runtime:
        return runtime.generate_many(asked)


def accepted(completions: Sequence[Completion]) -> float:
    steps = [step for completion in completions for step in completion.steps]
    return sum(step.accepted for step in steps) / sum(step.drafted for step in steps)


@pytest.mark.model
@pytest.mark.parametrize(("draft", "least", "most"), [("twin", 0.9, 1.0), ("stranger", 0.0, 0.2)])
def test_greedy_output_is_the_plain_engine_s(
    made: Callable[[str], Build], draft: str, least: float, most: float
) -> None:
    engine = made(draft).out / "engine"
    plain = generate(engine, requests(), speculate=False)
    drafted = generate(engine, requests())
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert least <= accepted(drafted) <= most


@pytest.mark.model
def test_sampled_output_repeats_with_its_seed_and_in_any_company(made: Callable[[str], Build]) -> None:
    engine = made("twin").out / "engine"
    asked = requests(temperature=0.8, top_p=0.95)
    together = generate(engine, asked)
    assert accepted(together) > 0.9, "q is almost p"
    with Runtime.open(engine, max_concurrency=1) as runtime:
        assert [runtime.generate(r).token_ids for r in asked] == [c.token_ids for c in together]


@pytest.mark.model
def test_drafting_stops_at_the_drafts_own_context_and_the_text_goes_on(made: Callable[[str], Build]) -> None:
    engine = made("twin").out / "engine"
    assert EngineInfo.read(engine / "draft").spec.max_seq_len == 96 < EngineInfo.read(engine).spec.max_seq_len
    (asked,) = requests(1, max_tokens=110)
    (drafted,) = generate(engine, [asked])
    (plain,) = generate(engine, [asked], speculate=False)
    assert drafted.token_ids == plain.token_ids
    assert {step.drafted for step in drafted.steps[-8:]} == {0}


@pytest.mark.model
def test_the_build_holds_the_draft_wherever_it_is_served_from(
    made: Callable[[str], Build], tmp_path: Path
) -> None:
    made_build = made("twin")
    out = made_build.out
    assert [step.stage for step in made_build.steps] == [
        "quantize", "quantize_draft", "compile_draft", "compile", "package",
    ]  # fmt: skip
    assert (out / "draft" / "model.safetensors").is_file()
    info = EngineInfo.read(out / "engine")
    assert info.speculation["draft"] == {"model": info.speculation["draft"]["model"], "quantization": "none"}
    assert EngineInfo.read(out / "engine" / "draft").spec.vocab_size == PADDED
    served = out / "repository" / "tensorrt_llm" / "1" / "engine"
    asked = requests(2)
    assert [c.token_ids for c in generate(served, asked)] == [
        c.token_ids for c in generate(out / "engine", asked)
    ]
    listed = {file["name"] for file in json.loads((out / "manifest.json").read_text())["files"]}
    assert {"draft/config.json", "engine/draft/engine.json", "engine/draft/model.onnx"} <= listed


@pytest.mark.model
def test_another_draft_leaves_the_target_as_it_was_built(made: Callable[[str], Build]) -> None:
    made("twin")
    actions = {step.stage: step.action for step in made("stranger").steps}
    assert actions == {
        "quantize": "cached", "quantize_draft": "run", "compile_draft": "run", "compile": "run", "package": "run",
    }  # fmt: skip


@pytest.mark.model
def test_an_engine_whose_draft_is_gone_or_foreign_is_not_served(
    made: Callable[[str], Build], tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(made("twin").out / "engine", engine)
    tokenizer = engine / "draft" / "tokenizer.json"
    words = json.loads(tokenizer.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.unlink()
    tokenizer.write_text(json.dumps(words))
    with pytest.raises(ConfigError, match="another one of the same size"):
        Runtime.open(engine)
    (engine / "draft" / "engine.json").unlink()
    with pytest.raises(SetupError, match="not an engine folder"):
        Runtime.open(engine)
    Runtime.open(engine, speculate=False).close()


def test_a_plan_refuses_a_draft_with_another_tokenizer(target: Path, stranger: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("config.json", "model.safetensors"):
        (foreign / name).symlink_to(stranger / name)
    words = json.loads((stranger / "tokenizer.json").read_text())
    words["model"]["vocab"] = {
        {"a": "b", "b": "a"}.get(word, word): id for word, id in words["model"]["vocab"].items()
    }
    (foreign / "tokenizer.json").write_text(json.dumps(words))
    path = tmp_path / "foreign.yaml"
    path.write_text(CONFIG.format(target=target, draft=foreign))
    with pytest.raises(ConfigError, match="'a' is id"):
        build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)


def test_a_dry_run_names_the_stages_of_the_draft(target: Path, stranger: Path, tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(CONFIG.format(target=target, draft=stranger))
    config = load_config(path)
    store = Store(tmp_path / "cache")
    foreseen = build(config, tmp_path / "out", store=store, dry_run=True)
    assert [step.stage for step in foreseen.steps][1:3] == ["quantize_draft", "compile_draft"]
    only = build(config, tmp_path / "out", store=store, dry_run=True, until="quantize")
    assert [step.stage for step in only.steps] == ["quantize"]


@pytest.mark.model
def test_the_real_pair_writes_what_its_target_writes(build_of: Callable[[str], Path], shared: Path) -> None:
    config = load_config(ROOT / "build_configs" / "smollm2-draft-model.yaml")
    if not Path(config.speculation.draft.model).is_dir():
        pytest.skip("no draft yet: trtspec train build_configs/smollm2-draft-model.yaml")
    assert_equal(build_of("smollm2-draft-model"), corpus(shared)[7::40])
