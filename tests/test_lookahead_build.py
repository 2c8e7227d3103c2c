"""Lookahead decoding on the real CPU engine: window and n-grams in one forward pass, the text the plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.pipeline import build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import Completion, GenerationRequest, SamplingParams

CONFIG = """
name: lookahead
target: {{model: {target}}}
speculation: {{method: lookahead, draft_length: 6, window_size: 3, ngram_size: 4, verification_set_size: 2}}
engine: {{max_batch_size: 3, max_seq_len: 128}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lookahead")
    target = with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"))
    path = place / "config.yaml"
    path.write_text(CONFIG.format(target=target))
    return (
        build(load_config(path), place / "out", store=Store(place / "cache"), until="compile").out / "engine"
    )


def generate(engine: Path, asked: Sequence[GenerationRequest], *, speculate: bool) -> list[Completion]:
    with Runtime.open(engine, speculate=speculate) as runtime:
        return runtime.generate_many(asked)


@pytest.mark.model
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.9}])
def test_output_is_the_plain_engine_s(engine: Path, sampling: dict[str, float]) -> None:
    assert EngineInfo.read(engine).spec.max_branches == 5
    asked = [
        GenerationRequest(
            f"r{i}",
            tuple((i * 7 + k * k) % 50 + 10 for k in range(8 + 5 * i)),
            # up to the context limit, where window and n-grams no longer fit
            SamplingParams(**{"ignore_eos": True, "seed": i, **sampling}),
        )
        for i in range(6)
    ]
    plain = generate(engine, asked, speculate=False)
    drafted = generate(engine, asked, speculate=True)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    steps = [step for completion in drafted for step in completion.steps]
    assert sum(step.drafted for step in steps) > 0
    if not sampling:  # a random model repeats itself only when it is greedy
        assert sum(step.accepted for step in steps) > len(asked)
