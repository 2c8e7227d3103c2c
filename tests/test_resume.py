"""A build that one machine cannot finish is whole as far as it goes, and another machine goes on from its folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.compile.test_tensorrt_plan import Recorder, recorder  # noqa: F401 (a fixture)
from tests.fake_stages import make_job, make_stages
from trtspec import pipeline
from trtspec.cli import main
from trtspec.config import dump_config, load_config
from trtspec.errors import ConfigError, SetupError
from trtspec.manifest import DataSet, damaged_files, read_manifest
from trtspec.stage import Stage, run_stages
from trtspec.store import Store

CONFIG = """
name: fake
target: {model: a/b, quantization: fp8}
speculation: {method: ngram, draft_length: 7}
engine: {backend: tensorrt, device: h200-sxm}
"""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, ...]:
    """Three stages, of which the second needs what `tmp_path/gpu` stands for."""
    log, gpu = tmp_path / "log", tmp_path / "gpu"
    first, second, third = make_stages(log)
    there = replace(second, lacking=lambda: None if gpu.exists() else "a GPU")
    chosen = (replace(first, tools=("numpy",)), there, third)
    monkeypatch.setattr(pipeline, "stages_for", lambda *_arguments, **_named: chosen)
    return chosen


@pytest.fixture
def left(stages: tuple[Stage, ...], tmp_path: Path) -> Path:
    """What the first machine leaves; its cache is gone."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    out, store = tmp_path / "left", Store(tmp_path / "cache")
    job, steps = run_stages(stages, make_job(bits=8), store)
    assert [step.stage for step in steps] == ["quantize"]
    job = replace(job, config=load_config(config))
    pipeline.write_build(job, stages, out, dump_config(job.config), store)
    shutil.rmtree(store.root)
    return out


def ran(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def test_the_unfinished_build_says_which_command_finishes_it(
    stages: tuple[Stage, ...], tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match="stage compile needs a GPU, not on this machine") as caught:
        pipeline._refuse_unfinished(stages[1:], tmp_path / "left")
    assert "trtspec build --resume left" in caught.value.hint


def test_another_machine_finishes_it_from_the_folder_alone(left: Path, tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    before = read_manifest(left)
    built = pipeline.resume(left, store=Store(tmp_path / "there"))
    assert ran(tmp_path) == ["quantize", "compile", "package"], "nothing that was done is done again"
    assert (left / "repository" / "served" / "1" / "model.yaml").is_file()
    record = read_manifest(left)
    assert built.changed and not damaged_files(left, record)
    assert set(record["stages"]) == {"quantize", "compile", "package"}
    assert record["stages"]["quantize"] == before["stages"]["quantize"]
    assert record["tools"] == before["tools"], "what the first machine built with is not forgotten"
    again = pipeline.resume(left, store=Store(tmp_path / "there"))
    assert not again.changed


def test_a_machine_that_lacks_it_too_changes_nothing(left: Path, tmp_path: Path) -> None:
    before = (left / "manifest.json").read_bytes()
    with pytest.raises(SetupError, match="needs a GPU"):
        pipeline.resume(left, store=Store(tmp_path / "there"))
    assert (left / "manifest.json").read_bytes() == before and ran(tmp_path) == ["quantize"]


def test_what_the_folder_says_of_stages_without_a_place_of_their_own_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage's artifact and its data are not in the folder: they became a part of the second's."""
    text, gpu = DataSet("a text", "MIT", "00"), tmp_path / "gpu"
    first, second, third = make_stages(tmp_path / "log")
    first = replace(
        first, folder=None, data=lambda _job: (text,) if not gpu.exists() else pytest.fail("gone")
    )
    chosen = (first, second, replace(third, lacking=lambda: None if gpu.exists() else "a GPU"))
    monkeypatch.setattr(pipeline, "stages_for", lambda *_arguments, **_named: chosen)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    out, store = tmp_path / "left", Store(tmp_path / "cache")
    job, _ = run_stages(chosen, make_job(bits=8), store)
    job = replace(job, config=load_config(config))
    pipeline.write_build(job, chosen, out, dump_config(job.config), store)
    before = read_manifest(out)
    gpu.touch()
    pipeline.resume(out, store=Store(tmp_path / "there"))
    record = read_manifest(out)
    assert set(before["stages"]) == {"quantize", "compile"} and before["data"] == [text.as_json()]
    assert record["data"] == before["data"] and record["stages"].items() >= before["stages"].items()


def test_a_folder_damaged_on_the_way_is_refused(left: Path, tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    shard = left / "target" / "shard-2"
    shard.chmod(0o644)
    shard.write_bytes(b"half a copy")
    with pytest.raises(SetupError, match="target/shard-2: content changed"):
        pipeline.resume(left, store=Store(tmp_path / "there"))


def test_a_folder_that_is_no_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a trtspec build"):
        pipeline.resume(tmp_path)


def test_resume_takes_the_build_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["build", "x.yaml", "--resume", str(tmp_path), "--fresh", "--json"]) == ConfigError.exit_code
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "--resume takes the build as it is, without config, fresh"
