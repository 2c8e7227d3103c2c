"""Making a draft from its target: what is kept, that a killed run goes on as if nothing happened, that it learns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import with_tokenizer
from trtspec.cli import main
from trtspec.compile import CompileRequest, compile_engine
from trtspec.errors import PlanInfeasible, StageFailed
from trtspec.events import Event, Progress, silent
from trtspec.train.draft_model import TrainReport, TrainRequest, train_draft_model
from trtspec.train.responses import packaged_prompts

pytestmark = pytest.mark.model

PROMPTS = tuple(f"{'abcdefghij'[i % 10] * (3 + i)} {i}" for i in range(24))
LICENCE = {"license": "apache-2.0", "base_model": "tiny"}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def request_for(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainRequest]:
    engine = tmp_path_factory.mktemp("engine")
    compile_engine(CompileRequest(target, "tiny", {"method": "none", "draft_length": 0}, max_batch=4), engine)
    settings = {"layers": 1, "answer_tokens": 20, "epochs": 16, "learning_rate": 5e-3, "threads": 1}
    return lambda **changes: TrainRequest(target, engine, PROMPTS, **{**settings, **changes})


@pytest.fixture(scope="module")
def trained(
    request_for: Callable[..., TrainRequest], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainReport]:
    into = tmp_path_factory.mktemp("draft")
    return into, train_draft_model(request_for(), tmp_path_factory.mktemp("work"), into, LICENCE)


class Killed(BaseException):
    """What no part of the training may catch."""


def test_layers_are_kept_evenly_from_the_first_to_the_last() -> None:
    from trtspec.train.distill_torch import kept_layers

    assert kept_layers(30, 4) == (0, 10, 19, 29)
    assert kept_layers(30, 2) == (0, 29)
    assert kept_layers(3, 1) == (0,)
    with pytest.raises(ValueError, match="from 1 to 2 of 3 layers, not 3"):
        kept_layers(3, 3)


def test_the_draft_is_a_whole_model_that_learned(trained: tuple[Path, TrainReport], target: Path) -> None:
    import transformers

    folder, report = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == len(report.kept_layers) == 1
    source = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert model.lm_head.weight.equal(source.lm_head.weight), "embedding and output layer stay the target's"
    assert (folder / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    assert json.loads((folder / "training_report.json").read_text())["request"]["prompts"] == len(PROMPTS)
    assert report.answers == len(PROMPTS)
    assert report.agreement_after > report.agreement_before + 0.1


@pytest.mark.parametrize("moment", [("answers of the target", 0), ("distillation", 1), ("distillation", 30)])
def test_a_killed_run_goes_on_to_the_same_weights(
    request_for: Callable[..., TrainRequest],
    trained: tuple[Path, TrainReport],
    tmp_path: Path,
    moment: tuple[str, int],
) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, Progress) and (event.task, event.done) == moment:
            raise Killed

    work, first, second = tmp_path / "work", tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    with pytest.raises(Killed):
        train_draft_model(request_for(), work, first, LICENCE, kill)
    steps: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, Progress) and event.task == "distillation":
            steps.append(event.done)

    train_draft_model(request_for(), work, second, LICENCE, count)
    if moment[1] == 30:
        assert steps[0] == 26, "it goes on after the checkpoint of step 25"
    whole = (trained[0] / "model.safetensors").read_bytes()
    assert (second / "model.safetensors").read_bytes() == whole


def test_other_settings_never_go_on_from_a_checkpoint(
    request_for: Callable[..., TrainRequest], trained: tuple[Path, TrainReport], tmp_path: Path
) -> None:
    into = tmp_path / "draft"
    into.mkdir()
    train_draft_model(request_for(seed=1), tmp_path / "work", into, LICENCE)
    assert (into / "model.safetensors").read_bytes() != (trained[0] / "model.safetensors").read_bytes()


def test_the_teacher_is_remembered_with_its_probabilities(
    request_for: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    """Greedy answers: the token that was written is the likeliest one that was kept, at every position."""
    from trtspec.train.draft_model import _answers

    examples = _answers(request_for(), tmp_path, silent)
    assert len(examples) == len(PROMPTS)
    for example in examples:
        written = example.tokens[example.start :]
        assert example.ids.shape == example.probabilities.shape == (len(written), 32)
        best = np.take_along_axis(example.ids, example.probabilities.argmax(axis=1)[:, None], axis=1)[:, 0]
        assert np.array_equal(best, written)
        assert np.allclose(example.probabilities.sum(axis=1), 1, atol=1e-5)


def test_what_cannot_be_trained_is_refused(request_for: Callable[..., TrainRequest], tmp_path: Path) -> None:
    into = tmp_path / "draft"
    into.mkdir()
    with pytest.raises(PlanInfeasible, match="from 1 to 2 of 3 layers, not 7"):
        train_draft_model(request_for(layers=7), tmp_path / "work", into, LICENCE)
    few = TrainRequest(request_for().target, request_for().engine, PROMPTS[:1], layers=1, answer_tokens=4)
    with pytest.raises(StageFailed, match="too few"):
        train_draft_model(few, tmp_path / "work", into, LICENCE)


def test_the_packaged_prompts_are_none_of_the_evaluation_s() -> None:
    from trtspec.evaluate.data import load_prompts

    asked = {turn for prompt in load_prompts("builtin").prompts for turn in prompt.turns}
    prompts = packaged_prompts()
    assert len(prompts) > 150
    assert not asked & set(prompts)


@pytest.fixture
def config(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS[:12]))
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
name: tiny
target: {{model: {target}}}
speculation: {{method: draft_model, draft_length: 2, draft: {{model: ./draft}}}}
engine: {{max_batch_size: 4, max_seq_len: 128, threads: 1}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
""")
    yield path


def test_the_command_makes_the_draft_the_config_names_and_the_build_takes_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--layers",
        "2",
        "--epochs",
        "1",
        "--answer-tokens",
        "8",
        "--data",
        str(tmp_path / "prompts.jsonl"),
    ]
    assert main(["train", str(config), *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["out"] == str(tmp_path / "draft")
    assert result["kept_layers"] == [0, 2]
    assert main(["build", str(config), "--out", str(tmp_path / "out"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["result"]["plan"]
    assert (plan["method"], plan["draft_length"]) == ("draft_model", 2)
    assert json.loads((tmp_path / "out" / "engine" / "draft" / "engine.json").read_text())["layers"] == 2


def test_the_command_replaces_nothing_it_did_not_make(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "thesis.tex").write_text("years of work")
    assert main(["train", str(config)]) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert main(["train", str(config), "--set", "speculation={method: ngram}"]) == 2
    assert "only a draft model is made here" in capsys.readouterr().err
