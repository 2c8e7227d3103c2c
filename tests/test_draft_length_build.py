"""Draft length policies from the config to text: planned, carried by the engine, followed, the text the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tiny_models import with_tokenizer
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.pipeline import build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import Completion, GenerationRequest, SamplingParams

CONFIG = """
name: lengths
target: {{model: {target}}}
speculation: {{method: ngram, draft_length: 4, draft_length_policy: {policy}}}
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32, batch_sizes: [1, 2]}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function from a policy to the engine of a tiny model built with it."""
    place = tmp_path_factory.mktemp("lengths")
    target = with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))
    store = Store(place / "cache")

    def make(policy: str) -> Path:
        path = place / f"{policy}.yaml"
        path.write_text(CONFIG.format(target=target, policy=policy))
        return build(load_config(path), place / policy, store=store, until="compile").out / "engine"

    return make


def generate(
    engine: Path, *, speculate: bool = True, draft_length: int | None = None, temperature: float = 0.0
):
    asked = [
        GenerationRequest(
            f"r{i}",
            tuple((i * 7 + k * k) % 50 + 10 for k in range(8 + 5 * i)),
            SamplingParams(max_tokens=60, ignore_eos=True, seed=i, temperature=temperature),
        )
        for i in range(6)
    ]
    with Runtime.open(engine, speculate=speculate, draft_length=draft_length) as runtime:
        return runtime.generate_many(asked)


def drafted(completions: list[Completion]) -> list[int]:
    return [step.drafted for completion in completions for step in completion.steps]


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("policy", ["schedule", "adaptive"])
def test_output_is_the_plain_engine_s(made: Callable[[str], Path], policy: str, temperature: float) -> None:
    engine = made(policy)
    assert EngineInfo.read(engine).speculation["draft_length_policy"] == policy
    plain = generate(engine, speculate=False, temperature=temperature)
    followed = generate(engine, temperature=temperature)
    assert [c.token_ids for c in followed] == [c.token_ids for c in plain]


@pytest.mark.model
def test_the_engine_carries_what_its_policy_needs(made: Callable[[str], Path]) -> None:
    schedule = EngineInfo.read(made("schedule")).speculation
    assert set(schedule["schedule"]) >= {"3"} and "draft_ms" not in schedule
    adaptive = EngineInfo.read(made("adaptive")).speculation
    assert "schedule" not in adaptive and adaptive["draft_ms"][0] == 0 and adaptive["acceptance"]


@pytest.mark.model
def test_a_schedule_is_followed_and_a_given_length_is_kept(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read = made("schedule"), EngineInfo.read

    def off(folder: Path) -> EngineInfo:
        info = read(folder)
        info.speculation["schedule"] = {"1": 0, "3": 0}
        return info

    monkeypatch.setattr(EngineInfo, "read", staticmethod(off))
    assert set(drafted(generate(engine))) == {0}
    assert max(drafted(generate(engine, draft_length=2))) == 2


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-lookahead-schedule", "smollm2-draft-model-adaptive"])
def test_the_shipped_configs_write_what_their_target_writes(
    build_of: Callable[[str], Path], shared: Path, name: str
) -> None:
    """One request after the other and all together: with the schedule's drafts and with none."""
    from tests.test_lossless_corpus import corpus

    draft = getattr(load_config(ROOT / "build_configs" / f"{name}.yaml").speculation, "draft", None)
    if draft is not None and not Path(draft.model).is_dir():
        pytest.skip("no draft yet: trtspec train build_configs/smollm2-draft-model.yaml")
    engine = build_of(name) / "engine"

    def texts(**settings: object) -> tuple[list[tuple[int, ...]], int]:
        with Runtime.open(engine, **settings) as runtime:
            completions = runtime.generate_many(
                GenerationRequest(
                    str(i),
                    tuple(runtime.tokenizer.chat([{"role": "user", "content": text}])),
                    SamplingParams(max_tokens=48),
                )
                for i, text in enumerate(corpus(shared)[11::120])
            )
        return [c.token_ids for c in completions], sum(drafted(completions))

    plain, none = texts(speculate=False)
    alone, some = texts(max_concurrency=1)
    together, _ = texts()
    assert alone == together == plain
    assert none == 0 < some
