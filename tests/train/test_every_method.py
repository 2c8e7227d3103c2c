"""Every mechanism that can be trained: the whole way from prompts to a stored draft, in seconds and in earnest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trtspec.config import load_config
from trtspec.config.schema import TrainingOptions
from trtspec.train.head_modules import METHODS, OPTIONS
from trtspec.train.job import TrainRequest, train_draft
from trtspec.train.prompts import packaged_prompts
from trtspec.train.report import TrainingReport
from trtspec.train.responses import ResponseSettings

LICENCE = {"license": "apache-2.0", "base_model": "target"}
# A fortieth of the vocabulary would never be written by a tiny model; the real one is given the published share.
TINY_VOCABULARY, REAL_VOCABULARY = 200, 8192


def learned(report: TrainingReport) -> None:
    losses = [loss for _, loss in report.loss]
    tenth = max(1, len(losses) // 10)
    assert sum(losses[-tenth:]) < 0.95 * sum(losses[:tenth]), "the loss falls"
    assert report.after["accuracy"][0] > report.before["accuracy"][0], "the first draft is right more often"
    assert report.after["acceptance_length"] > report.before["acceptance_length"], "and more is accepted"


@pytest.mark.model
@pytest.mark.parametrize("method", METHODS)
def test_a_minute_of_training_is_enough_to_learn(
    request_for: Callable[..., TrainRequest], tmp_path: Path, method: str
) -> None:
    known = METHODS[method]
    request = request_for(
        method,
        epochs=12,
        learning_rate=3e-3,
        draft_length=3,
        options={"layers": 1} if "layers" in known.options else {},
        draft_vocab_size=TINY_VOCABULARY if known.reduced_vocabulary else None,
    )
    (tmp_path / "work").mkdir(), (tmp_path / "draft").mkdir()
    report = train_draft(
        request,
        tmp_path / "work",
        tmp_path / "draft",
        licence=LICENCE,
        command="trtspec train",
        emit=lambda _: None,
    )
    learned(report)
    stored = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert stored["vocab_size"] == 320
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    if known.reduced_vocabulary:
        assert 0.5 < report.vocabulary_coverage <= 1


@pytest.fixture(scope="module")
def real_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: the responses are the same."""
    return tmp_path_factory.mktemp("training")


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_hundreds_of_steps_on_the_real_target(
    quickstart_build: Path, real_work: Path, tmp_path: Path, method: str
) -> None:
    known, config = METHODS[method], load_config(ROOT / "build_configs" / "quickstart.yaml")
    request = TrainRequest(
        method=method,
        model=quickstart_build / "target",
        engine=quickstart_build / "engine",
        prompts=tuple(packaged_prompts()),
        responses=ResponseSettings(max_tokens=48, temperature=0.0, tokens=8000),
        batch_tokens=128,
        epochs=4,
        learning_rate=1e-3,
        precision="bfloat16",
        held_out_prompts=16,
        evaluations=2,
        draft_vocab_size=REAL_VOCABULARY if known.reduced_vocabulary else None,
        threads=config.engine.threads,
    )
    (tmp_path / "draft").mkdir()
    report = train_draft(
        request, real_work, tmp_path / "draft", licence=LICENCE, command="trtspec train", emit=lambda _: None
    )
    assert report.steps >= 300
    learned(report)


def test_every_option_is_said_in_the_config_and_belongs_to_a_method() -> None:
    used = {name for method in METHODS.values() for name in method.options}
    assert used == set(OPTIONS) == set(TrainingOptions.model_fields)


def test_default_layers_are_within_any_target() -> None:
    for method in METHODS.values():
        for layers in (1, 2, 3, 4, 30, 80):
            captured = method.captured_layers(layers)
            assert list(captured) == sorted(set(captured))
            assert all(0 <= layer < layers for layer in captured)
    assert METHODS["eagle3"].captured_layers(30) == (1, 14, 26)
