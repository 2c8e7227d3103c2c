"""What the target answers, written by the served engine itself, many prompts at once, and kept as it comes.

Each response depends on its prompt, the settings and its number alone, and is on disk from the moment it is
finished: an interrupted run goes on where it was and ends with the same texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.base import Engine
from trtspec.errors import PlanInfeasible, StageFailed
from trtspec.events import Emit, Progress, silent
from trtspec.train.prompts import TrainingPrompt, begun_turn, follow_up, made_up, opening_of, prompt_ids
from trtspec.train.texts import Text, TextLog, Written, read_log
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop

_ROUND = 512  # prompts the target makes up at a time
_INVENTION = SamplingParams(max_tokens=160, temperature=1.0, top_p=0.95)
_SHORTEST_PROMPT = 8  # characters
_FEWEST = 2  # tokens of a response: one is predicted by the target's own step


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target as it is served: engine, tokenizer, and the ids that end its text."""

    engine: Engine
    tokenizer: TextTokenizer
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """max_tokens: of one response. temperature: it is sampled at. tokens: response tokens in all, None to answer
    each given prompt once. invent: the target makes up further prompts itself until there are `tokens`. follow_up:
    every round of prompts is followed by tasks about half of its answers.
    """

    max_tokens: int
    temperature: float
    tokens: int | None = None
    invent: bool = False
    follow_up: bool = False


def collect(
    teacher: Teacher,
    prompts: Sequence[TrainingPrompt],
    settings: ResponseSettings,
    work: Path,
    emit: Emit = silent,
) -> list[tuple[TrainingPrompt, Text]]:
    """Prompts with the target's responses, the given prompts first, no prompt twice.

    Data flow of a round: prompts (given, or `prompts-N.bin`) → their answers (`responses-N.bin`) → tasks about these
    → `follow-up-N.bin`.

    work: folder of this target, these prompts and settings alone; what is there already is not made again. Prompts
    that leave no room for a response are left out. Raises PlanInfeasible where the target cannot make up prompts,
    StageFailed when a request fails.
    """
    counter = _Counter(settings.tokens, emit)
    sampling = SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature)
    pairs: list[tuple[TrainingPrompt, Text]] = []
    known: set[tuple[str, ...]] = set()

    def answer(prompts: Sequence[TrainingPrompt], file: str) -> list[tuple[TrainingPrompt, Text]]:
        fresh = [p for key, p in {prompt.key: prompt for prompt in prompts}.items() if key not in known]
        known.update(prompt.key for prompt in fresh)
        ids = [prompt_ids(teacher.tokenizer, prompt) for prompt in fresh]
        found = [
            (fresh[written.number], Text(written.tokens, written.start, fresh[written.number].kind))
            for written in _write(teacher, ids, sampling, work / file, counter)
            if len(written.response) >= _FEWEST
        ]
        pairs.extend(found)
        return found

    for index, asked in enumerate(_rounds(teacher, prompts, settings, work, emit)):
        before = len(known)
        answered = answer(asked, f"responses-{index:04d}.bin")
        if len(known) == before:
            raise StageFailed(
                f"the target makes up no new prompts, after {len(known)}",
                where="training.data",
                hint="name prompts of your own in training.data, or lower training.tokens",
            )
        if settings.follow_up and not counter.reached():
            answer(_follow_ups(teacher, answered), f"follow-up-{index:04d}.bin")
        if counter.reached():
            break
    return pairs


def response_tokens(work: Path) -> int:
    """Tokens of all responses that `collect` has stored in folder `work`, those it did not need among them."""
    files = (file for kind in ("responses", "follow-up") for file in work.glob(f"{kind}-*.bin"))
    return sum(len(written.response) for file in files for written in read_log(file))


def _follow_ups(teacher: Teacher, answered: Sequence[tuple[TrainingPrompt, Text]]) -> list[TrainingPrompt]:
    """A task about every other answer; the passage beside it is the one before."""
    stops = set(teacher.stop_token_ids)
    answers = [
        teacher.tokenizer.decode(
            [token for token in text.tokens[text.start :].tolist() if token not in stops]
        )
        for _, text in answered
    ]
    return [
        follow_up(answered[i][0], answers[i], answers[i - 1], number)
        for number, i in enumerate(range(0, len(answered), 2))
    ]


def _rounds(
    teacher: Teacher,
    prompts: Sequence[TrainingPrompt],
    settings: ResponseSettings,
    work: Path,
    emit: Emit,
) -> Iterator[list[TrainingPrompt]]:
    """The given prompts, then as many rounds of made-up ones as are asked for."""
    if prompts:
        yield list(prompts)
    if not settings.invent:
        return
    try:
        start = begun_turn(teacher.tokenizer, "")
    except ValueError as error:
        raise PlanInfeasible(
            f"the target cannot make up prompts: {error}",
            where="training.data",
            hint="give prompts of your own in training.data, without self",
        ) from None
    index = 0
    while True:
        openings = [opening_of(index * _ROUND + i) for i in range(_ROUND)]
        ids = [begun_turn(teacher.tokenizer, opening) for _, opening in openings]
        file = work / f"prompts-{index:04d}.bin"
        counter = _Counter(None, emit, "prompts of the target")
        invented = [
            made_up(teacher.tokenizer, start, list(written.tokens), openings[written.number][0])
            for written in _write(teacher, ids, _INVENTION, file, counter, first=index * _ROUND)
            if written.ended
        ]
        yield [prompt for prompt in invented if len(prompt.text) >= _SHORTEST_PROMPT]
        index += 1


class _Counter:
    """Response tokens of the rounds so far, and whether they are enough."""

    def __init__(self, wanted: int | None, emit: Emit, task: str = "responses of the target") -> None:
        self._wanted, self._emit, self._task = wanted, emit, task
        self.tokens = 0

    def reached(self, more: int = 0) -> bool:
        """Whether the tokens so far and `more` are enough."""
        return self._wanted is not None and self.tokens + more >= self._wanted

    def show(self, tokens: int, done: int, prompts: int) -> None:
        """tokens: finished in this round. done: of its prompts."""
        if self._wanted is None:
            self._emit(Progress("train", self._task, done, prompts, "prompt"))
        else:
            self._emit(
                Progress("train", self._task, min(self.tokens + tokens, self._wanted), self._wanted, "token")
            )


def _write(
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    file: Path,
    counter: _Counter,
    *,
    first: int = 0,
) -> list[Written]:
    """What the target writes after each prompt that leaves it room, in order, up to the one that makes it enough.

    first: number of the first prompt, which seeds its sampling.
    """
    log = TextLog(file)
    try:
        _generate(teacher, prompts, sampling, log, counter, first)
    finally:
        log.close()
    kept = []
    for number in sorted(log.found):
        if counter.reached():
            break
        kept.append(log.found[number])
        counter.tokens += len(log.found[number].response)
    return kept


def _generate(
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    log: TextLog,
    counter: _Counter,
    first: int,
) -> None:
    limit = teacher.engine.spec.max_seq_len
    fitting = [number for number, ids in enumerate(prompts) if len(ids) + 1 < limit]
    loop = DecodeLoop(
        teacher.engine, stop_token_ids=teacher.stop_token_ids, max_queue=teacher.engine.spec.max_batch
    )
    waiting = [number for number in reversed(fitting) if number not in log.found]
    tokens = sum(len(written.response) for written in log.found.values())
    counter.show(tokens, len(log.found), len(fitting))
    # All of fitting[:gap] is written, with `settled` tokens of response; what lies behind may turn out not to count.
    gap = settled = 0
    while waiting or loop.has_work:
        while gap < len(fitting) and (written := log.found.get(fitting[gap])) is not None:
            settled += len(written.response)
            gap += 1
        if counter.reached(settled):
            break
        while waiting and loop.active + loop.waiting < 2 * loop.slots:
            number = waiting.pop()
            loop.submit(_request(number, prompts[number], sampling, first + number))
        result = loop.step()
        if result.failures:
            raise StageFailed(f"the target failed to answer: {result.failures[0].error}")
        for completion in result.completions:
            number = int(completion.request_id)
            ids = np.array((*prompts[number], *completion.token_ids), np.uint32)
            log.add(Written(number, ids, len(prompts[number]), completion.finish_reason == "stop"))
            tokens += len(completion.token_ids)
            counter.show(tokens, len(log.found), len(fitting))


def _request(number: int, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> GenerationRequest:
    return GenerationRequest(str(number), tuple(prompt), replace(sampling, seed=seed))
