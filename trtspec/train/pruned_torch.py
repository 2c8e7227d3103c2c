"""A draft model cut from its target: some of its layers, distilled, under the target's own embedding and output layer.

Loss: soft cross-entropy −Σ p log q against the target at the positions of responses (Hinton et al., 1503.02531; for
drafts DistillSpec, 2310.08461).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trtspec.errors import PlanInfeasible
from trtspec.train.batches_torch import Batch, FrozenTarget
from trtspec.train.fit_torch import HeadLoss
from trtspec.train.head_modules import Blueprint


def build(blueprint: Blueprint, model: Any) -> PrunedCopy:
    """`options.layers` of the model's layers. Raises PlanInfeasible for a model with another structure."""
    body = getattr(model, "model", None)
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(body, "norm"):
        raise PlanInfeasible(
            f"{type(model).__name__} is no plain stack of decoder layers: there is nothing to prune",
            where="speculation.method",
            hint="give a draft model in speculation.draft.model",
        )
    try:
        kept = kept_layers(len(layers), int(blueprint.options["layers"]))
    except ValueError as error:
        raise PlanInfeasible(
            str(error), where="training.options.layers", hint="name another number of layers"
        ) from None
    return PrunedCopy(model, kept, blueprint.draft_length)


def kept_layers(layers: int, keep: int) -> tuple[int, ...]:
    """`keep` of `layers` layers, evenly spaced from the first to the last. Raises ValueError when there are fewer."""
    if not 1 <= keep < layers:
        raise ValueError(f"a draft keeps from 1 to {layers - 1} of {layers} layers, not {keep}")
    if keep == 1:
        return (0,)
    return tuple(round(i * (layers - 1) / (keep - 1)) for i in range(keep))


class PrunedCopy(nn.Module):
    """A DraftHead that is a whole model. Only its layers and final norm, in float32, are trainable."""

    def __init__(self, model: Any, kept: tuple[int, ...], draft_length: int) -> None:
        super().__init__()
        self.kept, self._draft_length = kept, draft_length
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = len(kept)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i] for i in kept]
        with torch.device("meta"):
            self.model = type(model)(config)
        body = self.model.model
        body.layers = nn.ModuleList([copy.deepcopy(model.model.layers[i]).float() for i in kept])
        for index, layer in enumerate(body.layers):
            layer.self_attn.layer_idx = index
        body.norm, body.rotary_emb = copy.deepcopy(model.model.norm).float(), model.model.rotary_emb
        self.model.set_input_embeddings(model.get_input_embeddings())
        self.model.set_output_embeddings(model.get_output_embeddings())
        self.model.requires_grad_(False)
        body.layers.requires_grad_(True)
        body.norm.requires_grad_(True)

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        """Of the tokens the target wrote, each from the position before it."""
        written = batch.loss_mask[:, 1:]
        scores = self.model.lm_head(self._states(batch.tokens)[:, :-1][written])
        with torch.no_grad():
            teacher = target.logits(batch.last[:, :-1][written]).softmax(dim=-1)
        loss = -(teacher * scores.float().log_softmax(dim=-1)).sum(dim=-1).mean()
        right = scores.argmax(dim=-1) == batch.tokens[:, 1:][written]
        return HeadLoss(loss, [float(right.float().mean())])

    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        """With true tokens between, the i-th draft after t is the copy's own next token at t + i."""
        following = self.model.lm_head(self._states(batch.tokens)).argmax(dim=-1)
        padded = nn.functional.pad(following, (0, self._draft_length))
        length = batch.tokens.shape[1]
        return torch.stack([padded[:, i : i + length] for i in range(self._draft_length)], dim=2)

    def save_model(self, into: Path, dtype: torch.dtype) -> None:
        """Write the copy as a model folder, without tokenizer files."""
        self.model.to(dtype).save_pretrained(into)

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, H] after the final norm. Padding stands behind, where a causal model does not look."""
        return self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
