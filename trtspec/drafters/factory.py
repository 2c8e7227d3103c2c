"""From the speculation a plan names to a running drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trtspec.drafters.base import Drafter
from trtspec.drafters.catalog import AUTOREGRESSIVE_HEADS
from trtspec.drafters.datastore import Datastore
from trtspec.drafters.lookahead import LookaheadDrafter
from trtspec.drafters.ngram import NgramDrafter
from trtspec.drafters.policy import DraftPolicy, StepCost
from trtspec.drafters.pool import NgramPool
from trtspec.drafters.rest import RestDrafter
from trtspec.drafters.suffix import SuffixDrafter
from trtspec.engines.base import Engine

# Methods with files of their own in an engine folder → the module whose `open_<module>` opens them, which is only
# imported for that: most load an engine of their own.
_IN_ENGINE_FOLDERS = {
    "rest": "rest",
    **{
        method: method
        for method in ("draft_model", "specinfer", "quantspec", "medusa", "hydra", "dflash", "dspark")
    },
    **{method: "mtp" if method == "mtp" else "eagle" for method in AUTOREGRESSIVE_HEADS},
}


def open_drafter(
    speculation: Mapping[str, Any],
    *,
    special_ids: Collection[int] = (),
    cost: StepCost | None = None,
    engine: Path | None = None,
    slots: int | None = None,
    threads: int | None = None,
    target: Engine | None = None,
) -> Drafter | None:
    """The drafter of `speculation["method"]`; None for "none".

    speculation: the method and its own options, named as in a config. special_ids: the tokenizer's control
    tokens. cost: of the engine's steps; None drafts the full length whenever there is a match. engine: the
    target's engine folder, for a method with files of its own in it. slots, threads: of an engine of its own.
    target: the opened target, for a method that shares its KV cache.
    Raises ValueError for a method that trtspec's own decode loop does not run, and SetupError or ConfigError
    where the method's files are missing or are another model's.
    """
    method = speculation["method"]
    if method == "none":
        return None
    if method == "ngram":
        lengths = {name: speculation[name] for name in ("max_ngram", "min_ngram") if name in speculation}
        return NgramDrafter(
            **lengths, policy=DraftPolicy(cost), **_matching(speculation, special_ids, **lengths)
        )
    if method == "suffix":
        least = speculation.get("min_token_probability", 0.0)
        longest = speculation.get("max_tree_depth", 64)
        return SuffixDrafter(
            max_match=longest,
            max_spec_factor=speculation.get("max_spec_factor"),
            policy=DraftPolicy(cost, min_probability=least),
            **_matching(speculation, special_ids, max_ngram=longest),
        )
    if method == "lookahead":
        sizes = ("window_size", "ngram_size", "verification_set_size")
        return LookaheadDrafter(**{name: speculation[name] for name in sizes if name in speculation})
    if method not in _IN_ENGINE_FOLDERS:
        raise ValueError(f"method {method!r} does not run in trtspec's own decode loop")
    if engine is None:
        raise ValueError(f"{method} runs what lies in an engine folder, and none was named")
    if method == "rest":
        return RestDrafter(
            Datastore.open(engine / speculation["datastore"]),
            **{name: speculation[name] for name in ("max_ngram", "tree_size") if name in speculation},
            tree=speculation.get("shape", "tree") == "tree",
            policy=DraftPolicy(cost),
        )
    module = import_module(f"trtspec.drafters.{_IN_ENGINE_FOLDERS[method]}")
    opener = getattr(module, f"open_{_IN_ENGINE_FOLDERS[method]}")
    if method in ("draft_model", "specinfer"):
        return opener(speculation, engine, max_batch=slots, threads=threads, special_ids=special_ids)
    if method == "quantspec":
        if target is None:
            raise ValueError("quantspec reads the target's own KV cache, and no target was given")
        return opener(speculation, engine, target, threads=threads, special_ids=special_ids)
    if method in AUTOREGRESSIVE_HEADS:
        return opener(speculation, engine, slots=slots, threads=threads, special_ids=special_ids)
    return opener(speculation, engine, threads=threads)


def _matching(speculation: Mapping[str, Any], special_ids: Collection[int], **lengths: int) -> dict[str, Any]:
    """Settings of the methods that copy from text they match. lengths: of a match in the shared pool, if any."""
    size = speculation.get("pool_tokens", 0)
    return {
        "min_draft_length": speculation.get("min_draft_length", 1),
        "special_ids": special_ids,
        "pool": NgramPool(size, special_ids=special_ids, **lengths) if size else None,
        "pool_prompts": speculation.get("pool_prompts", False),
    }
