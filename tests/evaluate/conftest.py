"""A target that needs no model: it answers with a fixed token sequence and pretends to accept drafts."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trtspec.evaluate.data import Prompt
from trtspec.evaluate.record import RequestRecord, TargetFacts
from trtspec.evaluate.targets import Answer, Message
from trtspec.values import Completion, SamplingParams, StepRecord

VOCAB = 1000


def token_sequence(messages: Sequence[Message], length: int) -> tuple[int, ...]:
    """The model's greedy answer: a pure function of the conversation."""
    key = repr([(m.role, m.content) for m in messages]).encode()
    digest = hashlib.sha256(key).digest()
    return tuple(
        int(x) for x in np.random.default_rng(int.from_bytes(digest[:8], "big")).integers(0, VOCAB, length)
    )


class FakeTarget:
    """Emits `token_sequence`, accepting as many drafts per step as `accepted` says, in turn. Keeps its calls.

    wrong: {question text: position} where another token is emitted. refuses: texts whose requests fail.
    """

    def __init__(
        self,
        *,
        accepted: Sequence[int] = (),
        drafted: int = 3,
        exact: bool = True,
        seconds_per_step: float = 0.0,
        wrong: dict[str, int] | None = None,
        refuses: Sequence[str] = (),
        logits: np.ndarray | None = None,
        seed_identical: bool = True,
    ) -> None:
        plain = not accepted
        self.facts = TargetFacts(
            transport="in process",
            model="fake",
            method="none" if plain else "ngram",
            draft_length=0 if plain else drafted,
            backend="fake",
            device="cpu",
            exact=exact,
            seed_identical=seed_identical,
        )
        self._accepted, self._drafted = tuple(accepted) or (0,), 0 if plain else drafted
        self._seconds, self._wrong, self._refuses, self._logits = (
            seconds_per_step,
            wrong or {},
            refuses,
            logits,
        )
        self.calls: list[tuple[str, tuple[Message, ...], SamplingParams]] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()

    def chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        with self._lock:
            self.calls.append((request_id, tuple(messages), sampling))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return self._answer(request_id, messages, sampling)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _answer(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        text = messages[-1].content
        if text in self._refuses:
            raise ValueError(f"{text!r} does not fit")
        tokens = list(token_sequence(messages, sampling.max_tokens or 8))
        if text in self._wrong:
            tokens[self._wrong[text]] = (tokens[self._wrong[text]] + 1) % VOCAB
        begin = time.perf_counter()
        steps, done = [], 1
        while done < len(tokens):
            if self._seconds:
                time.sleep(self._seconds)
            accepted = min(self._accepted[len(steps) % len(self._accepted)], len(tokens) - done)
            emitted = min(accepted + 1, len(tokens) - done)
            done += emitted
            steps.append(StepRecord(self._drafted, accepted, emitted, time.perf_counter() - begin))
        prompt = tuple(len(m.content) for m in messages)
        return Answer(
            Completion(
                request_id=request_id,
                prompt_tokens=len(prompt),
                token_ids=tuple(tokens),
                text=" ".join(map(str, tokens)),
                finish_reason="length",
                stop_reason=None,
                steps=tuple(steps),
                ttft_s=1e-6,
                total_s=time.perf_counter() - begin,
                seed=sampling.seed or 0,
            ),
            prompt,
        )

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> np.ndarray | None:
        return self._logits

    def close(self) -> None:
        pass


def request(
    steps: Sequence[tuple[int, int, int]],
    *,
    question_id: str = "q",
    category: str = "coding",
    turn: int = 0,
    arm: str = "speculative",
    block: int = 0,
    ttft_s: float = 0.1,
    step_s: float = 0.02,
    start_s: float = 0.0,
) -> RequestRecord:
    """A finished request from (drafted, accepted, emitted) per step, each step `step_s` long."""
    records = tuple(StepRecord(d, a, e, ttft_s + step_s * (i + 1)) for i, (d, a, e) in enumerate(steps))
    tokens = 1 + sum(e for _, _, e in steps)
    return RequestRecord(
        arm=arm,
        question_id=question_id,
        category=category,
        turn=turn,
        block=block,
        prompt_tokens=10,
        prompt_sha256="00",
        token_ids=tuple(range(tokens)),
        text="text",
        finish_reason="length",
        stop_reason=None,
        seed=1,
        start_s=start_s,
        ttft_s=ttft_s,
        total_s=ttft_s + step_s * len(steps),
        steps=records,
    )


@pytest.fixture
def prompts() -> tuple[Prompt, ...]:
    """Three categories, six prompts, one with two turns."""
    rows = [
        Prompt(f"q{i}", category, (f"{category} question {i}",))
        for i, category in enumerate(["coding", "coding", "math", "math", "writing"])
    ]
    return (*rows, Prompt("q5", "writing", ("first part", "second part"), multiturn=True))


@pytest.fixture(scope="session")
def spec_bench(shared: Path) -> Path:
    return shared / "data" / "spec_bench.jsonl"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    names = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    config = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
