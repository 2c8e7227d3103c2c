"""What a draft learns from: the target's own answers, and what else it had in mind at every token of them.

The served engine itself answers, many prompts at once, through the decode loop. Its verifier sees the logits of
every position it decides, so the teacher's distribution costs no second pass, and it is that of the engine as
quantized. Answers are kept in shards on disk: an interrupted run goes on with the next shard.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.drafters.base import Draft
from trtspec.engines.base import Engine
from trtspec.errors import StageFailed
from trtspec.events import Emit, Progress, silent
from trtspec.quantize.corpora import read_records
from trtspec.values import Completion, GenerationRequest, SamplingParams
from trtspec.verify.acceptance import Verdict, verify
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.probabilities import TargetDistribution
from trtspec.verify.randomness import PositionRandom

LIKELIEST = 32  # tokens of the teacher's distribution that are kept at each position
_SHARD = 32  # prompts
_ASKING = {
    "code": "What does this code do?\n\n{}",
    "story": "Continue this story.\n\n{}",
    "summary": "Summarize this text in two sentences.\n\n{}",
}
_ASKING_ELSE = "Explain this in your own words.\n\n{}"


@dataclass(frozen=True, slots=True)
class Example:
    """One answer. tokens: int64 [n], prompt and answer. start: index of the answer's first token, m = n − start.

    ids, probabilities: int32 and float32 [m, k], the teacher's k likeliest tokens at each of the answer's positions
    and their probabilities at temperature 1, each row's sum 1.
    """

    tokens: npt.NDArray[np.int64]
    start: int
    ids: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]


def packaged_prompts() -> list[str]:
    """The user turns of the calibration text that comes with trtspec, and questions about its plain texts."""
    prompts = []
    for record in read_records("calibration"):
        if record.messages is None:
            prompts.append(_ASKING.get(record.kind, _ASKING_ELSE).format(record.text))
        else:
            prompts.append(record.messages[0]["content"])
    return list(dict.fromkeys(prompts))


def answer(
    engine: Engine,
    tokenizer: TextTokenizer,
    stop_token_ids: Sequence[int],
    prompts: Sequence[str],
    work: Path,
    *,
    max_tokens: int,
    temperature: float,
    emit: Emit = silent,
) -> list[Example]:
    """The target's answers to `prompts`, in their order; those already in `work` are read from there.

    max_tokens: of an answer. Prompts that leave no room for one are left out. Raises StageFailed when a request
    fails.
    """
    examples: list[Example] = []
    for shard, first in enumerate(range(0, len(prompts), _SHARD)):
        file = work / f"answers-{shard:04d}.npz"
        if not file.is_file():
            emit(Progress("train", "answers of the target", first, len(prompts), "prompt"))
            asked = [_encode(tokenizer, text) for text in prompts[first : first + _SHARD]]
            fitting = [ids for ids in asked if len(ids) + 1 < engine.spec.max_seq_len]
            sampling = {"max_tokens": max_tokens, "temperature": temperature}
            _write(_answers(engine, stop_token_ids, fitting, first, sampling), file)
        examples += _read(file)
    emit(Progress("train", "answers of the target", len(prompts), len(prompts), "prompt"))
    return examples


def _encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    """As a chat turn, where the model knows chats."""
    try:
        return tokenizer.chat([{"role": "user", "content": text}])
    except ValueError:  # no chat template
        return tokenizer.encode(text)


class _Recorder:
    """The lossless verifier, noting the likeliest tokens of every position it decides, by the request's seed."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]] = {}

    def __call__(
        self,
        draft: Draft,
        logits: npt.NDArray[np.floating],
        target: TargetDistribution,
        random: PositionRandom,
        position: int,
    ) -> Verdict:
        verdict = verify(draft, logits, target, random, position)
        rows = (0, *(node + 1 for node in verdict.path))
        self.seen.setdefault(target.sampling.seed, []).extend(
            _likeliest(logits[row, : target.vocab_size]) for row in rows
        )
        return verdict


def _likeliest(logits: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    count = min(LIKELIEST, len(logits))
    ids = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
    ids = np.sort(ids)
    weights = np.exp(logits[ids].astype(np.float64) - logits[ids].max())
    return ids.astype(np.int32), (weights / weights.sum()).astype(np.float32)


def _answers(
    engine: Engine,
    stop_token_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    first: int,
    sampling: dict[str, float],
) -> list[Example]:
    recorder = _Recorder()
    loop = DecodeLoop(engine, stop_token_ids=stop_token_ids, max_queue=len(prompts), verifier=recorder)
    for index, ids in enumerate(prompts):
        seeded = SamplingParams(**sampling, seed=first + index)
        loop.submit(GenerationRequest(str(first + index), tuple(ids), seeded))
    done: dict[str, Completion] = {}
    while loop.has_work:
        result = loop.step()
        if result.failures:
            raise StageFailed(f"the target failed to answer: {result.failures[0].error}")
        done.update((completion.request_id, completion) for completion in result.completions)
    examples = []
    for index, ids in enumerate(prompts):
        answered = done[str(first + index)].token_ids
        seen = recorder.seen[first + index][: len(answered)]
        examples.append(
            Example(
                np.array((*ids, *answered), np.int64),
                len(ids),
                np.stack([ids for ids, _ in seen]),
                np.stack([probabilities for _, probabilities in seen]),
            )
        )
    return examples


def _write(examples: Sequence[Example], file: Path) -> None:
    """In one step: a kill leaves no half shard."""
    arrays: dict[str, npt.NDArray] = {"count": np.array(len(examples))}
    for index, example in enumerate(examples):
        for name in ("tokens", "start", "ids", "probabilities"):
            arrays[f"{name}.{index}"] = np.asarray(getattr(example, name))
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    os.replace(partial, file)


def _read(file: Path) -> list[Example]:
    with np.load(file, allow_pickle=False) as stored:
        return [
            Example(
                stored[f"tokens.{i}"],
                int(stored[f"start.{i}"]),
                stored[f"ids.{i}"],
                stored[f"probabilities.{i}"],
            )
            for i in range(int(stored["count"]))
        ]
