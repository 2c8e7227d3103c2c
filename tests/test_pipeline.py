"""The build: stages run once, a kill loses nothing that was finished, a dry run writes nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import fake_stages
from tests.fake_stages import build, make_job, make_stages
from trtspec.build_folder import write_build
from trtspec.errors import ConfigError, SetupError, StageFailed
from trtspec.events import Note, StageFinished, StageStarted
from trtspec.manifest import damaged_files, read_manifest
from trtspec.stage import notes_to, run_stages
from trtspec.store import Store


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mtime_ns,
            b"" if path.is_dir() else path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    return tmp_path / "cache", tmp_path / "out", tmp_path / "log"


def ran(places) -> list[str]:
    log = places[2]
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_a_second_build_of_an_unchanged_config_does_no_work(places):
    first = build(*places)
    assert ran(places) == ["quantize", "compile", "package"] and first[1]
    before = snapshot(places[1])
    second = build(*places)
    assert ran(places) == []
    assert [step.action for step in second[2]] == ["cached"] * 3
    assert second[0] == first[0] and not second[1]
    assert snapshot(places[1]) == before, "not even a time stamp of the build folder moves"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_name": "other"}, ["package"]),
        ({"max_batch": 8}, ["compile", "package"]),
        ({"bits": 4}, ["quantize", "compile", "package"]),
    ],
)
def test_a_change_runs_what_depends_on_it_and_no_more(places, change, expected):
    build(*places)
    ran(places)
    build(*places, **change)
    assert ran(places) == expected


def test_stages_below_an_input_whose_bytes_did_not_change_stay_cached(places, tmp_path: Path):
    """A changed setting that gives the same bytes stops there: the next stages see the same digest."""
    stages = make_stages(places[2])
    same = replace(stages[0], depends_on=lambda job: {"calibration": job.plan["seed"]})
    chain, store = (same, *stages[1:]), Store(places[0])
    run_stages(chain, make_job(seed=0), store)
    ran(places)
    run_stages(chain, make_job(seed=1), store)
    assert ran(places) == ["quantize"]


def test_new_code_of_a_stage_never_gets_an_old_result(places, monkeypatch):
    build(*places)
    ran(places)
    monkeypatch.setattr("trtspec.stage.code_digest", lambda parts: "other code")
    build(*places)
    assert ran(places) == ["quantize", "compile", "package"]


def test_fresh_runs_everything_and_says_when_the_bytes_differ(places):
    build(*places)
    ran(places)
    events = []
    store = Store(places[0], notify=notes_to(events.append))
    stages = make_stages(places[2])
    run_stages(stages, make_job(), store, events.append, fresh=True)
    assert ran(places) == ["quantize", "compile", "package"]
    assert not [event for event in events if isinstance(event, Note)]

    def differently(job, folder, emit):
        (folder / "model.bin").write_bytes(os.urandom(8))

    run_stages((stages[0], replace(stages[1], run=differently)), make_job(), store, events.append, fresh=True)
    assert any(isinstance(event, Note) and "differs" in event.text for event in events)


def test_a_dry_run_tells_the_truth_and_writes_nothing(places, tmp_path: Path):
    stages = make_stages(places[2])
    _, steps = run_stages(stages, make_job(), Store(places[0]), dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert [(step.action, step.reason) for step in steps] == [
        ("run", "not built yet with these inputs"),
        ("run", "after quantize"),
        ("run", "after compile"),
    ]
    assert steps[1].expects == "compile with max_batch 4"
    build(*places)
    before = snapshot(tmp_path)
    _, steps = run_stages(stages, make_job(), Store(places[0]), dry_run=True)
    assert [step.action for step in steps] == ["cached"] * 3
    _, steps = run_stages(stages, make_job(max_batch=8), Store(places[0]), dry_run=True)
    assert [step.action for step in steps] == ["cached", "run", "run"]
    assert snapshot(tmp_path) == before


def test_a_stage_is_told_of_once_whoever_speaks_of_it(places):
    events = []
    run_stages(make_stages(places[2]), make_job(), Store(places[0]), events.append)
    started = [event.stage for event in events if isinstance(event, StageStarted)]
    finished = [(event.stage, event.summary) for event in events if isinstance(event, StageFinished)]
    assert started == ["quantize", "compile", "package"]
    assert finished == [(name, f"{name} summary") for name in started]
    events.clear()
    run_stages(make_stages(places[2]), make_job(), Store(places[0]), events.append)
    assert events == [StageStarted(name, cached=True) for name in started]


def test_a_missing_tool_is_reported_before_anything_runs(places):
    stages = make_stages(places[2])
    last = replace(stages[2], tools=("no-such-distribution",))
    with pytest.raises(SetupError, match="package needs no-such-distribution"):
        run_stages((*stages[:2], last), make_job(), Store(places[0]))
    assert ran(places) == []


def test_the_build_folder_is_whole_and_hashes_to_its_manifest(places):
    digest, _, _ = build(*places)
    out = places[1]
    record = read_manifest(out)
    assert record["digest"] == digest
    assert damaged_files(out, record) == []
    listed = {file["name"] for file in record["files"]}
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found - listed == {"manifest.json", "MODEL_CARD.md", "README.md"}
    (out / "engine" / "limits.txt").chmod(0o644)
    (out / "engine" / "limits.txt").write_text("9")
    assert damaged_files(out, record) == ["engine/limits.txt: content changed"]


def test_a_build_folder_that_was_touched_is_put_right(places):
    build(*places)
    expected = contents(places[1])
    (places[1] / "config.yaml").write_text("name: edited\n")
    victim = places[1] / "engine" / "model.bin"
    victim.unlink()
    _, changed, _ = build(*places)
    assert changed and contents(places[1]) == expected


def test_two_machines_give_the_same_bytes(places, tmp_path: Path):
    build(*places)
    build(tmp_path / "cache2", tmp_path / "out2", tmp_path / "log2")
    assert contents(places[1]) == contents(tmp_path / "out2")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_folder_trtspec_did_not_write_is_never_replaced(places, kind: str):
    out = places[1]
    if kind == "folder":
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
    else:
        out.write_text("years of work")
    before = contents(places[1].parent)
    with pytest.raises(ConfigError, match=r"is a file|not a trtspec build"):
        build(*places)
    assert before.items() <= contents(places[1].parent).items()


def test_a_build_stopped_at_a_stage_holds_what_there_is(places):
    stages, store = make_stages(places[2]), Store(places[0])
    job, _ = run_stages(stages[:1], make_job(), store)
    write_build(job, stages, places[1], fake_stages.CONFIG_TEXT, store)
    assert (places[1] / "target").is_dir() and not (places[1] / "engine").exists()
    build(*places)
    assert ran(places) == ["quantize", "compile", "package"]


def test_a_refused_result_is_not_published_and_earlier_stages_are_kept(places):
    stages, store = make_stages(places[2]), Store(places[0])

    def refuses(_job, folder, _emit):
        (folder / "half").write_text("half")
        raise StageFailed("logits differ from PyTorch")

    with pytest.raises(StageFailed):
        run_stages((stages[0], replace(stages[1], run=refuses)), make_job(), store)
    ran(places)
    build(*places)
    assert ran(places) == ["compile", "package"]


def test_a_full_disk_while_the_build_folder_is_written_is_named(places, monkeypatch):
    build(*places)
    expected = contents(places[1])

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trtspec.build_folder.fill", full)
    with pytest.raises(SetupError, match="no space left"):
        build(*places, model_name="other")
    assert contents(places[1]) == expected, "the old build stays until the new one is whole"


def test_killed_at_any_moment_then_run_again_gives_the_same_build(places, tmp_path: Path):
    reference = tmp_path / "reference"
    build(reference / "cache", reference / "out", reference.with_suffix(".log"))
    expected = contents(reference / "out")
    rng = random.Random(1)
    command = [sys.executable, fake_stages.__file__, *map(str, places)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    takes = time.monotonic() - began
    killed = 0
    for _ in range(8):
        for place in places[:2]:
            subprocess.run(["rm", "-rf", str(place)], check=True)
        for _ in range(2):
            victim = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
            time.sleep(rng.uniform(0.4, 1.0) * takes)
            victim.send_signal(signal.SIGKILL)
            killed += victim.wait() == -signal.SIGKILL
            assert not places[1].exists() or contents(places[1]) == expected
        subprocess.run(command, check=True, capture_output=True, env=environment)
        assert contents(places[1]) == expected
        assert sorted(path.name for path in places[1].parent.iterdir() if path.name.startswith(".")) == []
    assert killed >= 4


def test_two_builds_at_once_do_the_work_once(places):
    command = [sys.executable, fake_stages.__file__, *map(str, places)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    answers = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(answers) == 1
    assert sorted(ran(places)) == ["compile", "package", "quantize"]
