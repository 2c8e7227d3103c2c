"""Training DFlash (2602.06036) and DSpark (2607.05147) heads through ModelOpt's mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trtspec.checkpoints.head_layouts.head import Head
from trtspec.train.batches_torch import Batch, FrozenTarget
from trtspec.train.fit_torch import HeadLoss
from trtspec.train.head_modules import Blueprint
from trtspec.train.modelopt_torch import convert_dflash, exported, modelopt_loss

_BLOCKS_AT_ONCE = 64  # of each sequence when drafts are measured


def build(blueprint: Blueprint, model: Any) -> DFlashModule:
    """One layer for each captured layer, blocks for `blueprint.draft_length` drafts.

    options: `mask_token_id`, an id that text hardly uses; `anchors`, blocks drawn from each sequence and step; for
    dspark also `markov_rank`.
    """
    options, spark = blueprint.options, blueprint.method == "dspark"
    changes: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if spark:
        changes = {
            "projector_type": "dspark",
            "markov_rank": int(options["markov_rank"]),
            "markov_head_type": "vanilla",
            "use_confidence_head": True,
        }
        settings = {"dflash_confidence_head_alpha": 1.0}
    converted = convert_dflash(
        model,
        blueprint.captured_layers,
        block_size=blueprint.draft_length + (not spark),  # DFlash's first row is the known token
        mask_token_id=int(options["mask_token_id"]),
        anchors=int(options["anchors"]),
        options=settings,
        **changes,
    )
    return DFlashModule(converted, blueprint.method, blueprint.captured_layers)


class DFlashModule(nn.Module):
    """A fit_torch.DraftHead around a model that ModelOpt converted."""

    def __init__(self, converted: Any, method: str, captured_layers: tuple[int, ...]) -> None:
        super().__init__()
        self._converted = converted
        self._method, self._captured = method, captured_layers

    def loss(self, batch: Batch, target: FrozenTarget) -> HeadLoss:
        return modelopt_loss(self._converted, batch, target)

    def drafts(self, batch: Batch, target: FrozenTarget) -> torch.Tensor:
        anchors = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return torch.cat(
            [self._blocks(batch, target, some) for some in anchors.split(_BLOCKS_AT_ONCE)], dim=1
        )

    def head(self) -> Head:
        config, tensors = exported(self._converted)
        return Head(self._method, config, self._captured, None, tensors)

    def _blocks(self, batch: Batch, target: FrozenTarget, anchors: torch.Tensor) -> torch.Tensor:
        """int64 [B, n, D]: drafts of the blocks that begin at the tokens `anchors` [n] of every sequence."""
        converted = self._converted
        sequences, length = batch.tokens.shape
        count, size = len(anchors), converted.dflash_block_size
        places = anchors.expand(sequences, count)
        kept = torch.ones_like(places, dtype=torch.bool)
        dtype, device = batch.features.dtype, anchors.device
        mask = converted._build_draft_attention_mask(
            length, places, kept, count, dtype, device, window=converted.dflash_swa_window_size
        )
        states = converted.dflash_module(
            noise_embedding=converted._build_noise_embedding(batch.tokens, places, kept, count).float(),
            target_hidden=batch.features,
            position_ids=converted._build_position_ids(length, places, device),
            attention_mask=mask,
        )
        logits = target.logits(states).reshape(sequences, count, size, -1)
        if self._method == "dflash":
            return logits[:, :, 1:].argmax(dim=-1)
        final, _ = converted._apply_markov_head(states, logits, batch.tokens, places, count)
        return final.argmax(dim=-1)
