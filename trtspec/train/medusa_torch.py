"""Training Medusa heads (2401.10774, section 2.2.1, Medusa-1: the target stays as it is) through ModelOpt's mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.train.batches_torch import Batch, FrozenTarget
from trtspec.train.fit_torch import HeadLoss
from trtspec.train.head_modules import Blueprint
from trtspec.train.modelopt_torch import convert_medusa, modelopt_loss


def build(blueprint: Blueprint, model: Any) -> MedusaModule:
    """`blueprint.draft_length` heads; options: `layers`, the residual blocks of each."""
    return MedusaModule(model, blueprint.draft_length, int(blueprint.options["layers"]))


class MedusaModule(nn.Module):
    """A fit_torch.DraftHead. At first every head is the target's own output layer, as in the paper."""

    def __init__(self, model: Any, heads: int, layers: int) -> None:
        super().__init__()
        self._layers = layers
        self._converted = convert_medusa(model, heads=heads, layers=layers)
        output = model.get_output_embeddings().weight.detach()
        with torch.no_grad():
            for head in self._converted.medusa_heads:
                for block in head[:-1]:
                    block.linear.bias.zero_()
                head[-1].weight.copy_(output)

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        return modelopt_loss(self._converted, batch, target)

    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        given = before(batch.last)
        return torch.stack([head(given).argmax(dim=-1) for head in self._converted.medusa_heads], dim=2)

    def head(self) -> Head:
        tensors = {
            name: value.detach().float().cpu().numpy()
            for name, value in self._converted.medusa_heads.state_dict().items()
        }
        vocab, hidden = self._converted.medusa_heads[0][-1].weight.shape
        config = {
            "architectures": ["MedusaModel"],
            "medusa_num_heads": len(self._converted.medusa_heads),
            "medusa_num_layers": self._layers,
            "hidden_size": hidden,
            "vocab_size": vocab,
        }
        return Head("medusa", config, (), None, tensors)


def before(states: torch.Tensor) -> torch.Tensor:
    """[B, T, H]: at t the state that token t was predicted from, that of the token before (zeros for the first)."""
    return nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
