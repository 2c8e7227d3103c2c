"""The shared pool from the config to text: carried by the engine, used for later requests, and off by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer
from trtspec.config import load_config
from trtspec.pipeline import build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import Completion, GenerationRequest, SamplingParams

CONFIG = """
name: pool
target: {{model: {target}}}
speculation: {{method: {method}, draft_length: 6, pool_tokens: {size}}}
engine: {{max_batch_size: 2, max_seq_len: 128}}
workload: {{context: 32, output_length: 32, batch_sizes: [1, 2]}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Path]:
    """A function from method and pool size to an engine."""
    place = tmp_path_factory.mktemp("pool")
    target = with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))
    store = Store(place / "cache")

    def make(method: str, size: int) -> Path:
        path = place / f"{method}-{size}.yaml"
        path.write_text(CONFIG.format(target=target, method=method, size=size))
        out = place / path.stem
        return build(load_config(path), out, store=store, until="compile").out / "engine"

    return make


def twice(engine: Path, *, speculate: bool = True) -> tuple[list[Completion], list[Completion]]:
    """Sampled texts, which do not foretell themselves, and the same requests again."""
    with Runtime.open(engine, speculate=speculate) as runtime:
        rounds = [
            runtime.generate_many(
                GenerationRequest(
                    f"{turn}-{i}",
                    tuple(range(10 + i, 20 + i)),
                    SamplingParams(max_tokens=40, temperature=0.9, seed=i),
                )
                for i in range(4)
            )
            for turn in range(2)
        ]
    return rounds[0], rounds[1]


def steps(completions: list[Completion]) -> int:
    return sum(len(completion.steps) for completion in completions)


@pytest.mark.model
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_request_that_was_answered_before_is_answered_in_fewer_steps(
    made: Callable[[str, int], Path], method: str
) -> None:
    engine = made(method, 4096)
    plain, _ = twice(engine, speculate=False)
    first, again = twice(engine)
    for completions in (first, again):
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert steps(again) < 0.7 * steps(first)


@pytest.mark.model
def test_without_a_pool_it_is_not(made: Callable[[str, int], Path]) -> None:
    first, again = twice(made("ngram", 0))
    assert steps(again) == steps(first)
