"""A layer-pruned copy of the target, and the plain PyTorch loop that distils the target into it.

Loss: soft cross-entropy −Σ p log q over the teacher's likeliest tokens, at the positions of answers only (Hinton
et al., 1503.02531; for drafts DistillSpec, 2310.08461). Embedding and output layer stay the target's.

**Resuming.** Everything is a function of the seed and the step: batches are shuffled by (seed, epoch), and a
checkpoint holds weights, both moments of AdamW and the step. A run that was killed and goes on ends with the
weights of one that was not, bit for bit with the same threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trtspec.errors import PlanInfeasible, StageFailed
from trtspec.events import Emit, Progress, silent
from trtspec.files import remove_tree, replace_folder
from trtspec.train.responses import Example

_WARM_UP = 10  # steps
_LAST_RATE = 0.05  # of the learning rate, at the end of the cosine
_CLIP = 1.0
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Schedule:
    """epochs over all examples; batch: examples of one step; checkpoint_steps: between two checkpoints."""

    epochs: int
    batch: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    checkpoint_steps: int = 25


def kept_layers(layers: int, keep: int) -> tuple[int, ...]:
    """`keep` of `layers` layers, evenly spaced from the first to the last. Raises ValueError when there are fewer."""
    if not 1 <= keep < layers:
        raise ValueError(f"a draft keeps from 1 to {layers - 1} of {layers} layers, not {keep}")
    if keep == 1:
        return (0,)
    return tuple(round(i * (layers - 1) / (keep - 1)) for i in range(keep))


def pruned_copy(target: Path, keep: int) -> tuple[Any, tuple[int, ...]]:
    """The model of folder `target` in float32 with `keep` of its layers, and which they are.

    Only those layers and the final norm are trainable. Raises PlanInfeasible for a model with another structure.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    body, layers = getattr(model, "model", None), getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not hasattr(body, "norm"):
        raise PlanInfeasible(
            f"{type(model).__name__} is no plain stack of decoder layers: there is nothing to prune",
            where=str(target),
            hint="give a draft model in speculation.draft.model",
        )
    try:
        kept = kept_layers(len(layers), keep)
    except ValueError as error:
        raise PlanInfeasible(str(error), where=str(target), hint="name another number of layers") from None
    body.layers = torch.nn.ModuleList([layers[i] for i in kept])
    for index, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = keep
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    model.requires_grad_(False)
    body.layers.requires_grad_(True)
    body.norm.requires_grad_(True)
    return model, kept


def distill(
    model: Any, examples: Sequence[Example], schedule: Schedule, work: Path, emit: Emit = silent
) -> int:
    """Train `model` in place on `examples`; returns the steps it has behind it.

    work: folder of the checkpoint, from which an interrupted run continues. Raises StageFailed when the loss is no
    number.
    """
    batches = _batches(examples, schedule.batch)
    total = schedule.epochs * len(batches)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        named.values(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    done = _restore(work / "checkpoint", named, optimizer)
    model.train()
    for step in range(done, total):
        epoch, place = divmod(step, len(batches))
        order = np.random.default_rng([schedule.seed, epoch]).permutation(len(batches))
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * _rate(step, total)
        loss = _loss(model, [examples[i] for i in batches[order[place]]])
        if not torch.isfinite(loss):
            raise StageFailed(
                f"the loss is {loss.item()} at step {step}", hint="try a lower learning rate: --learning-rate"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), _CLIP)
        optimizer.step()
        if (step + 1) % schedule.checkpoint_steps == 0 or step + 1 == total:
            _save(work / "checkpoint", named, optimizer, step + 1)
        emit(Progress("train", "distillation", step + 1, total, "step"))
    model.eval()
    return total


def agreement(model: Any, examples: Sequence[Example]) -> float:
    """Share of the answers' tokens that the model would have written too, given the true text before them."""
    agreed = positions = 0
    for example in examples:
        with torch.no_grad():
            scores = _answer_scores(model, [example])
        truth = torch.from_numpy(example.tokens[example.start :])
        agreed += int((scores.argmax(dim=1) == truth).sum())
        positions += len(truth)
    return agreed / positions


def _batches(examples: Sequence[Example], size: int) -> list[list[int]]:
    """Indices in groups of similar length, so that little of a batch is padding."""
    by_length = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    return [by_length[first : first + size] for first in range(0, len(by_length), size)]


def _rate(step: int, total: int) -> float:
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    done = (step - _WARM_UP) / max(1, total - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _answer_scores(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """float32 [all positions of the answers, V]. Padding stands behind, where a causal model does not look."""
    tokens = torch.zeros((len(examples), max(len(e.tokens) for e in examples)), dtype=torch.int64)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
    states = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    wanted = [states[row, e.start - 1 : len(e.tokens) - 1] for row, e in enumerate(examples)]
    return model.lm_head(torch.cat(wanted))


def _loss(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    scores = _answer_scores(model, examples)
    ids = torch.from_numpy(np.concatenate([e.ids for e in examples])).long()
    teacher = torch.from_numpy(np.concatenate([e.probabilities for e in examples]))
    log_q = scores.gather(1, ids) - scores.logsumexp(dim=1, keepdim=True)
    return -(teacher * log_q).sum(dim=1).mean()


def _save(
    folder: Path, named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Replace the checkpoint in one step."""
    tensors = {name: p.detach().contiguous() for name, p in named.items()}
    for name, p in named.items():
        tensors |= {f"{moment}.{name}": optimizer.state[p][moment] for moment in _MOMENTS}
    partial = folder.with_name(".checkpoint.partial")
    remove_tree(partial)
    partial.mkdir()
    save_file(tensors, partial / "state.safetensors")
    (partial / "step.json").write_text(json.dumps({"step": step}))
    replace_folder(partial, folder)


def _restore(folder: Path, named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Put the checkpoint back, if there is one; the steps it has behind it."""
    if not folder.is_dir():
        return 0
    tensors = load_file(folder / "state.safetensors")
    step = int(json.loads((folder / "step.json").read_text())["step"])
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])
            state = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            optimizer.state[p] = {"step": torch.tensor(float(step)), **state}
    return step
