"""How many drafts a head would have had accepted on text it was not trained on.

The text is the target's own, so the draft that equals it is the draft that is accepted: walking through it step by
step gives the acceptance length of greedy drafts without an engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtspec.errors import StageFailed
from trtspec.train.batches_torch import StreamedBatches


@dataclass(frozen=True, slots=True)
class HeldOut:
    """conditional_acceptance: by draft position, P(accepted | all before it were). acceptance_length: tokens a step
    emits, token-weighted, the target's own included; by_kind the same for each kind of prompt. steps: verify steps
    walked. accuracy: by draft position, the share of right drafts over all tokens, not only where a step begins.
    """

    acceptance_length: float
    conditional_acceptance: tuple[float, ...]
    accuracy: tuple[float, ...]
    by_kind: Mapping[str, float]
    steps: int

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HeldOut:
        """The inverse of `dataclasses.asdict`."""
        lists = {name: tuple(value[name]) for name in ("conditional_acceptance", "accuracy")}
        return HeldOut(**{**value, **lists})


@torch.no_grad()
def held_out_acceptance(module: Any, batches: StreamedBatches) -> HeldOut:
    """Walk the held-out texts with `module` (a fit_torch.DraftHead), which is left in the mode it was in.

    Raises StageFailed where none is long enough for one verify step.
    """
    was_training = module.training
    module.eval()
    accepted: dict[str, list[int]] = defaultdict(list)
    right = None
    for batch, texts in batches.held_out():
        hits, known = _hits(module.drafts(batch, batches.target), batch.tokens, batch.loss_mask)
        total = np.stack([(hits & known).sum(axis=(0, 1)), known.sum(axis=(0, 1))])
        right = total if right is None else right + total
        for row, text in enumerate(texts):
            accepted[text.kind] += _walk(hits[row], text.start, len(text.tokens))
    module.train(was_training)
    if not any(accepted.values()):
        raise StageFailed(
            "no held-out response is longer than a draft: nothing can be measured",
            where="training.response_length",
            hint="ask for more or longer responses, or lower training.draft_length",
        )
    counts = np.concatenate([np.array(a, int) for a in accepted.values()])
    positions = right.shape[1]
    reached = np.array([(counts >= i).sum() for i in range(positions + 1)])
    return HeldOut(
        acceptance_length=float(1 + counts.mean()),
        conditional_acceptance=tuple(float(p) for p in reached[1:] / np.maximum(reached[:-1], 1)),
        accuracy=tuple(float(p) for p in right[0] / np.maximum(right[1], 1)),
        by_kind={kind: float(1 + np.mean(a)) for kind, a in sorted(accepted.items()) if a},
        steps=len(counts),
    )


def _hits(
    drafts: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """bool [B, T, D] each: draft i at token t is token t + 1 + i; that token is there, and both are the target's."""
    depth = drafts.shape[2]
    padded = torch.nn.functional.pad(tokens, (0, depth))
    written = torch.nn.functional.pad(mask, (0, depth))
    ahead = torch.stack([padded[:, 1 + i : 1 + i + tokens.shape[1]] for i in range(depth)], dim=2)
    known = torch.stack([written[:, 1 + i : 1 + i + tokens.shape[1]] for i in range(depth)], dim=2)
    known &= mask[:, :, None]
    return (drafts == ahead).cpu().numpy(), known.cpu().numpy()


def _walk(hits: npt.NDArray[np.bool_], start: int, length: int) -> list[int]:
    """Drafts accepted in each verify step from the first response token on; steps cut off by the end are left out."""
    counts, place, depth = [], start, hits.shape[1]
    while place + depth < length:
        row = hits[place]
        accepted = depth if row.all() else int(row.argmin())
        counts.append(accepted)
        place += accepted + 1
    return counts
