"""REST from a corpus to text: datastore, build, package, and trees verified by the real CPU engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import with_tokenizer
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.cli import main
from trtspec.config import load_config
from trtspec.drafters.datastore import FILE, Datastore, end_of, open_tokenizer, vocabulary_digest
from trtspec.drafters.datastore_build import suffix_array, write_datastore
from trtspec.engines.info import EngineInfo
from trtspec.errors import ConfigError, SetupError
from trtspec.pipeline import Build, build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import Completion, GenerationRequest, SamplingParams

CONFIG = """
name: retrieval
target: {{model: {target}}}
speculation: {{method: rest, datastore: {datastore}, draft_length: 6}}
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


def requests(count: int = 6, seed: int = 0, **sampling: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 7 + k * k) % 50 + 10 for k in range(8 + 5 * i)),
            SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": seed + i, **sampling}),
        )
        for i in range(count)
    ]


def generate(engine: Path, asked: Sequence[GenerationRequest], *, speculate: bool = True) -> list[Completion]:
    with Runtime.open(engine, speculate=speculate) as runtime:
        return runtime.generate_many(asked)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A build whose datastore holds the model's own answers, true and with tokens replaced: trees fork, and both
    right and wrong branches are drafted."""
    place = tmp_path_factory.mktemp("rest")
    store, path = Store(place / "cache"), place / "config.yaml"
    write(target, place / "empty", [[3, 4, 5]])
    path.write_text(CONFIG.format(target=target, datastore=place / "empty"))
    engine = build(load_config(path), place / "first", store=store, until="compile").out / "engine"
    asked = [*requests(), *requests(temperature=0.7)]
    answers = []
    for number, request in enumerate(asked):
        (completion,) = generate(engine, [request], speculate=False)
        answers.append([*request.prompt, *completion.token_ids])
        damaged, rng = np.array(answers[-1]), np.random.default_rng(number)
        damaged[rng.random(len(damaged)) < 0.15] = rng.integers(3, 200)
        answers += [damaged.tolist()] * 2  # what is wrong is more frequent
    write(target, place / "answers", answers)
    path.write_text(CONFIG.format(target=target, datastore=place / "answers"))
    return build(load_config(path), place / "out", store=store)


def write(target: Path, file: Path, documents: Sequence[Sequence[int]]) -> None:
    end = end_of(np.uint16)
    tokens = np.array([token for document in documents for token in (*document, end)], np.uint16)
    digest = vocabulary_digest(open_tokenizer(target).get_vocab())
    write_datastore(Datastore(tokens, suffix_array(tokens), digest), file)


@pytest.mark.model
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.9}])
def test_output_is_the_plain_engine_s(made: Build, sampling: dict[str, float]) -> None:
    engine = made.out / "engine"
    plain = generate(engine, requests(**sampling), speculate=False)
    drafted = generate(engine, requests(**sampling))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    steps = [step for completion in drafted for step in completion.steps]
    accepted = sum(step.accepted for step in steps)
    if not sampling:
        assert accepted > len(steps) / 2, "the datastore holds these very answers"
        # a tree and not only chains: more tokens were drafted than any path could have had accepted
        assert sum(step.drafted for step in steps) > accepted


@pytest.mark.model
def test_the_build_holds_the_datastore_wherever_it_is_served_from(made: Build) -> None:
    assert [step.stage for step in made.steps] == ["datastore", "quantize", "compile", "package"]
    info = EngineInfo.read(made.out / "engine")
    assert (info.speculation["datastore"], info.spec.max_branches) == (FILE, 4)
    served = made.out / "repository" / "tensorrt_llm" / "1" / "engine"
    asked = requests(2)
    assert [c.token_ids for c in generate(served, asked)] == [
        c.token_ids for c in generate(made.out / "engine", asked)
    ]
    manifest = json.loads((made.out / "manifest.json").read_text())
    assert f"engine/{FILE}" in {file["name"] for file in manifest["files"]}


def test_the_command_makes_what_a_build_takes(target: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    corpus, out = tmp_path / "corpus", tmp_path / "store"
    corpus.mkdir()
    (corpus / "one.txt").write_text("to be or not to be")
    assert main(["datastore", str(corpus), "--model", str(target), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["file"], result["documents"], result["skipped"]) == (str(out), 1, 0)
    datastore = Datastore.open(out)
    assert TextTokenizer.load(target).decode(datastore.tokens[:-1].tolist()) == "to be or not to be"


def test_a_dry_run_names_the_datastore_and_a_missing_one_is_an_error(target: Path, tmp_path: Path) -> None:
    def foreseen(datastore: str) -> Build:
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.format(target=target, datastore=datastore))
        return build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"), dry_run=True)

    assert [step.stage for step in foreseen("stdlib").steps] == [
        "datastore",
        "quantize",
        "compile",
        "package",
    ]
    with pytest.raises(SetupError, match="no datastore"):
        foreseen("./absent")
    (tmp_path / "text").write_text("no datastore, but text")
    with pytest.raises(ConfigError):
        foreseen("./text")


@pytest.mark.model
def test_a_datastore_of_another_tokenizer_is_refused_before_anything_is_built(
    target: Path, tmp_path: Path
) -> None:
    end = end_of(np.uint16)
    tokens = np.array([3, 4, end], np.uint16)
    write_datastore(Datastore(tokens, suffix_array(tokens), bytes(32)), tmp_path / "store")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(target=target, datastore=tmp_path / "store"))
    with pytest.raises(ConfigError, match="another tokenizer"):
        build(load_config(path), tmp_path / "out", store=Store(tmp_path / "cache"))
    assert not (tmp_path / "out").exists()
