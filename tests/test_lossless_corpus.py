"""Speculation changes nothing: greedy output of the real model equals plain output on a whole published corpus.

The plain run decodes several prompts together and the speculative run too, in other company and with other
numbers of rows: equality of every token is what a row-exact engine promises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trtspec.runtime import Runtime
from trtspec.values import Completion, GenerationRequest, SamplingParams

pytestmark = pytest.mark.model
NEW_TOKENS = 64
CONFIGS = ("quickstart", "smollm2-float32", "smollm2-rest")


def corpus(shared: Path) -> list[str]:
    """First turns of the 480 prompts of Spec-Bench."""
    lines = (shared / "data" / "spec_bench.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def generate(
    engine: Path, prompts: Sequence[str], *, speculate: bool, **sampling: object
) -> list[Completion]:
    with Runtime.open(engine, speculate=speculate) as runtime:
        requests = [
            GenerationRequest(
                f"prompt {i}",
                tuple(runtime.tokenizer.chat([{"role": "user", "content": text}])),
                SamplingParams(**{"max_tokens": NEW_TOKENS, **sampling}),
            )
            for i, text in enumerate(prompts)
        ]
        return runtime.generate_many(requests)


def assert_equal(build: Path, prompts: Sequence[str], **sampling: object) -> None:
    plain = generate(build / "engine", prompts, speculate=False, **sampling)
    drafted = generate(build / "engine", prompts, speculate=True, **sampling)
    different = [c.request_id for c, p in zip(drafted, plain, strict=True) if c.token_ids != p.token_ids]
    assert not different
    steps = [step for completion in drafted for step in completion.steps]
    assert sum(step.accepted for step in steps) > len(prompts), "drafts were hardly ever accepted"


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS)
def test_all_480_prompts(build_of: Callable[[str], Path], shared: Path, config: str) -> None:
    prompts = corpus(shared)
    assert len(prompts) == 480
    assert_equal(build_of(config), prompts)


@pytest.mark.parametrize("config", CONFIGS)
def test_one_prompt_in_forty(build_of: Callable[[str], Path], shared: Path, config: str) -> None:
    assert_equal(build_of(config), corpus(shared)[7::40])


def test_lookahead_on_a_few_prompts(build_of: Callable[[str], Path], shared: Path) -> None:
    assert_equal(build_of("smollm2-lookahead"), corpus(shared)[5::120])


def test_sampled_output_is_the_plain_one_too(quickstart_build: Path, shared: Path) -> None:
    """Token by token, for the same seed: n-gram drafts are compared with the target's own draws."""
    assert_equal(quickstart_build, corpus(shared)[3::80], temperature=0.7, top_p=0.95, seed=11)
