"""Training Hydra heads (2402.05109): all at once, each given the true tokens before its own.

The loss is Medusa's: cross-entropy of the tokens the target wrote, weighted 0.8^i for head i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.train.batches_torch import Batch, FrozenTarget
from trtspec.train.fit_torch import HeadLoss
from trtspec.train.head_modules import Blueprint
from trtspec.train.medusa_torch import before

_DECAY = 0.8


def build(blueprint: Blueprint, model: Any) -> HydraModule:
    """`blueprint.draft_length` heads; options: `layers`, the blocks of each."""
    return HydraModule(model, blueprint.draft_length, int(blueprint.options["layers"]))


class HydraModule(nn.Module):
    """A fit_torch.DraftHead. At first every head is the target's own output layer over the state alone."""

    def __init__(self, model: Any, heads: int, layers: int) -> None:
        super().__init__()
        output = model.get_output_embeddings().weight.detach()
        vocab, hidden = output.shape
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(_Block(hidden, index + 1), *(_Block(hidden) for _ in range(layers - 1)))
            for index in range(heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads))
        with torch.no_grad():
            for layer in self.hydra_lm_head:
                layer.weight.copy_(output)
                layer.bias.zero_()

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        embedded = target.embed(batch.tokens)
        total, accuracy = batch.last.new_zeros(()), []
        for index in range(len(self.hydra_mlp)):
            # The head at t knows the tokens up to t + 1 + index and is judged on the one after them.
            ahead = index + 2
            if batch.tokens.shape[1] <= ahead:
                accuracy.append(0.0)
                continue
            logits = self._logits(index, batch.last[:, :-ahead], embedded[:, 1:])
            truth, written = batch.tokens[:, ahead:], batch.loss_mask[:, ahead:]
            entropy = nn.functional.cross_entropy(logits.transpose(1, 2), truth, reduction="none")
            count = written.sum().clamp(min=1)
            total = total + _DECAY**index * (entropy * written).sum() / count
            accuracy.append(float(((logits.argmax(dim=-1) == truth) & written).sum() / count))
        return HeadLoss(total, accuracy)

    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        # The step that begins at t has the state of t − 1; what follows t may be padding, which is never judged.
        embedded = nn.functional.pad(target.embed(batch.tokens), (0, 0, 0, len(self.hydra_mlp)))
        given = before(batch.last)
        heads = range(len(self.hydra_mlp))
        return torch.stack([self._logits(i, given, embedded).argmax(dim=-1) for i in heads], dim=2)

    def head(self) -> Head:
        tensors = {name: value.detach().float().cpu().numpy() for name, value in self.state_dict().items()}
        vocab, hidden = self.hydra_lm_head[0].weight.shape
        config = {
            "architectures": ["HydraModel"],
            "hydra_num_heads": len(self.hydra_mlp),
            "hydra_num_layers": len(self.hydra_mlp[0]),
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_size": hidden,
            "vocab_size": vocab,
        }
        return Head("hydra", config, (), None, tensors)

    def _logits(self, index: int, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[B, n, V] of head `index`. states [B, n, H]; embedded: row t is the first token after state t."""
        count = states.shape[1]
        rows = [embedded[:, i : i + count] for i in range(index + 1)]
        return self.hydra_lm_head[index](self.hydra_mlp[index](torch.cat([states, *rows], dim=-1)))


class _Block(nn.Module):
    """R x + SiLU(W x + b) for `conditions` embeddings beside the state, x + SiLU(W x + b) without any."""

    def __init__(self, hidden: int, conditions: int = 0) -> None:
        super().__init__()
        width = hidden * (conditions + 1)
        self.linear = nn.Linear(width, hidden)
        self.res_connection = nn.Linear(width, hidden) if conditions else nn.Identity()
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.zero_()
            if conditions:
                self.res_connection.weight.copy_(torch.eye(hidden, width))
                self.res_connection.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))
