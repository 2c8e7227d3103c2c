"""Training that goes on from a trained head: it begins where that one ended, and takes none that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.train.test_training import train
from trtspec.checkpoints.head_layouts import eagle
from trtspec.cli import main
from trtspec.errors import PlanInfeasible
from trtspec.train.head_modules import METHODS
from trtspec.train.job import TrainRequest
from trtspec.train.start import weights_digest

pytestmark = pytest.mark.model

SHORT = {"epochs": 2, "evaluations": 1}
HEADS = {
    "eagle2": {},
    "eagle3": {"draft_vocab_size": 64, "captured_layers": (0, 2), "options": {"kv_heads": 4}},
    "mtp": {"draft_vocab_size": 64},
    "p_eagle": {"options": {"mask_token_id": 3}},
}


def read(folder: Path, method: str):
    return import_module(METHODS[method].layout).read_head(folder)


@pytest.mark.parametrize("method", HEADS)
def test_it_begins_where_the_head_ended(
    request_for: Callable[..., TrainRequest], tmp_path: Path, method: str
) -> None:
    request = request_for(method, **SHORT, **HEADS[method])
    first = train(request, tmp_path / "a" / "work", tmp_path / "first")
    settled = {"draft_vocab_size": None, "captured_layers": None, "options": {}}
    further = replace(request, start=tmp_path / "first", seed=1, **settled)
    report = train(further, tmp_path / "a" / "work", tmp_path / "second")

    assert report.before == first.after
    assert report.after["steps"] != 0 and report.parameters == first.parameters
    old, new = read(tmp_path / "first", method), read(tmp_path / "second", method)
    assert old.config == new.config and old.captured_layers == new.captured_layers
    assert (old.d2t is None and new.d2t is None) or np.array_equal(old.d2t, new.d2t)
    assert any(not np.array_equal(old.tensors[name], new.tensors[name]) for name in old.tensors)
    assert report.settings["captured_layers"] == old.captured_layers

    told = {"command": first.command, "response_tokens": first.response_tokens, "steps": first.steps}
    assert list(report.earlier) == [told]
    third = train(replace(further, start=tmp_path / "second"), tmp_path / "a" / "work", tmp_path / "third")
    assert [run["steps"] for run in third.earlier] == [first.steps, report.steps]
    card = (tmp_path / "third" / "README.md").read_text()
    assert card.count("- **Before**: `trtspec train tiny.yaml`: ") == 2
    assert str(tmp_path) not in card + (tmp_path / "third" / "training_report.json").read_text()


@pytest.mark.parametrize("layout", ["eagle", "specforge", "speculators", "modelopt"])
def test_every_published_layout_is_gone_on_from(
    request_for: Callable[..., TrainRequest], tmp_path: Path, layout: str
) -> None:
    request = request_for("eagle3", **SHORT, **HEADS["eagle3"])
    first = train(request, tmp_path / "a" / "work", tmp_path / "first")
    head = eagle.read_head(tmp_path / "first")
    eagle.write_head(head, tmp_path / "published", layout, "tiny")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config.pop("num_target_layers") == 3, "which others do not write"
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    settled = {"draft_vocab_size": None, "captured_layers": None, "options": {}}
    further = replace(request, start=tmp_path / "published", **settled)
    assert train(further, tmp_path / "a" / "work", tmp_path / "second").before == first.after


def test_a_head_from_elsewhere_is_named(request_for: Callable[..., TrainRequest], tmp_path: Path) -> None:
    request = request_for("mtp", **SHORT)
    train(request, tmp_path / "a" / "work", tmp_path / "published")
    (tmp_path / "published" / "training_report.json").unlink()
    report = train(replace(request, start=tmp_path / "published"), tmp_path / "a" / "work", tmp_path / "out")
    assert list(report.earlier) == [{"head": "published"}]
    assert "it went on from the head published." in (tmp_path / "out" / "README.md").read_text()


def test_other_weights_are_another_run(request_for: Callable[..., TrainRequest], tmp_path: Path) -> None:
    for seed in (0, 1):
        train(request_for("mtp", **SHORT, seed=seed), tmp_path / "a" / "work", tmp_path / f"head{seed}")
    assert weights_digest(tmp_path / "head0") != weights_digest(tmp_path / "head1")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "model.safetensors").write_bytes(
        (tmp_path / "head0" / "model.safetensors").read_bytes()
    )
    assert weights_digest(tmp_path / "copy") == weights_digest(tmp_path / "head0"), "wherever they lie"


def test_a_head_that_does_not_fit_is_refused(
    request_for: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    request = request_for("mtp", **SHORT)
    train(request, tmp_path / "a" / "work", tmp_path / "head")
    with pytest.raises(PlanInfeasible, match="holds a head of mtp; eagle3 cannot go on from it"):
        train(
            request_for("eagle3", **SHORT, start=tmp_path / "head"), tmp_path / "a" / "work", tmp_path / "x"
        )
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "rope_theta": 777.0}))
    with pytest.raises(PlanInfeasible, match=r"not made as .* for this target: rope_theta 777\.0"):
        train(replace(request, start=tmp_path / "head"), tmp_path / "a" / "work", tmp_path / "y")


def test_the_command_looks_at_the_head_before_it_builds_anything(
    sure_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(f"""
name: tiny
target: {{model: {sure_target}}}
speculation: {{method: mtp, draft: {{model: ./draft}}}}
training: {{start: ./nothing}}
""")
    for extra in ([], ["--dry-run"]):
        assert main(["train", str(tmp_path / "tiny.yaml"), *extra]) == 2
        assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "cache" / "artifacts").exists()
