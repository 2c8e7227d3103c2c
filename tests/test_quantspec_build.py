"""QuantSpec from the config to text: one model quantized twice, two engines over one cache, the plain engine's text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.test_draft_model_build import accepted, generate
from tests.test_lossless_corpus import assert_equal, corpus
from tests.tiny_models import with_tokenizer
from trtspec.config import load_config
from trtspec.drafters.factory import open_drafter
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, SetupError
from trtspec.pipeline import Build, build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import GenerationRequest, SamplingParams

pytestmark = pytest.mark.model
CONFIG = """
name: self
target: {{model: {target}}}
speculation:
  method: quantspec
  draft_length: 4
  kv_group_size: 32
  draft_quantization: int8_weight_only
  min_token_probability: 0
engine: {{max_batch_size: 3, max_seq_len: 256}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    place = tmp_path_factory.mktemp("build")
    (place / "self.yaml").write_text(CONFIG.format(target=target))
    return build(load_config(place / "self.yaml"), place / "out", store=Store(place / "cache"))


def requests(count: int = 6, **sampling: object) -> list[GenerationRequest]:
    """Prompts and outputs that lie on both sides of the first groups that are quantized."""
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 7 + k * k) % 50 + 10 for k in range(8 + 17 * i)),
            SamplingParams(**{"max_tokens": 110, "ignore_eos": True, "seed": i, **sampling}),
        )
        for i in range(count)
    ]


def test_greedy_output_is_the_plain_engine_s(made: Build) -> None:
    """Plain decoding of the same engine over the same 8-bit cache, token for token."""
    engine = made.out / "engine"
    plain = generate(engine, requests(), speculate=False)
    drafted = generate(engine, requests())
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert 0.3 < accepted(drafted) < 1, "a self draft that is never or always right"


@pytest.mark.parametrize("length", [1, 2, 7, 31])
def test_the_draft_length_changes_nothing(made: Build, length: int) -> None:
    engine, asked = made.out / "engine", requests(3)
    plain = generate(engine, asked, speculate=False)
    with Runtime.open(engine, draft_length=length) as runtime:
        assert [c.token_ids for c in runtime.generate_many(asked)] == [c.token_ids for c in plain]


def test_sampled_output_repeats_with_its_seed_and_in_any_company(made: Build) -> None:
    engine, asked = made.out / "engine", requests(temperature=0.8, top_p=0.95)
    together = generate(engine, asked)
    assert accepted(together) > 0.3
    with Runtime.open(engine, max_concurrency=1) as runtime:
        assert [runtime.generate(r).token_ids for r in asked] == [c.token_ids for c in together]


def test_the_next_turn_of_a_conversation_goes_on_from_the_cache(made: Build) -> None:
    """And a request that shares less than all of what a slot holds starts anew: older rows are held in 8 bits only."""
    (first,) = requests(1, max_tokens=100)
    with Runtime.open(made.out / "engine") as runtime:
        answer = runtime.generate(first).token_ids
        turn = dataclasses.replace(first, request_id="turn", prompt=(*first.prompt, *answer, 20, 21))
        again = dataclasses.replace(turn, request_id="again", prompt=(*turn.prompt[:70], 30, 31))
        completions = [runtime.generate(turn), runtime.generate(again)]
    assert completions[0].cached_tokens >= len(turn.prompt) - 8
    assert completions[1].cached_tokens == 0
    for asked, completion in zip((turn, again), completions, strict=True):
        (alone,) = generate(made.out / "engine", [asked], speculate=False)
        assert completion.token_ids == alone.token_ids


def test_the_build_holds_two_engines_of_one_model(made: Build) -> None:
    assert [step.stage for step in made.steps] == [
        "quantize", "quantize_draft", "compile_draft", "compile", "package",
    ]  # fmt: skip
    info, draft = EngineInfo.read(made.out / "engine"), EngineInfo.read(made.out / "engine" / "draft")
    assert (info.kv_group, draft.kv_group) == (32, 32)
    assert info.spec.max_rows == 32
    assert "8-bit" in draft.weights and "8-bit" not in info.weights
    assert info.speculation["draft_quantization"] == "int8_weight_only"
    served = made.out / "repository" / "tensorrt_llm" / "1" / "engine"
    asked = requests(2)
    assert [c.token_ids for c in generate(served, asked)] == [
        c.token_ids for c in generate(made.out / "engine", asked)
    ]


def test_a_draft_of_another_cache_is_not_served(made: Build, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(made.out / "engine", engine)
    path = engine / "draft" / "engine.json"
    raw = json.loads(path.read_text()) | {"kv_group": 64}
    path.unlink()
    path.write_text(json.dumps(raw))
    with pytest.raises(SetupError, match="another KV cache"):
        Runtime.open(engine)
    with pytest.raises(ValueError, match="no target was given"):
        open_drafter({"method": "quantspec"}, engine=engine)


def test_a_draft_as_long_as_a_group_is_refused(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(CONFIG.format(target=target).replace("draft_length: 4", "draft_length: 32"))
    with pytest.raises(ConfigError, match="not below kv_group_size"):
        load_config(path)


def test_the_real_model_writes_what_it_writes_alone(build_of, shared: Path) -> None:
    assert_equal(build_of("smollm2-quantspec"), long_prompts(shared))


def long_prompts(shared: Path) -> Sequence[str]:
    """Some that reach past the first quantized groups."""
    return sorted(corpus(shared), key=len)[240::60]
