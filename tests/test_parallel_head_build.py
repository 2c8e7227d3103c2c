"""Parallel heads from the config to text: trained on a tiny target's own text, compiled into its engine, decoded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.test_draft_model_build import accepted, generate, requests
from tests.tiny_models import with_tokenizer
from tests.tiny_parallel_heads import fitted, hydra_head, medusa_head, own_texts, without_padding
from trtspec.checkpoints.head_layouts import dflash, hydra, medusa
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, SetupError
from trtspec.pipeline import build
from trtspec.runtime import Runtime
from trtspec.store import Store

CONFIG = """
name: heads
target: {{model: {target}}}
speculation: {{method: {method}, draft_length: {length}, draft: {{model: {draft}}}{options}}}
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""
HEADS = 3
CAPTURED = (0, 2)
LAYOUTS = {"medusa": medusa, "hydra": hydra, "dflash": dflash, "dspark": dflash}
RANDOM = {"medusa": medusa_head, "hydra": hydra_head}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_padding(tiny_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(model, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a method to a head that knows by heart what the target writes after the prompts of `requests`."""
    folder = tmp_path_factory.mktemp("trained")
    texts = own_texts(model, [r.prompt for r in requests()], 40)

    def make(method: str) -> Path:
        if not (folder / method).is_dir():
            block = method in ("dflash", "dspark")
            head, curves = fitted(
                method,
                model,
                texts,
                folder / "work",
                draft_length=HEADS,
                captured_layers=CAPTURED if block else (),
            )
            assert curves.held_out[-1][1].acceptance_length > 2.7 > curves.held_out[0][1].acceptance_length
            shutil.rmtree(folder / "work")
            LAYOUTS[method].write_head(head, folder / method)
        return folder / method

    return make


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a method, a head, a draft length and options to the engine folder of a finished build."""
    place = tmp_path_factory.mktemp("builds")
    store = Store(place / "cache")
    builds: dict[str, Path] = {}

    def make(method: str, head: Path, length: int, options: str = "") -> Path:
        text = CONFIG.format(target=target, method=method, draft=head, length=length, options=options)
        if text not in builds:
            path = place / f"{len(builds)}.yaml"
            path.write_text(text)
            builds[text] = build(load_config(path), place / str(len(builds)), store=store).out / "engine"
        return builds[text]

    return make


@pytest.mark.model
@pytest.mark.parametrize(
    ("method", "length", "options"),
    [
        ("medusa", 3, ", shape: chain"),
        ("medusa", 6, ""),
        ("hydra", 6, ""),
        ("hydra", 5, ", choices: [[0, 0, 0], [1], [2, 0]]"),
        ("dflash", 3, ""),
        ("dspark", 3, ""),
    ],
    ids=["medusa-chain", "medusa-searched", "hydra-searched", "hydra-choices", "dflash", "dspark"],
)
def test_trained_heads_are_accepted_and_the_text_is_the_plain_one(
    made: Callable[..., Path], trained: Callable[[str], Path], method: str, length: int, options: str
) -> None:
    engine = made(method, trained(method), length, options)
    plain = generate(engine, requests(), speculate=False)
    drafted = generate(engine, requests())
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    steps = [step for completion in drafted for step in completion.steps]
    assert sum(step.accepted for step in steps) / len(steps) > 1.5, (
        "three a step at most, and they know the text"
    )
    asked = requests(temperature=0.3)
    together = generate(engine, asked)
    assert accepted(together) > 0
    with Runtime.open(engine, max_concurrency=1, speculate=False) as runtime:
        assert [runtime.generate(r).token_ids for r in asked] == [c.token_ids for c in together]


@pytest.mark.model
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_random_heads_change_nothing_but_the_steps(
    made: Callable[..., Path], tmp_path: Path, method: str
) -> None:
    LAYOUTS[method].write_head(RANDOM[method](HEADS), tmp_path / "random")
    engine = made(method, tmp_path / "random", 5, ", choices: [[0, 0], [1, 3], [9]]")
    for sampling in ({}, {"temperature": 0.8, "top_p": 0.95}):
        plain = generate(engine, requests(**sampling), speculate=False)
        assert [c.token_ids for c in generate(engine, requests(**sampling))] == [c.token_ids for c in plain]


@pytest.mark.model
def test_the_engine_captures_the_last_layer_and_holds_as_many_heads_as_it_drafts(
    made: Callable[..., Path], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    built = made("medusa", trained("medusa"), 2)
    info = EngineInfo.read(built)
    assert info.spec.taps == (info.layers - 1,)
    head = json.loads((built / "head" / "head.json").read_text())
    assert len(head["hits"]) == 2 < HEADS == head["trained"]
    assert all(0 <= b <= a <= 1 for ranks in head["hits"] for a, b in pairwise(ranks))
    engine = tmp_path / "engine"
    shutil.copytree(built, engine)
    (engine / "head" / "head.json").unlink()
    with pytest.raises(SetupError, match="no draft head"):
        Runtime.open(engine)
    Runtime.open(engine, speculate=False).close()


@pytest.mark.model
def test_a_fixed_tree_has_as_many_branches_as_it_asks_for_and_no_more_depth_than_heads(
    made: Callable[..., Path], trained: Callable[[str], Path]
) -> None:
    engine = made("medusa", trained("medusa"), 6, ", choices: [[0], [1], [2], [3], [4], [0, 0]]")
    assert EngineInfo.read(engine).spec.max_branches == 5
    with pytest.raises(ConfigError, match="4 deep, there are 3 heads"):
        made("medusa", trained("medusa"), 6, ", choices: [[0, 0, 0, 0]]")
