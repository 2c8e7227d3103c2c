"""From the speculation a plan names to a running drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trtspec.drafters.base import Drafter
from trtspec.drafters.ngram import NgramDrafter
from trtspec.drafters.policy import DraftPolicy, StepCost
from trtspec.drafters.suffix import SuffixDrafter


def open_drafter(
    speculation: Mapping[str, Any], *, special_ids: Collection[int] = (), cost: StepCost | None = None
) -> Drafter | None:
    """The drafter of `speculation["method"]`; None for "none".

    speculation: the method and its own options, named as in a config. special_ids: the tokenizer's control
    tokens. cost: of the engine's steps; None drafts the full length whenever there is a match.
    Raises ValueError for a method that trtspec's own decode loop does not run.
    """
    method = speculation["method"]
    shared = {
        "min_draft_length": speculation.get("min_draft_length", 1),
        "special_ids": special_ids,
    }
    if method == "none":
        return None
    if method == "ngram":
        return NgramDrafter(
            **{name: speculation[name] for name in ("max_ngram", "min_ngram") if name in speculation},
            policy=DraftPolicy(cost),
            **shared,
        )
    if method == "suffix":
        least = speculation.get("min_token_probability", 0.0)
        return SuffixDrafter(
            max_match=speculation.get("max_tree_depth", 64),
            max_spec_factor=speculation.get("max_spec_factor"),
            policy=DraftPolicy(cost, min_probability=least),
            **shared,
        )
    raise ValueError(f"method {method!r} does not run in trtspec's own decode loop")
