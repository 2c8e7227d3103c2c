"""Sampled output of the real model, with and without speculation: two samples of one distribution.

For fixed prompts many seeds are decoded plainly and as many others with drafts. The statistic compares how often each
token stands at each of the first positions, and each pair of tokens at two that follow each other; its p-value comes
from permuting which request belongs to which sample, so it holds whatever depends on what inside a request. Verifiers
that are biased on purpose must fail the same test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.mechanisms.lossless import build_engine, missing
from tests.mechanisms.table import MECHANISMS, complete
from tests.verify.test_lossless import accepting_everything, from_p_after_rejection
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.drafters.base import Drafter
from trtspec.drafters.draft_model import DraftModelDrafter
from trtspec.drafters.factory import open_drafter
from trtspec.drafters.ngram import NgramDrafter
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.engines.opening import open_engine
from trtspec.values import Completion, GenerationRequest, SamplingParams
from trtspec.verify.acceptance import Verifier, verify
from trtspec.verify.lossy import Typical

pytestmark = pytest.mark.model

# The second repeats itself, so that n-gram drafts are there from the first step on.
PROMPTS = ("The best thing about a rainy day is", f"{'red blue green ' * 4}red blue")
SEEDS = 80
TOKENS = 4  # the first of them comes with the prompt, before any draft
PERMUTATIONS = 999
RARE = 8  # a token or pair seen less often, in both samples together, counts as "another"

Sample = list[list[tuple[int, ...]]]  # by prompt, the tokens of each request


def pvalue(one: Sample, other: Sample) -> float:
    """Of the hypothesis that both samples have one distribution; at least 1 / (PERMUTATIONS + 1)."""
    rng, observed, permuted = np.random.default_rng(0), 0.0, np.zeros(PERMUTATIONS)
    for ours, theirs in zip(one, other, strict=True):
        together = [*ours, *theirs]
        seen = np.concatenate([counted([r[t : t + n] for r in together]) for t, n in cells(together)], axis=1)
        signs = np.repeat([1.0, -1.0], [len(ours), len(theirs)])
        orders = np.stack([signs, *(rng.permutation(signs) for _ in range(PERMUTATIONS))])
        # Σ (a − b)² / (a + b): chi-square of each contingency table, up to a constant factor
        statistics = ((orders @ seen) ** 2 / seen.sum(axis=0)).sum(axis=1)
        observed += statistics[0]
        permuted += statistics[1:]
    return (1 + int((permuted >= observed - 1e-9).sum())) / (1 + PERMUTATIONS)


def cells(requests: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """(first position, length) of what is compared: single tokens and pairs of the drafted positions."""
    for position in range(1, min(map(len, requests))):
        yield position, 1
        if position > 1:
            yield position - 1, 2


def counted(values: Sequence[tuple[int, ...]]) -> np.ndarray:
    """float [requests, categories]: which value each request has; rare ones together in the last column."""
    common = [value for value, count in Counter(values).items() if count >= RARE]
    place = {value: i for i, value in enumerate(common)}
    seen = np.zeros((len(values), len(common) + 1))
    seen[np.arange(len(values)), [place.get(value, len(common)) for value in values]] = 1
    return seen[:, seen.any(axis=0)]


def requests(prompt: Sequence[int], seeds: range, tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            str(seed),
            tuple(prompt),
            SamplingParams(max_tokens=tokens, temperature=1.0, top_k=20, seed=seed, ignore_eos=True),
        )
        for seed in seeds
    ]


class Sampler:
    """Draws samples from one engine; `plain` is drawn once."""

    def __init__(self, folder: Path, count: int, prompts: Sequence[str], tokens: int = TOKENS) -> None:
        self.engine = open_engine(folder)
        self._count = count
        self._tokens = tokens
        tokenizer = TextTokenizer.load(folder)
        self._prompts = [tokenizer.encode(text) for text in prompts]
        self.plain, _ = self.draw(None, first=0)

    def draw(
        self, drafter: Drafter | None, *, first: int, draft_length: int = 3, verifier: Verifier = verify
    ) -> tuple[Sample, list[Completion]]:
        """Tokens by prompt for the seeds from `first` on, and all completions."""
        sample, done = [], []
        for prompt in self._prompts:
            asked = requests(prompt, range(first, first + self._count), self._tokens)
            completions = complete(self.engine, drafter, draft_length, asked, verifier=verifier)
            sample.append([c.token_ids for c in completions])
            done += completions
        return sample, done


def assert_took_part(completions: Sequence[Completion]) -> None:
    """Drafts were accepted, and drafts were rejected: neither half of the rule went untested."""
    steps = [step for completion in completions for step in completion.steps]
    accepted, drafted = sum(s.accepted for s in steps), sum(s.drafted for s in steps)
    assert len(completions) / 8 < accepted < 0.95 * drafted


# -- in every test run: the quickstart's engine


@pytest.fixture(scope="module")
def sampler(quickstart_build: Path) -> Iterator[Sampler]:
    made = Sampler(quickstart_build / "engine", SEEDS, PROMPTS)
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def drafters(quickstart_build: Path, sampler: Sampler) -> Iterator[dict[str, Drafter]]:
    """A stochastic one, the model itself at another temperature, so that q is far from p; and a deterministic one."""
    cold = DraftModelDrafter(
        OnnxRuntimeEngine(quickstart_build / "engine"),
        sampler.engine.spec.tokenizer_vocab_size,
        temperature=0.5,
    )
    yield {"stochastic": cold, "deterministic": NgramDrafter(min_ngram=1)}
    cold.close()


@pytest.mark.parametrize("kind", ["stochastic", "deterministic"])
def test_speculation_leaves_the_distribution_as_it_is(
    sampler: Sampler, drafters: dict[str, Drafter], kind: str
) -> None:
    sample, completions = sampler.draw(drafters[kind], first=10_000)
    assert_took_part(completions)
    assert pvalue(sampler.plain, sample) > 0.01


def careless(draft, logits, target, random, position):
    """Whatever was drafted is believed."""
    judge = accepting_everything if draft.tree else verify
    return judge(draft, logits, target, random, position)


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [
        ("stochastic", careless),
        ("deterministic", Typical()),
    ],
    ids=["believes every draft", "typical acceptance"],
)
def test_a_biased_verifier_is_caught(
    sampler: Sampler, drafters: dict[str, Drafter], kind: str, verifier: Verifier
) -> None:
    sample, _ = sampler.draw(drafters[kind], first=20_000, verifier=verifier)
    assert pvalue(sampler.plain, sample) <= 0.002


# -- the same with many seeds, for what is hard to see


@pytest.fixture(scope="module")
def large(quickstart_build: Path) -> Iterator[Sampler]:
    made = Sampler(quickstart_build / "engine", 1000, PROMPTS)
    yield made
    made.engine.close()


@pytest.mark.long
def test_two_plain_samples_of_other_seeds_pass(large: Sampler) -> None:
    again, _ = large.draw(None, first=30_000)
    assert again != large.plain
    assert pvalue(large.plain, again) > 0.01


@pytest.mark.long
def test_a_verifier_that_forgets_the_residual_is_caught(large: Sampler, drafters: dict[str, Drafter]) -> None:
    sample, _ = large.draw(drafters["stochastic"], first=40_000, verifier=from_p_after_rejection)
    assert pvalue(large.plain, sample) <= 0.002


# -- every mechanism as it is built, many seeds


@pytest.mark.long
@pytest.mark.parametrize("method", MECHANISMS)
def test_every_mechanism_leaves_the_distribution_as_it_is(tmp_path: Path, method: str) -> None:
    if why := missing(method):
        pytest.skip(why)
    engine = build_engine(method, tmp_path)
    prompts = (*PROMPTS, "import os\nimport sys\nimport", "To make bread you need flour, water and")
    sampler = Sampler(engine, 1500, prompts, tokens=8)
    info = sampler.engine.info
    drafter = open_drafter(info.speculation, engine=engine, slots=info.spec.max_batch, target=sampler.engine)
    try:
        sample, completions = sampler.draw(
            drafter, first=100_000, draft_length=info.speculation["draft_length"]
        )
    finally:
        drafter.close()
        sampler.engine.close()
    steps = [step for completion in completions for step in completion.steps]
    assert sum(step.accepted for step in steps) > 100
    assert pvalue(sampler.plain, sample) > 0.01
