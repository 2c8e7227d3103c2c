"""The loop that trains every draft, whatever it is: batches in, weights and curves out.

**Resuming.** Everything is a function of the seed and the step: batches are, PyTorch's random state is set before
every step, and a checkpoint holds weights, both moments of AdamW, the step and the curves. A run that was killed
and goes on ends with the weights of one that was not, bit for bit with the same threads.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.errors import StageFailed
from trtspec.events import Emit, Progress, silent
from trtspec.files import remove_tree, replace_folder
from trtspec.train.batches_torch import Batch, FrozenTarget, StreamedBatches
from trtspec.train.held_out_torch import HeldOut, held_out_acceptance

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_LAST_RATE = 0.05  # of the learning rate, at the end of the cosine
_CLIP = 1.0
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """loss: scalar to be minimised. accuracy: by draft position, the share of right first choices in this batch."""

    loss: torch.Tensor
    accuracy: list[float]


class DraftHead(Protocol):
    """A `torch.nn.Module` that learns to draft; its parameters with requires_grad are what is trained and kept.

    Random choices of `loss` (noise, anchors) come from torch's global generator, which is seeded for every step.
    progress: share of all steps that is behind, set before each.
    """

    progress: float

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        """The loss over the positions of `batch.loss_mask`."""

    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        """int64 [B, T, D]: what is drafted greedily in a step that begins at each token, in target ids.

        Entry [b, t, i] stands for token t + 1 + i. It is drafted with tokens[b, :t + 1] and the target's states of
        positions below t known (the target has just given token t), and with the true tokens between t and t + 1 + i
        (which its own drafts were, as long as all before are accepted). D is what the head was made for.
        """

    def head(self) -> Head:
        """The weights as a head to write."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """steps: optimizer steps in all. learning_rate: after the warm-up; falls along a cosine to a twentieth.

    evaluate_steps: between two measurements on held-out text; one is also made at the start and at the end.
    checkpoint_steps: between two checkpoints. precision: of the head's arithmetic; weights stay float32.
    """

    steps: int
    learning_rate: float
    warm_up_steps: int = 20
    seed: int = 0
    evaluate_steps: int = 200
    checkpoint_steps: int = 50
    precision: Literal["float32", "bfloat16"] = "float32"


@dataclass(slots=True)
class Curves:
    """What was measured by the step: training loss and accuracy by position, and acceptance on held-out text."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    accuracy: list[tuple[int, list[float]]] = field(default_factory=list)
    held_out: list[tuple[int, HeldOut]] = field(default_factory=list)


def fit(
    module: nn.Module, batches: StreamedBatches, settings: FitSettings, work: Path, emit: Emit = silent
) -> Curves:
    """Train `module` (a DraftHead) in place, from the checkpoint in `work` where there is one.

    In a run of several processes each calls this with the same arguments and takes its share of each batch; the
    first one measures, writes checkpoints and reports. Raises StageFailed when the loss is no number.
    """
    from accelerate import Accelerator

    # Accelerate's own mixed precision is one for the whole process, so ours is set around each pass.
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    lower = torch.autocast(accelerator.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
    module.to(accelerator.device)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        named.values(), lr=settings.learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
    )
    curves = Curves()
    done = _restore(work / "checkpoint", named, optimizer, curves)
    step_module = accelerator.prepare(_Step(module))
    first = accelerator.is_main_process

    def measure(step: int) -> None:
        with lower:
            curves.held_out.append((step, held_out_acceptance(module, batches)))

    if first and done == 0:
        measure(0)
    module.train()
    for step in range(done, settings.steps):
        batch = batches.at(step, accelerator.process_index, accelerator.num_processes)
        torch.manual_seed(_seed(settings.seed, step, accelerator.process_index))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(step, settings)
        module.progress = step / settings.steps
        with lower:
            found = step_module(batch, batches.target)
        if not torch.isfinite(found.loss):
            raise StageFailed(
                f"the loss is {found.loss.item()} at step {step}",
                hint="set a lower training.learning_rate",
            )
        optimizer.zero_grad(set_to_none=True)
        accelerator.backward(found.loss)
        torch.nn.utils.clip_grad_norm_(named.values(), _CLIP)
        optimizer.step()
        if not first:
            continue
        curves.loss.append((step + 1, found.loss.item()))
        curves.accuracy.append((step + 1, list(found.accuracy)))
        last = step + 1 == settings.steps
        if last or (step + 1) % settings.evaluate_steps == 0:
            measure(step + 1)
        if last or (step + 1) % settings.checkpoint_steps == 0:
            _save(work / "checkpoint", named, optimizer, step + 1, curves)
        emit(Progress("train", "training", step + 1, settings.steps, "step"))
    accelerator.wait_for_everyone()
    module.eval()
    return curves


class _Step(nn.Module):
    """The loss as a forward pass, which is what distributed training wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        return self.module.loss(batch, target)


def _seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 1_009 + rank & 0x7FFF_FFFF_FFFF_FFFF


def _rate(step: int, settings: FitSettings) -> float:
    if step < settings.warm_up_steps:
        return (step + 1) / settings.warm_up_steps
    done = (step - settings.warm_up_steps) / max(1, settings.steps - settings.warm_up_steps)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _save(
    folder: Path,
    named: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    step: int,
    curves: Curves,
) -> None:
    """Replace the checkpoint in one step."""
    tensors = {name: p.detach().contiguous() for name, p in named.items()}
    for name, p in named.items():
        tensors |= {f"{moment}.{name}": optimizer.state[p][moment] for moment in _MOMENTS}
    partial = folder.with_name(".checkpoint.partial")
    remove_tree(partial)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "state.safetensors")
    (partial / "step.json").write_text(json.dumps({"step": step, "curves": asdict(curves)}))
    replace_folder(partial, folder)


def _restore(
    folder: Path, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, curves: Curves
) -> int:
    """Put the checkpoint back, if there is one, and its curves into `curves`; the steps it has behind it."""
    if not folder.is_dir():
        return 0
    tensors = load_file(folder / "state.safetensors")
    stored = json.loads((folder / "step.json").read_text())
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])
            state = {moment: tensors[f"{moment}.{name}"].to(p.device) for moment in _MOMENTS}
            optimizer.state[p] = {"step": torch.tensor(float(stored["step"])), **state}
    kept = stored["curves"]
    curves.loss = [(step, value) for step, value in kept["loss"]]
    curves.accuracy = [(step, values) for step, values in kept["accuracy"]]
    curves.held_out = [(step, HeldOut.from_json(value)) for step, value in kept["held_out"]]
    return stored["step"]
