"""SpecInfer (2305.09781): several draft models guess at once, and what they say is verified as one token tree.

Each draft writes a chain of its own, in its own engine with its own KV (see draft_model.py). Chains that begin alike
share those nodes (merge-based tree, section 3). Sampled chains keep a q for every draw, agreeing ones too, so that
verification is multi-step speculative sampling (section 4.3) over independent draws: each draft has random numbers of
its own. How long a chain may be is settled before anything is drawn, and no drawn token is ever left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.drafters.base import Ask, Draft
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.draft_model import DraftModelDrafter, DraftState, draft_folder, open_draft_model
from trtspec.values import GenerationRequest
from trtspec.verify.tree import ROOT, TokenTree


class SpecInferDrafter:
    """The `Drafter` of method specinfer.

    drafts: at least one, each with a `draw` of its own; owned, and closed with this. A proposal's nodes are shared out
    evenly, those left over to the first drafts, and drafts past the branches a step may have write nothing: name the
    best ones first.
    """

    def __init__(self, drafts: Sequence[DraftModelDrafter]) -> None:
        if not drafts or len({draft.draw for draft in drafts}) < len(drafts):
            raise ValueError(f"{len(drafts)} drafts with draws {[draft.draw for draft in drafts]}")
        self._drafts = tuple(drafts)
        deterministic = all(draft.spec.deterministic for draft in drafts)
        self.spec = replace(spec_of("specinfer"), deterministic=deterministic)

    def open(self, request: GenerationRequest, seed: int) -> tuple[DraftState, ...]:
        return tuple(draft.open(request, seed) for draft in self._drafts)

    def observe(
        self, state: tuple[DraftState, ...], tokens: Sequence[int], hidden: npt.NDArray[np.float32]
    ) -> None:
        for draft, own in zip(self._drafts, state, strict=True):
            draft.observe(own, tokens, hidden)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        chains = [
            draft.propose([_share(ask, number, len(self._drafts)) for ask in asks], rows)
            for number, draft in enumerate(self._drafts)
        ]
        return [merge(own) for own in zip(*chains, strict=True)]

    def release(self, state: tuple[DraftState, ...]) -> None:
        for draft, own in zip(self._drafts, state, strict=True):
            draft.release(own)

    def close(self) -> None:
        for draft in self._drafts:
            draft.close()


def merge(chains: Sequence[Draft]) -> Draft:
    """Independent chains as one tree, equal beginnings once; each keeps all its draws, an earlier chain's first."""
    tree = TokenTree.merge([chain.tree.tokens for chain in chains])
    q = [chain.q for chain in chains if chain.q is not None]
    if not q:
        return Draft(tree)
    return Draft(tree, np.concatenate(q), tuple(node for c in chains for node in _nodes(tree, c.tree.tokens)))


def _nodes(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The tree's nodes along a path of it."""
    path: list[int] = []
    node = ROOT
    for token in tokens:
        node = next(child for child in tree.children[node] if tree.tokens[child] == token)
        path.append(node)
    return path


def _share(ask: Ask, number: int, drafts: int) -> Ask:
    """What the draft of a number may write: see `SpecInferDrafter`."""
    writing = min(drafts, ask.branches)
    nodes = ask.nodes // writing + (number < ask.nodes % writing) if number < writing else 0
    return Ask(ask.state[number], nodes, min(ask.depth, nodes))


def open_specinfer(
    speculation: Mapping[str, Any],
    target: Path,
    *,
    max_batch: int | None,
    threads: int | None,
    special_ids: Collection[int],
) -> SpecInferDrafter:
    """Open every draft inside the engine folder `target`; see `open_draft_model`."""
    return SpecInferDrafter(
        [
            open_draft_model(
                speculation,
                target,
                max_batch=max_batch,
                threads=threads,
                special_ids=special_ids,
                folder=draft_folder(number),
                draw=number,
            )
            for number in range(len(speculation["drafts"]))
        ]
    )
