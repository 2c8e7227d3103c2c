"""What a draft head learns from: token sequences the target wrote, and what the target computed over them.

Hidden states are 2 to 10 kB a token. Where memory has room for those of all texts, they are kept when a text is first
seen; where it has not, every batch runs the frozen target again, which gives the same states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

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

    def logits(self, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """[..., V] of states [..., H] that have passed the final norm; with ids, int64 [n], of these tokens alone."""
        head = self.head if ids is None or len(ids) == len(self.head) else self.head[ids]
        return nn.functional.linear(states.to(head.dtype), head).float()


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
        memory_bytes: int = 0,
    ) -> None:
        """model: a frozen causal language model of transformers. captured_layers: 0-based, ascending.

        batch_tokens: tokens of a batch, padding included; a longer sequence is a batch of its own. memory_bytes: that
        states of the training texts may take; kept states lie in main memory, in the model's dtype.
        """
        self.model = model.eval().requires_grad_(False)
        self.target = FrozenTarget(
            model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
        )
        self._texts, self._held_out = training, held_out
        self._layers, self._batch_tokens, self._seed = tuple(captured_layers), batch_tokens, seed
        self._groups = _groups([len(text.tokens) for text in training], batch_tokens)
        self._kept: dict[int, torch.Tensor] = {}
        needed = sum(len(text.tokens) for text in training) * (len(self._layers) + 1)
        needed *= model.config.hidden_size * self.target.head.element_size()
        self._keeps = needed <= memory_bytes

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
        texts = [self._texts[i] for i in mine]
        if all(i in self._kept for i in mine):
            return self._batch(texts, pad_sequence([self._kept[i] for i in mine], batch_first=True))
        states = self._states(texts)
        if self._keeps:
            for row, (i, text) in enumerate(zip(mine, texts)):
                self._kept[i] = states[row, : len(text.tokens)].cpu().clone()
        return self._batch(texts, states)

    def held_out(self) -> Iterator[tuple[Batch, list[Text]]]:
        """The sequences never trained on, each once, with the texts of the batch's rows."""
        for group in _groups([len(text.tokens) for text in self._held_out], self._batch_tokens):
            texts = [self._held_out[i] for i in group]
            yield self._run(texts), texts

    def _run(self, texts: Sequence[Text]) -> Batch:
        return self._batch(texts, self._states(texts))

    def _batch(self, texts: Sequence[Text], states: torch.Tensor) -> Batch:
        """states [B, T, (taps + 1) · H]: of the captured layers and after the final norm."""
        device, hidden = self.target.head.device, self.target.head.shape[1]
        mask = torch.zeros(states.shape[:2], dtype=torch.bool)
        for row, text in enumerate(texts):
            mask[row, text.start : len(text.tokens)] = True
        features, last = states.to(device).float().split([len(self._layers) * hidden, hidden], dim=-1)
        return Batch(_padded(texts).to(device), mask.to(device), features, last)

    def _states(self, texts: Sequence[Text]) -> torch.Tensor:
        """See `_batch`; in the model's dtype."""
        return target_states(self.model, _padded(texts).to(self.target.head.device), self._layers)


@torch.no_grad()
def target_states(model: Any, tokens: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """[B, T, (layers + 1) · H], in the model's dtype: outputs of these layers, and what passed the final norm.

    tokens: int64 [B, T], padded behind, where a causal model does not look.
    """
    kept: dict[int, torch.Tensor] = {}
    hooks = [model.model.layers[layer].register_forward_hook(_keep(kept, layer)) for layer in layers]
    try:
        last = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([*(kept[layer] for layer in layers), last], dim=-1)


def _padded(texts: Sequence[Text]) -> torch.Tensor:
    """Their tokens, int64 [B, T], zeros behind."""
    return pad_sequence([torch.from_numpy(text.tokens.astype(np.int64)) for text in texts], batch_first=True)


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
