"""One training run as a folder: what to train on what, as files, so that one process or many can carry it out.

    job.json  training.npz  held_out.npz  [d2t.npy]     written before
    checkpoint/                                         while it runs
    trained/  curves.json                               the draft, and what was measured on the way

One process runs in place. Several are started as `torchrun` does, and Accelerate gives each its GPU (or, without any,
its share of the CPU); the first one reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trtspec.errors import StageFailed
from trtspec.events import Emit, Progress, silent
from trtspec.files import pretty_json, remove_tree
from trtspec.train.head_modules import METHODS, Blueprint, Option, build_module
from trtspec.train.start import read_start
from trtspec.train.texts import read_texts

_JOB, _CURVES = "job.json", "curves.json"
TRAINING, HELD_OUT, D2T, TRAINED = "training.npz", "held_out.npz", "d2t.npy", "trained"
_LINES_OF_A_FAILURE = 12
_SAMPLE = 96  # sequences that start values are measured on, at most


@dataclass(frozen=True, slots=True)
class FitJob:
    """model: folder of the target whose states are learned from. evaluations: measurements on held-out text, evenly
    spaced, besides the one before the first step. The rest: see Blueprint, FitSettings and StreamedBatches.

    threads: of PyTorch, None for all; another number gives weights that differ in their last bits. start: folder of
    the head it goes on from.
    """

    model: str
    method: str
    captured_layers: tuple[int, ...]
    draft_length: int
    epochs: int
    batch_tokens: int
    learning_rate: float
    warm_up_steps: int
    seed: int
    precision: Literal["float32", "bfloat16"]
    evaluations: int
    checkpoint_steps: int
    threads: int | None
    options: Mapping[str, Option] = field(default_factory=dict)
    start: str | None = None

    def write(self, folder: Path) -> None:
        """Write `job.json`."""
        (folder / _JOB).write_text(pretty_json(asdict(self)))

    @staticmethod
    def read(folder: Path) -> FitJob:
        """Read `job.json`."""
        stored = json.loads((folder / _JOB).read_text())
        return FitJob(**{**stored, "captured_layers": tuple(stored["captured_layers"])})


def run_job(folder: Path, processes: int, emit: Emit = silent) -> Mapping[str, Any]:
    """Carry out the job in `folder` and return its curves and sizes; what is done already is not done again.

    Raises StageFailed where the loss is no number, or a process of several ends with an error.
    """
    if not (folder / _CURVES).is_file():
        if processes == 1:
            fit_in_this_process(folder, emit)
        else:
            _launch(folder, processes, emit)
    return json.loads((folder / _CURVES).read_text())


def fit_in_this_process(folder: Path, emit: Emit = silent) -> None:
    """Train, alone or as one of the processes that `run_job` started."""
    import torch
    from accelerate import PartialState

    from trtspec.checkpoints.hf_folder import quiet_transformers
    from trtspec.quantize.score_torch import load_for_scoring
    from trtspec.train.batches_torch import StreamedBatches
    from trtspec.train.fit_torch import FitSettings, fit

    job = FitJob.read(folder)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    state = PartialState(cpu=not torch.cuda.is_available())
    with quiet_transformers():
        model = load_for_scoring(Path(job.model), getattr(torch, job.precision)).to(state.device)
        training = read_texts(folder / TRAINING)
        batches = StreamedBatches(
            model,
            training,
            read_texts(folder / HELD_OUT),
            job.captured_layers,
            batch_tokens=job.batch_tokens,
            seed=job.seed,
            memory_bytes=_spare_bytes() if job.epochs > 1 else 0,
        )
        d2t = np.load(folder / D2T) if (folder / D2T).is_file() else None
        sample = tuple(text.tokens for text in training[:: -(-len(training) // _SAMPLE)])
        torch.manual_seed(job.seed)
        layers = model.config.num_hidden_layers
        start = None if job.start is None else read_start(Path(job.start), job.method, layers)
        module = build_module(
            Blueprint(job.method, job.captured_layers, job.draft_length, d2t, job.options, sample, start),
            model,
        )
        steps = job.epochs * batches.steps
        settings = FitSettings(
            steps=steps,
            learning_rate=job.learning_rate,
            warm_up_steps=job.warm_up_steps,
            seed=job.seed,
            evaluate_steps=max(1, -(-steps // job.evaluations)),
            checkpoint_steps=job.checkpoint_steps,
            precision=job.precision,
        )
        curves = fit(module, batches, settings, folder, emit)
        if not state.is_main_process:
            return
        remove_tree(folder / TRAINED)
        _save(module, job, folder / TRAINED)
    sizes = {
        "parameters": sum(p.numel() for p in _own_parameters(module, model)),
        "trained_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "steps": steps,
    }
    (folder / _CURVES).write_text(pretty_json({**sizes, **asdict(curves)}))


def _spare_bytes() -> int:
    """Half of the main memory that is to be had, for what this process may do without."""
    import psutil

    return psutil.virtual_memory().available // 2


def _own_parameters(module: Any, model: Any) -> list[Any]:
    """Without those that are the target's, which a head shares."""
    shared = {id(p) for p in model.parameters()}
    return [p for p in module.parameters() if id(p) not in shared]


def _save(module: Any, job: FitJob, into: Path) -> None:
    import torch

    from trtspec.checkpoints.facts import read_facts

    dtype = read_facts(Path(job.model)).dtype or "float32"
    into.mkdir()
    if job.method == "draft_model":
        module.save_model(into, getattr(torch, dtype))
        return
    head = module.head()
    if dtype != "float32":
        head = replace(head, tensors={name: _stored(t, dtype) for name, t in head.tensors.items()})
    import_module(METHODS[job.method].layout).write_head(head, into)


def _stored(tensor: np.ndarray, dtype: str) -> np.ndarray:
    """A float32 tensor in the target's 16-bit dtype; what is stored otherwise stays."""
    from trtspec.checkpoints.head_layouts.head import to_bfloat16

    if tensor.dtype != np.float32:
        return tensor
    return to_bfloat16(tensor) if dtype == "bfloat16" else tensor.astype(dtype)


def _launch(folder: Path, processes: int, emit: Emit) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", __name__, str(folder)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            said = []
            for line in process.stdout:
                if line.startswith("{"):
                    emit(Progress(**json.loads(line)))
                else:
                    said = [*said, line.rstrip()][-_LINES_OF_A_FAILURE:]
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise StageFailed(
            f"one of {processes} training processes ended with status {process.returncode}: "
            + "\n".join(said),
            hint="training.processes: 1 trains in one process and shows its error as it is",
        )


def _main() -> None:
    """One of several processes; the first one's progress goes to standard output as JSON lines."""

    def report(event: Any) -> None:
        if isinstance(event, Progress):
            print(json.dumps(asdict(event)), flush=True)

    fit_in_this_process(Path(sys.argv[1]), report)


if __name__ == "__main__":
    _main()
