"""Making a draft from its target: that it learns, and that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.conftest import PROMPTS
from trtspec.cli import main
from trtspec.errors import PlanInfeasible, StageFailed
from trtspec.events import Event, Progress, silent
from trtspec.train.job import TrainRequest, split, train_draft
from trtspec.train.prompts import TrainingPrompt, packaged_prompts
from trtspec.train.report import TrainingReport
from trtspec.train.texts import Text

pytestmark = pytest.mark.model

DRAFT_MODEL = {"options": {"layers": 1}}


class Killed(BaseException):
    """What no part of the training may catch."""


def train(
    request: TrainRequest, work: Path, into: Path, emit: Callable[[Event], None] = silent
) -> TrainingReport:
    work.mkdir(parents=True, exist_ok=True)
    into.mkdir(exist_ok=True)
    licence = {"license": "apache-2.0", "base_model": "tiny"}
    return train_draft(request, work, into, licence=licence, command="trtspec train tiny.yaml", emit=emit)


@pytest.fixture(scope="module")
def trained(
    request_for: Callable[..., TrainRequest], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainingReport]:
    place = tmp_path_factory.mktemp("trained")
    return place / "draft", train(request_for(**DRAFT_MODEL), place / "all" / "work", place / "draft")


def test_the_draft_is_a_whole_model_that_learned(
    trained: tuple[Path, TrainingReport], sure_target: Path
) -> None:
    import transformers

    folder, report = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 1
    source = transformers.AutoModelForCausalLM.from_pretrained(sure_target)
    assert model.lm_head.weight.equal(source.lm_head.weight), "embedding and output layer stay the target's"
    assert (folder / "tokenizer.json").read_bytes() == (sure_target / "tokenizer.json").read_bytes()
    assert report.responses == len(PROMPTS)
    assert report.loss[-1][1] < report.loss[0][1]
    assert report.after["accuracy"][0] > report.before["accuracy"][0] + 0.1
    assert report.after["acceptance_length"] > report.before["acceptance_length"]


def test_the_report_and_the_card_say_what_was_measured(trained: tuple[Path, TrainingReport]) -> None:
    folder, report = trained
    stored = json.loads((folder / "training_report.json").read_text())
    assert stored["held_out"][-1][1]["acceptance_length"] == report.after["acceptance_length"]
    assert [step for step, _ in stored["loss"]] == list(range(1, report.steps + 1))
    for (_, short), (_, whole) in zip(stored["loss"], report.loss, strict=True):
        assert short == pytest.approx(whole, rel=1e-4)
    assert TrainingReport(**stored).after == report.after
    page = (folder / "training_report.html").read_text()
    for part in ("Training loss", "Held-out acceptance length", "By kind of prompt", "position 1"):
        assert part in page
    assert "http" not in page.replace("http-equiv", ""), "one file, nothing to load"
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "`trtspec train tiny.yaml`" in card
    assert f"**{report.after['acceptance_length']:.2f} tokens a step**" in card
    assert "| kind 0 |" in card


@pytest.mark.parametrize(
    "moment",
    [("responses of the target", 5), ("training", 1), ("training", 30)],
    ids=lambda m: f"{m[0]} {m[1]}",
)
def test_a_killed_run_goes_on_to_the_same_weights(
    request_for: Callable[..., TrainRequest],
    trained: tuple[Path, TrainingReport],
    tmp_path: Path,
    moment: tuple[str, int],
) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, Progress) and (event.task, event.done) == moment:
            raise Killed

    request = request_for(**DRAFT_MODEL)
    with pytest.raises(Killed):
        train(request, tmp_path / "work", tmp_path / "first", kill)
    seen: dict[str, list[int]] = {}

    def count(event: Event) -> None:
        if isinstance(event, Progress):
            seen.setdefault(event.task, []).append(event.done)

    report = train(request, tmp_path / "work", tmp_path / "second", count)
    if moment[0] == "training":
        assert seen["training"][0] == (26 if moment[1] == 30 else 1), "it goes on after the last checkpoint"
    else:
        assert seen[moment[0]][0] == 5, "what was finished is not asked again"
    whole = (trained[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == whole
    assert report == replace(trained[1])


def test_other_settings_never_go_on_from_a_checkpoint(
    request_for: Callable[..., TrainRequest], trained: tuple[Path, TrainingReport], tmp_path: Path
) -> None:
    train(request_for(**DRAFT_MODEL, seed=1, epochs=2), tmp_path / "work", tmp_path / "draft")
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() != (
        trained[0] / "model.safetensors"
    ).read_bytes()


@pytest.mark.long
def test_two_processes_train_together(request_for: Callable[..., TrainRequest], tmp_path: Path) -> None:
    report = train(request_for(**DRAFT_MODEL, processes=2, epochs=4), tmp_path / "work", tmp_path / "draft")
    assert report.after["accuracy"][0] > report.before["accuracy"][0]


def test_what_cannot_be_trained_is_refused(request_for: Callable[..., TrainRequest], tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible, match="from 1 to 2 of 3 layers, not 7"):
        train(request_for(options={"layers": 7}), tmp_path / "work", tmp_path / "draft")
    few = replace(request_for(), prompts=PROMPTS[:1])
    with pytest.raises(StageFailed, match="too few"):
        train(few, tmp_path / "work", tmp_path / "draft")


def test_a_prompt_is_never_on_both_sides() -> None:
    texts = [(prompt, Text(None, 0)) for prompt in PROMPTS]
    training, held_out = split(texts, 64)
    assert len(held_out) == 2, "a tenth at most"
    assert not {p.text for p, _ in training} & {p.text for p, _ in held_out}
    again = split(texts[:23], 64)[1]
    assert {p.text for p, _ in again} - {p.text for p, _ in held_out} <= {p.text for p, _ in training}
    assert len(training) + len(held_out) == len(PROMPTS)
    about = [(TrainingPrompt("and?", "next turn", (p.text, "so"), p.text), text) for p, text in texts]
    training, held_out = split([*texts, *about], 2)
    roots = {p.root or p.text for p, _ in held_out}
    assert len(roots) == 2 and len(held_out) == 4, "tasks about a held-out answer are held out with it"
    assert not roots & {p.root or p.text for p, _ in training}


def test_the_packaged_prompts_are_none_of_the_evaluation_s() -> None:
    from trtspec.evaluate.data import load_prompts

    asked = {turn for prompt in load_prompts("builtin").prompts for turn in prompt.turns}
    prompts = packaged_prompts()
    assert len(prompts) > 150
    assert not asked & {prompt.text for prompt in prompts}


def test_layers_are_kept_evenly_from_the_first_to_the_last() -> None:
    from trtspec.train.pruned_torch import kept_layers

    assert kept_layers(30, 4) == (0, 10, 19, 29)
    assert kept_layers(30, 2) == (0, 29)
    assert kept_layers(3, 1) == (0,)
    with pytest.raises(ValueError, match="from 1 to 2 of 3 layers, not 3"):
        kept_layers(3, 3)


@pytest.fixture
def config(sure_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    asked = [{"prompt": p.text, "category": p.kind} for p in PROMPTS[:12]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
name: tiny
target: {{model: {sure_target}}}
speculation: {{method: draft_model, draft_length: 2, draft: {{model: ./draft}}}}
engine: {{max_batch_size: 4, max_seq_len: 128, threads: 1}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
training: {{data: [prompts.jsonl], response_length: 8, epochs: 1, draft_length: 2, options: {{layers: 2}}}}
""")
    yield path


def test_the_command_makes_the_draft_the_config_names_and_the_build_takes_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(config), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "there is no draft yet" in said
    assert "trtspec train CONFIG" in said, "what to type is named"

    assert main(["train", str(config), "--dry-run"]) == 0
    assert "96 tokens" in capsys.readouterr().out, "12 prompts with 8 tokens each, at most"
    assert not (tmp_path / "draft").exists()

    assert main(["train", str(config), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["out"] == str(tmp_path / "draft")
    assert len(result["conditional_acceptance"]) == 2
    assert main(["train", str(config), "--dry-run"]) == 0
    assert "last run on this machine" in capsys.readouterr().out

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
    plain = ["--set", "speculation={method: ngram}", "--set", "training.options.layers=null"]
    assert main(["train", str(config), *plain]) == 2
    assert "there is no draft to train" in capsys.readouterr().err
