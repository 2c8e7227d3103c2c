"""From the speculation a plan names to a running drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trtspec.drafters.base import Drafter
from trtspec.drafters.datastore import Datastore
from trtspec.drafters.lookahead import LookaheadDrafter
from trtspec.drafters.ngram import NgramDrafter
from trtspec.drafters.policy import DraftPolicy, StepCost
from trtspec.drafters.rest import RestDrafter
from trtspec.drafters.suffix import SuffixDrafter


def open_drafter(
    speculation: Mapping[str, Any],
    *,
    special_ids: Collection[int] = (),
    cost: StepCost | None = None,
    engine: Path | None = None,
    slots: int | None = None,
    threads: int | None = None,
) -> Drafter | None:
    """The drafter of `speculation["method"]`; None for "none".

    speculation: the method and its own options, named as in a config. special_ids: the tokenizer's control
    tokens. cost: of the engine's steps; None drafts the full length whenever there is a match. engine: the
    target's engine folder, for a method with files of its own in it. slots, threads: of an engine of its own.
    Raises ValueError for a method that trtspec's own decode loop does not run, and SetupError or ConfigError
    where the method's files are missing or are another model's.
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
    if method == "lookahead":
        sizes = ("window_size", "ngram_size", "verification_set_size")
        return LookaheadDrafter(**{name: speculation[name] for name in sizes if name in speculation})
    if method == "rest":
        if engine is None:
            raise ValueError("rest reads a datastore that lies in an engine folder, and none was named")
        return RestDrafter(
            Datastore.open(engine / speculation["datastore"]),
            **{name: speculation[name] for name in ("max_ngram", "tree_size") if name in speculation},
            policy=DraftPolicy(cost),
        )
    if method == "draft_model":
        from trtspec.drafters.draft_model import open_draft_model

        if engine is None:
            raise ValueError("draft_model runs a model that lies in an engine folder, and none was named")
        return open_draft_model(
            speculation, engine, max_batch=slots, threads=threads, special_ids=special_ids
        )
    raise ValueError(f"method {method!r} does not run in trtspec's own decode loop")
