"""Hydra (2402.05109): Medusa's heads made sequentially dependent: each sees the tokens drafted before it.

Head i reads the state that gave the last known token, that token's embedding, and the embeddings of the i tokens
drafted on the way to its position. So it runs once for each node that gets children, level by level, all sequences
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtspec.drafters.catalog import spec_of
from trtspec.drafters.head_engine import HeadGraph, open_embedding, open_graph, read_info
from trtspec.drafters.token_heads import TokenHeadDrafter, open_token_heads
from trtspec.verify.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from trtspec.drafters.head_plan import HeadPlan

# Of one head: hidden float32 [n, H] and int64 [n, i + 1], the last known token and those drafted since, to ids
# [n, K], likeliest first.
HydraHead = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int64]], npt.NDArray[np.integer]]


def graph_name(head: int) -> str:
    """File of one head's graph, in the head's folder."""
    return f"hydra.{head}.onnx"


class HydraHeads:
    """`TokenHeads` of Hydra. heads: by position."""

    def __init__(self, heads: Sequence[HydraHead]) -> None:
        self._heads = heads

    def __call__(
        self, hidden: npt.NDArray[np.float32], last: Sequence[int], ranks: Sequence[TokenTree]
    ) -> list[list[int]]:
        tokens = [[0] * len(tree) for tree in ranks]
        for level in range(max(tree.depth for tree in ranks)):
            parents = [
                (i, node)
                for i, tree in enumerate(ranks)
                for node in tree.children
                if (0 if node == ROOT else tree.depths[node]) == level
            ]
            paths = [[last[i], *(tokens[i][n] for n in ranks[i].path(node))] for i, node in parents]
            best = self._heads[level](hidden[[i for i, _ in parents]], np.array(paths, np.int64))
            for (i, node), row in zip(parents, best, strict=True):
                for child in ranks[i].children[node]:
                    tokens[i][child] = int(row[ranks[i].tokens[child]])
        return tokens


def open_heads(engine: Path, info: Mapping[str, Any], threads: int | None = None) -> list[HydraHead]:
    """The heads of an engine folder. info: its head.json."""
    results = {"candidates": (info["candidates"],)}
    graphs = [open_graph(engine, graph_name(i), results, threads) for i in range(info["heads"])]
    embedding = open_embedding(engine, info, graphs[0].device)

    def head(graph: HeadGraph | HeadPlan) -> HydraHead:
        return lambda hidden, path: graph(hidden=hidden, embedded=embedding(path).reshape(len(path), -1))[0]

    return [head(graph) for graph in graphs]


def open_hydra(
    speculation: Mapping[str, Any], engine: Path, *, threads: int | None = None
) -> TokenHeadDrafter:
    """Open the heads inside an engine folder. Raises SetupError when they are not there."""
    info = read_info(engine, "hydra")
    heads = HydraHeads(open_heads(engine, info, threads))
    return open_token_heads(spec_of("hydra"), heads, speculation, info)
