"""Trees of every shape through the decode loop and the CPU engine: the text is the plain one, token by token.

The engine computes each branch in a lane of its own; what the loop commits must be the branch that was accepted,
also when it is a beginning that several branches share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.verify.toy import PathDrafter, random_tree, run
from trtspec.compile import CompileRequest, compile_engine
from trtspec.drafters.base import Ask, Draft
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import TokenTree

BRANCHES = 4


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    into = tmp_path_factory.mktemp("engine")
    speculation = {"method": "none", "draft_length": 0}
    compile_engine(
        CompileRequest(tiny_model("llama"), "tiny", speculation, max_batch=3, max_branches=BRANCHES), into
    )
    return OnnxRuntimeEngine(into)


def requests(**sampling: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            str(i),
            tuple((i * 7 + k * k) % 250 + 5 for k in range(4 + 3 * i)),
            SamplingParams(**{"max_tokens": 40, "seed": i, **sampling}),
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_trees_of_right_and_wrong_branches_give_the_plain_text(
    engine: OnnxRuntimeEngine, sampling: dict[str, float]
) -> None:
    plain = run(DecodeLoop(engine), requests(**sampling)).completions
    truths = [(*r.prompt, *plain[r.request_id].token_ids) for r in requests(**sampling)]

    def guess(path: tuple[int, ...], ask: Ask) -> Draft:
        """A random tree, three of four nodes with the token that is right at their depth."""
        rng = np.random.default_rng([len(path), *path[-2:]])
        truth = next(t for t in truths if t[: len(path)] == path)
        shape = random_tree(rng, 300, ask.nodes, ask.depth, ask.branches)
        tokens = [
            truth[len(path) + depth - 1] if rng.random() < 0.75 else token
            for token, depth in zip(shape.tokens, shape.depths, strict=True)
        ]
        return Draft(TokenTree(tuple(tokens), shape.parents))

    outcome = run(DecodeLoop(engine, PathDrafter(guess), draft_length=8), requests(**sampling))
    assert not outcome.failures
    assert {id: c.token_ids for id, c in outcome.completions.items()} == {
        id: c.token_ids for id, c in plain.items()
    }
    steps = [step for completion in outcome.completions.values() for step in completion.steps]
    assert sum(step.accepted for step in steps) > len(steps) / 2
