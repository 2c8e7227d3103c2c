"""Medusa (2401.10774): one head for each future position, all read from the state that gave the last token.

The heads do not see each other's tokens: head i scores position i + 1 whatever stands before it, so one pass gives the
candidates of the whole tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.drafters.catalog import spec_of
from trtspec.drafters.head_engine import open_graph, read_info
from trtspec.drafters.token_heads import TokenHeadDrafter, open_token_heads
from trtspec.verify.tree import TokenTree

GRAPH = "medusa.onnx"  # in the head's folder


# hidden float32 [n, H] to ids [n, heads, K], likeliest first
MedusaCandidates = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.integer]]


class MedusaHeads:
    """`TokenHeads` of Medusa."""

    def __init__(self, candidates: MedusaCandidates) -> None:
        self._candidates = candidates

    def __call__(
        self, hidden: npt.NDArray[np.float32], last: Sequence[int], ranks: Sequence[TokenTree]
    ) -> list[list[int]]:
        return [
            [int(best[depth - 1, rank]) for depth, rank in zip(tree.depths, tree.tokens, strict=True)]
            for best, tree in zip(self._candidates(hidden), ranks, strict=True)
        ]


def open_candidates(engine: Path, info: Mapping[str, Any], threads: int | None = None) -> MedusaCandidates:
    """The heads of an engine folder. info: its head.json."""
    results = {"candidates": (info["heads"], info["candidates"])}
    graph = open_graph(engine, GRAPH, results, threads)
    return lambda hidden: graph(hidden=hidden)[0]


def open_medusa(
    speculation: Mapping[str, Any], engine: Path, *, threads: int | None = None
) -> TokenHeadDrafter:
    """Open the heads inside an engine folder. Raises SetupError when they are not there."""
    info = read_info(engine, "medusa")
    heads = MedusaHeads(open_candidates(engine, info, threads))
    return open_token_heads(spec_of("medusa"), heads, speculation, info)
