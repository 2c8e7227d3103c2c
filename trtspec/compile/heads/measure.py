"""What a head is worth, measured where it will run: on text that the compiled target writes itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtspec.engines.base import SlotLogits, SlotStep
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.events import Emit, Note, Progress

_WRITTEN = 48  # tokens after each prompt, where the context has room for them
_LONGEST_PROMPT = 64  # tokens of it that are read, its last ones


@dataclass(frozen=True, slots=True)
class OwnText:
    """What the target wrote greedily after one prompt, its stop token included.

    tokens: int64 [T]. hidden: float32 [T, taps · H], the captured states that each of them was predicted from.
    """

    tokens: npt.NDArray[np.int64]
    hidden: npt.NDArray[np.float32]


def own_texts(engine: Path, prompts: Sequence[Sequence[int]], emit: Emit) -> list[OwnText]:
    """A text for each prompt, which keeps its last tokens where it is long."""
    runner = OnnxRuntimeEngine(engine)
    spec = runner.spec
    written = min(_WRITTEN, spec.max_seq_len // 2)
    longest = min(_LONGEST_PROMPT, spec.max_rows, spec.max_seq_len - written)
    texts: list[OwnText] = []
    for first in range(0, len(prompts), spec.max_batch):
        emit(Progress("compile", "text to measure the head on", first, len(prompts), "prompt"))
        group = [np.array(prompt[-longest:], np.int64) for prompt in prompts[first : first + spec.max_batch]]
        texts += _write(runner, group, written)
    runner.close()
    return texts


def _write(runner: OnnxRuntimeEngine, prompts: Sequence[npt.NDArray[np.int64]], count: int) -> list[OwnText]:
    """The next `count` tokens of each prompt, as far as they belong to the text."""
    starts = [0] * len(prompts)
    rows = list(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    hidden: list[list[np.ndarray]] = [[] for _ in prompts]

    def take(slot: int, output: SlotLogits) -> None:
        likeliest = int(output.logits[-1, : runner.spec.tokenizer_vocab_size].argmax())
        tokens[slot].append(likeliest)
        hidden[slot].append(output.hidden[-1].copy())
        starts[slot] += len(rows[slot])
        rows[slot] = np.array([likeliest], np.int64)

    for _ in range(count):
        steps = [
            SlotStep(i, start, new, logits_from=len(new) - 1)
            for i, (start, new) in enumerate(zip(starts, rows))
        ]
        for slot, output in enumerate(runner.forward(steps)):
            take(slot, output)
    return [
        OwnText(np.array(written[:end], np.int64), np.stack(states[:end]))
        for written, states in zip(tokens, hidden, strict=True)
        for end in [_end(written, runner.info.stop_token_ids)]
    ]


def _end(tokens: Sequence[int], stops: Sequence[int]) -> int:
    """Tokens up to the first stop token and with it."""
    return next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))


def rank_hits(
    judged: Sequence[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]], heads: int
) -> list[list[float]]:
    """hits[head][rank]: how often that candidate of that head was the token it stands for (see rank_tree.py).

    judged: (head, candidates int64 [n, K], the tokens they stand for, int64 [n]). Hits fall with the rank: where
    little text makes one rise, the lower rank's is taken.
    """
    right = np.zeros((heads, judged[0][1].shape[1]))
    count = np.zeros(heads)
    for head, candidates, truth in judged:
        right[head] += (candidates == truth[:, None]).sum(axis=0)
        count[head] += len(truth)
    hits = right / np.maximum(count, 1)[:, None]
    return np.minimum.accumulate(hits, axis=1).round(4).tolist()


def say_hits(hits: Sequence[Sequence[float]], texts: Sequence[OwnText], emit: Emit) -> None:
    """Tell the reader how good the heads are; a head whose every candidate is wrong is worth a warning."""
    first = ", ".join(f"{ranks[0]:.0%}" for ranks in hits)
    tokens = sum(len(text.tokens) for text in texts)
    text = f"first candidates right, by head: {first} (of {tokens} tokens the target wrote)"
    useless = not any(ranks[0] for ranks in hits)
    emit(Note("compile", text, "warning" if useless else "info"))
