"""What a head is worth, measured where it will run: on text that the compiled target writes itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtspec.drafters.head_engine import read_info, write_info
from trtspec.drafters.hydra import open_heads
from trtspec.drafters.medusa import open_candidates
from trtspec.engines.base import SlotLogits, SlotStep
from trtspec.engines.opening import open_engine
from trtspec.events import Emit, Note, Progress, silent

if TYPE_CHECKING:
    from trtspec.engines.onnxruntime import OnnxRuntimeEngine
    from trtspec.engines.tensorrt import TensorRtEngine

# A head, candidates int64 [n, K] of it, and the tokens that they stand for, int64 [n].
Judged = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]

_WRITTEN = 48  # tokens after each prompt, where the context has room for them
_LONGEST_PROMPT = 64  # tokens of it that are read, its last ones


@dataclass(frozen=True, slots=True)
class OwnText:
    """What the target wrote greedily after one prompt, its stop token included.

    tokens: int64 [T]. hidden: float32 [T, taps · H], the captured states that each of them was predicted from.
    """

    tokens: npt.NDArray[np.int64]
    hidden: npt.NDArray[np.float32]


def measure_head(method: str, engine: Path, prompts: Sequence[Sequence[int]], emit: Emit = silent) -> None:
    """Add `hits` (see `rank_hits`) to head.json of an engine folder that can run, with one of TOKEN_HEADS in it.

    prompts: token ids that the target goes on from; few and short will do.
    """
    info = read_info(engine, method)
    texts = own_texts(engine, prompts, emit)
    judge = {"medusa": _judge_medusa, "hydra": _judge_hydra}[method]
    hits = rank_hits(list(judge(engine, info, texts)), info["heads"])
    write_info(engine, {**info, "hits": hits})
    say_hits(hits, texts, emit)


def _judge_medusa(engine: Path, info: Mapping[str, Any], texts: Sequence[OwnText]) -> Iterator[Judged]:
    candidates = open_candidates(engine, info)
    for text in texts:
        ranked = candidates(text.hidden)
        for index in range(info["heads"]):
            truth = text.tokens[index + 1 :]
            yield index, ranked[: len(truth), index], truth


def _judge_hydra(engine: Path, info: Mapping[str, Any], texts: Sequence[OwnText]) -> Iterator[Judged]:
    for index, ranked in enumerate(open_heads(engine, info)):
        for text in texts:
            # Of a token that stands t tokens behind its state, the t before it were drafted right.
            count = len(text.tokens) - index - 1
            if count > 0:
                path = np.stack([text.tokens[i : i + count] for i in range(index + 1)], axis=1)
                yield index, ranked(text.hidden[:count], path), text.tokens[index + 1 :]


def own_texts(engine: Path, prompts: Sequence[Sequence[int]], emit: Emit) -> list[OwnText]:
    """A text for each prompt, which keeps its last tokens where it is long."""
    runner = open_engine(engine)
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


def _write(
    runner: OnnxRuntimeEngine | TensorRtEngine, prompts: Sequence[npt.NDArray[np.int64]], count: int
) -> list[OwnText]:
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


def rank_hits(judged: Sequence[Judged], heads: int) -> list[list[float]]:
    """hits[head][rank]: how often that candidate of that head was the token it stands for (see rank_tree.py).

    Hits fall with the rank: where little text makes one rise, the lower rank's is taken.
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
