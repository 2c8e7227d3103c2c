"""What a draft head learns from: token sequences the target wrote, and what the target computed over them.

Hidden states are not stored: they are 2 to 10 kB a token. Each batch runs the frozen target again, and keeps only
the layers that the head reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trtspec.train.texts import Text


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of the target, padded behind, and the target's states at every token of them.

    tokens: int64 [B, T]. loss_mask: bool [B, T], True where the target wrote the token (prompt and padding are
    False). features: float32 [B, T, taps * H], outputs of the captured layers in ascending order, before the final
    norm. last: float32 [B, T, H], after the final norm: `FrozenTarget.logits(last)` at t scores the token at t + 1.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The two tables a head may share with its target, in the target's dtype and without gradient.

    embedding [V, H], head [V, H] (lm_head). Both methods give float32 whatever the tables are.
    """

    embedding: torch.Tensor
    head: torch.Tensor

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., H] for int64 [...]."""
        return nn.functional.embedding(tokens, self.embedding).float()

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., V] of states [..., H] that have passed the final norm."""
        return nn.functional.linear(states.to(self.head.dtype), self.head).float()


class StreamedBatches:
    """Batches of similar length, each a function of (seed, step) alone: a run that was killed sees the same ones."""

    def __init__(
        self,
        model: Any,
        training: Sequence[Text],
        held_out: Sequence[Text],
        captured_layers: Sequence[int],
        *,
        batch_tokens: int,
        seed: int,
    ) -> None:
        """model: a frozen causal language model of transformers. captured_layers: 0-based, ascending.

        batch_tokens: tokens of a batch, padding included; a longer sequence is a batch of its own.
        """
        self.model = model.eval().requires_grad_(False)
        self.target = FrozenTarget(
            model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
        )
        self._texts, self._held_out = training, held_out
        self._layers, self._batch_tokens, self._seed = tuple(captured_layers), batch_tokens, seed
        self._groups = _groups([len(text.tokens) for text in training], batch_tokens)

    @property
    def steps(self) -> int:
        """Batches of one pass over the training texts."""
        return len(self._groups)

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """The batch of a step, counted from 0 over all passes; of several ranks each takes every ranks-th sequence."""
        epoch, place = divmod(step, self.steps)
        order = np.random.default_rng([self._seed, epoch]).permutation(self.steps)
        group = self._groups[order[place]]
        # A rank without a sequence repeats one: all must take part in every step.
        mine = group[rank::ranks] or group[:1]
        return self._run([self._texts[i] for i in mine])

    def held_out(self) -> Iterator[tuple[Batch, list[Text]]]:
        """The sequences never trained on, each once, with the texts of the batch's rows."""
        for group in _groups([len(text.tokens) for text in self._held_out], self._batch_tokens):
            texts = [self._held_out[i] for i in group]
            yield self._run(texts), texts

    @torch.no_grad()
    def _run(self, texts: Sequence[Text]) -> Batch:
        device = self.target.head.device
        length = max(len(text.tokens) for text in texts)
        tokens = torch.zeros((len(texts), length), dtype=torch.int64)
        mask = torch.zeros((len(texts), length), dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = torch.from_numpy(text.tokens.astype(np.int64))
            mask[row, text.start : len(text.tokens)] = True
        tokens = tokens.to(device)
        kept: dict[int, torch.Tensor] = {}
        hooks = [
            self.model.model.layers[layer].register_forward_hook(_keep(kept, layer)) for layer in self._layers
        ]
        try:
            # Padding stands behind, where a causal model does not look.
            last = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        features = [kept[layer].float() for layer in self._layers]
        empty = last.new_zeros((*last.shape[:2], 0), dtype=torch.float32)
        return Batch(
            tokens, mask.to(device), torch.cat(features, dim=-1) if features else empty, last.float()
        )


def _keep(kept: dict[int, torch.Tensor], layer: int) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        kept[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def _groups(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in groups of similar length whose padded size stays within `batch_tokens`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
