"""What the target writes to learn from: the same texts whatever interrupts it, no prompt twice, and enough of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import PROMPTS, TEMPLATE
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.info import EngineInfo
from trtspec.engines.onnxruntime import OnnxRuntimeEngine
from trtspec.errors import PlanInfeasible
from trtspec.events import Event, Progress
from trtspec.train import responses
from trtspec.train.prompts import TrainingPrompt, begun_turn, follow_up, opening_of
from trtspec.train.responses import ResponseSettings, Teacher, collect
from trtspec.train.texts import Text, TextLog, Written, read_texts, write_texts
from trtspec.train.vocabulary import coverage, frequencies, frequent_tokens, offsets

GREEDY = ResponseSettings(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def teacher(engine: Path) -> Iterator[Teacher]:
    opened = OnnxRuntimeEngine(engine, threads=1)
    yield Teacher(opened, TextTokenizer.load(engine), EngineInfo.read(engine).stop_token_ids)
    opened.close()


@pytest.fixture
def chatting(teacher: Teacher, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Teacher:
    """The teacher with a chat template, which makes up 16 prompts at a time."""
    for file in engine.iterdir():
        if file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    monkeypatch.setattr(responses, "_ROUND", 16)
    monkeypatch.setattr(responses, "_SHORTEST_PROMPT", 1)
    # a random model hardly ever ends a turn by itself
    return Teacher(teacher.engine, TextTokenizer.load(tmp_path), tuple(range(60, 110)))


def tokens_of(pairs: list) -> list[list[int]]:
    return [text.tokens.tolist() for _, text in pairs]


@pytest.mark.model
def test_a_response_depends_on_nothing_but_its_prompt_and_number(teacher: Teacher, tmp_path: Path) -> None:
    """A kill between any two responses, and in the middle of writing one, changes no text."""
    (tmp_path / "whole").mkdir(), (tmp_path / "killed").mkdir()
    sampled = ResponseSettings(max_tokens=12, temperature=1.0)
    whole = tokens_of(collect(teacher, PROMPTS, sampled, tmp_path / "whole"))
    assert len(whole) == len(PROMPTS)

    def kill(event: Event) -> None:
        if isinstance(event, Progress) and event.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(teacher, PROMPTS, sampled, tmp_path / "killed", kill)
    log = tmp_path / "killed" / "responses-0000.bin"
    log.write_bytes(log.read_bytes()[:-5])
    assert tokens_of(collect(teacher, PROMPTS, sampled, tmp_path / "killed")) == whole


@pytest.mark.model
def test_the_first_prompts_that_are_enough_are_taken_whatever_finished_first(
    teacher: Teacher, tmp_path: Path
) -> None:
    (tmp_path / "all").mkdir(), (tmp_path / "some").mkdir()
    everything = collect(teacher, PROMPTS, GREEDY, tmp_path / "all")
    some = collect(teacher, PROMPTS, ResponseSettings(12, 0.0, tokens=50), tmp_path / "some")
    assert tokens_of(some) == tokens_of(everything)[: len(some)]
    sizes = [len(text.tokens) - text.start for _, text in some]
    assert sum(sizes) >= 50 > sum(sizes[:-1])
    more = collect(teacher, PROMPTS, ResponseSettings(12, 0.0, tokens=100), tmp_path / "some")
    assert tokens_of(more)[: len(some)] == tokens_of(some), "more tokens go on from fewer"


@pytest.mark.model
def test_the_target_makes_up_prompts_until_there_is_enough(chatting: Teacher, tmp_path: Path) -> None:
    settings = ResponseSettings(max_tokens=12, temperature=0.0, tokens=150, invent=True)
    pairs = collect(chatting, PROMPTS[:2], settings, tmp_path)
    assert [prompt for prompt, _ in pairs[:2]] == list(PROMPTS[:2]), "the given ones come first"
    assert sum(len(text.tokens) - text.start for _, text in pairs) >= 150
    texts = [prompt.text for prompt, _ in pairs]
    assert len(set(texts)) == len(texts)
    kinds = {prompt.kind for prompt, _ in pairs[2:]}
    assert "free" in kinds and "coding" in kinds
    for prompt, text in pairs[2:]:
        shown = chatting.tokenizer.decode(text.tokens[: text.start].tolist())
        assert prompt.text in shown


@pytest.mark.model
def test_every_other_answer_is_followed_by_a_task_about_it(chatting: Teacher, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir(), (tmp_path / "killed").mkdir()
    settings = ResponseSettings(max_tokens=12, temperature=0.0, tokens=600, invent=True, follow_up=True)
    pairs = collect(chatting, PROMPTS[:12], settings, tmp_path / "whole")
    given = [prompt for prompt, _ in pairs if prompt in PROMPTS]
    assert [prompt for prompt, _ in pairs[: len(given)]] == given, "the given ones come first"
    tasks = [(prompt, text) for prompt, text in pairs if prompt.root is not None]
    roots = {prompt.text for prompt in PROMPTS} & {prompt.root for prompt, _ in tasks}
    assert len(roots) > 2 and roots <= {prompt.text for prompt in given[::2]}
    assert {"summarization", "rag", "next turn", "multilingual"} <= {prompt.kind for prompt, _ in tasks}
    answers = {
        prompt.text: chatting.tokenizer.decode(
            [t for t in text.tokens[text.start :].tolist() if t not in chatting.stop_token_ids]
        )
        for prompt, text in pairs
        if prompt.root is None
    }
    for prompt, text in tasks:
        told = (*prompt.earlier, prompt.text)
        assert any(prompt.root in part or answers[prompt.root] in part for part in told)
        assert bool(prompt.earlier) == (prompt.kind == "next turn")
        shown = chatting.tokenizer.decode(text.tokens[: text.start].tolist())
        assert all(part in shown for part in told)

    def kill(event: Event) -> None:
        if (tmp_path / "killed" / "follow-up-0000.bin").exists() and event.done > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(chatting, PROMPTS[:12], settings, tmp_path / "killed", kill)
    assert tokens_of(collect(chatting, PROMPTS[:12], settings, tmp_path / "killed")) == tokens_of(pairs)


def test_tasks_about_code_ask_for_code() -> None:
    asked = TrainingPrompt("Write a loop.", "coding")
    code = "```python\nfor i in range(3): ...\n```"
    tasks = [follow_up(asked, code, "a passage", number) for number in range(6)]
    assert all("code" in task.text for task in tasks)
    assert len({task.text for task in tasks}) == 3
    plain = [follow_up(asked, "An answer.", "a passage", number) for number in range(240)]
    assert {task.kind for task in plain} >= {"summarization", "rag", "writing", "multilingual", "next turn"}
    assert sum("请用中文回答" in task.text for task in plain) > 2, "every language gets its turn"


def test_an_unfinished_turn_is_what_all_of_its_continuations_share(chatting: Teacher) -> None:
    free, opened = begun_turn(chatting.tokenizer, ""), begun_turn(chatting.tokenizer, "Write an email to")
    assert chatting.tokenizer.decode(free) == "[user]"
    assert chatting.tokenizer.decode(opened) == "[user]Write an email to"
    assert [opening_of(n)[0] for n in range(4)] == ["coding", "free", "coding", "free"]


@pytest.mark.model
def test_a_model_without_chats_makes_up_nothing(teacher: Teacher, tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible, match="cannot make up prompts"):
        collect(teacher, [], ResponseSettings(12, 0.0, tokens=50, invent=True), tmp_path)


def test_a_log_ends_at_its_last_whole_record(tmp_path: Path) -> None:
    log = TextLog(tmp_path / "log")
    for number in range(3):
        log.add(Written(number, np.arange(5 + number, dtype=np.uint32), 2, number == 1))
    log.close()
    data = (tmp_path / "log").read_bytes()
    for damaged in (data[:-1], data[:-30], data[:-1] + b"\xff"):
        (tmp_path / "log").write_bytes(damaged)
        again = TextLog(tmp_path / "log")
        assert sorted(again.found) == [0, 1]
        assert again.found[1].ended and again.found[1].response.tolist() == [2, 3, 4, 5]
        again.add(Written(2, np.arange(7, dtype=np.uint32), 2, False))
        again.close()
        assert (tmp_path / "log").read_bytes() == data


def test_texts_come_back_as_they_were_stored(tmp_path: Path) -> None:
    texts = [Text(np.array(ids, np.uint32), start, kind) for ids, start, kind in
             (([1, 2, 3], 1, "coding"), ([70000], 0, ""), ([5, 6], 2, "qa"))]  # fmt: skip
    write_texts(texts, tmp_path / "texts.npz")
    for text, again in zip(texts, read_texts(tmp_path / "texts.npz"), strict=True):
        assert again.tokens.tolist() == text.tokens.tolist()
        assert (again.start, again.kind) == (text.start, text.kind)


def test_the_draft_vocabulary_is_what_the_responses_hold() -> None:
    """Prompts are not counted: the head never drafts them."""
    texts = [Text(np.array([9, 9, 9, 4, 4, 2], np.uint32), 3), Text(np.array([9, 7, 4], np.uint32), 1)]
    counts = frequencies(texts, 12)
    assert counts[[2, 4, 7, 9]].tolist() == [1, 3, 1, 0]
    ids = frequent_tokens(counts, 4)
    assert ids.tolist() == [0, 2, 4, 7], "ascending; unseen tokens by their number"
    d2t = offsets(ids)
    assert (np.arange(4) + d2t).tolist() == ids.tolist()
    assert coverage(ids[2:], counts) == pytest.approx(4 / 5)
