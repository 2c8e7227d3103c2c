"""Three small stages that write real files and count their runs: what the pipeline is tested with.

As a program: `python fake_stages.py CACHE OUT LOG` builds once (the test kills it).
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from trtspec.build_folder import write_build
from trtspec.events import Progress, StageFinished, StageStarted
from trtspec.stage import Job, Stage, run_stages
from trtspec.store import Store

CONFIG_TEXT = "name: fake\n"


def make_job(**settings) -> Job:
    defaults = {"bits": 8, "max_batch": 4, "model_name": "served"}
    return Job(
        SimpleNamespace(name="fake"), {}, {"method": "ngram", "draft_length": 5, **defaults, **settings}
    )


def make_stages(log: Path, pause_s: float = 0.0) -> tuple[Stage, ...]:
    def counted(name: str, fill):
        def run(job, folder, emit):
            emit(StageStarted(name))
            with open(log, "a") as file:
                file.write(f"{name}\n")
            fill(job, folder, emit)
            emit(StageFinished(name, 0.0, f"{name} summary"))

        return run

    def quantize(job, folder, emit):
        for index in range(4):
            emit(Progress("quantize", "shards", index, 4))
            content = hashlib.sha256(f"{index} {job.plan['bits']}".encode()).digest() * 512
            (folder / f"shard-{index}").write_bytes(content)
            time.sleep(pause_s)

    def compile_(job, folder, _emit):
        source = b"".join(path.read_bytes() for path in sorted(job.artifacts["quantize"].path.iterdir()))
        time.sleep(pause_s)
        (folder / "model.bin").write_bytes(source[::-1])
        (folder / "limits.txt").write_text(str(job.plan["max_batch"]))

    def package(job, folder, _emit):
        (folder / job.plan["model_name"] / "1").mkdir(parents=True)
        time.sleep(pause_s)
        size = (job.artifacts["compile"].path / "model.bin").stat().st_size
        (folder / job.plan["model_name"] / "1" / "model.yaml").write_text(f"size: {size}\n")

    def stage(name, folder, fill, field, *needs):
        return Stage(
            name=name,
            folder=folder,
            run=counted(name, fill),
            depends_on=lambda job: {field: job.plan[field]},
            expects=lambda job: f"{name} with {field} {job.plan[field]}",
            needs=needs,
        )

    return (
        stage("quantize", "target", quantize, "bits"),
        stage("compile", "engine", compile_, "max_batch", "quantize"),
        stage("package", "repository", package, "model_name", "compile"),
    )


def build(cache: Path, out: Path, log: Path, pause_s: float = 0.0, **settings):
    stages, store = make_stages(log, pause_s), Store(cache)
    job, steps = run_stages(stages, make_job(**settings), store)
    digest, changed = write_build(job, stages, out, CONFIG_TEXT, store)
    return digest, changed, steps


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:4]), pause_s=0.003)[0])
