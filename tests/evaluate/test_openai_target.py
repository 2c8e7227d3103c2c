"""Any OpenAI-compatible server is measured in tokens, and every way it tells its acceptance gives the same numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluate.conftest import FakeTarget
from tests.evaluate.openai_stub import OpenAIStub, Step
from tests.serve.openai.fake_upstream import MODEL, FakeUpstream
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.evaluate.data import Prompt, PromptSet
from trtspec.evaluate.lossless import compare
from trtspec.evaluate.openai_target import BODY, CHUNKS, COUNTERS, OpenAIChat
from trtspec.evaluate.record import RunRecord, RunSettings, TargetFacts
from trtspec.evaluate.report import render_html
from trtspec.evaluate.run import EvalRequest, evaluate
from trtspec.evaluate.served_steps import (
    Acceptance,
    Counters,
    build_steps,
    from_answer,
    from_chunks,
    from_counters,
    read_counters,
)
from trtspec.evaluate.targets import Message
from trtspec.events import silent
from trtspec.serve.client import RequestFailed
from trtspec.serve.openai.front import FrontOptions, OpenAIFront
from trtspec.values import SamplingParams

STEPS: list[Step] = [(3, 2), (3, 0), (3, 3), (3, 2), (3, 0), (3, 1)]
ASK = [Message("user", "hello")]
SAMPLING = SamplingParams(max_tokens=64, seed=5)


@pytest.fixture
def servers() -> Iterator[list[OpenAIStub]]:
    running: list[OpenAIStub] = []
    yield running
    for stub in running:
        stub.close()


@pytest.fixture
def connect(servers: list[OpenAIStub], tokenizer_folder: Path):
    def connect(
        steps: Sequence[Step] = STEPS, *, draft_length: int | None = None, alone: bool = True, **stub: object
    ) -> tuple[OpenAIChat, OpenAIStub]:
        servers.append(OpenAIStub(steps, **stub))
        facts = TargetFacts("openai http", "toy", "unknown", draft_length)
        tokenizer = TextTokenizer.load(tokenizer_folder)
        return OpenAIChat(servers[-1].url, "toy", tokenizer, facts, alone=alone), servers[-1]

    return connect


def drafts(answer) -> list[tuple[int, int, int]]:
    return [(s.drafted, s.accepted, s.emitted) for s in answer.completion.steps]


@pytest.mark.parametrize(
    ("reports", "source"),
    [
        *((told, BODY) for told in ("histogram", "steps", "choice", "sglang")),
        ("counters", COUNTERS),
        (None, CHUNKS),
    ],
)
def test_every_source_gives_the_same_steps(connect, reports: str | None, source: str) -> None:
    target, stub = connect(reports=reports, draft_length=3)
    answer = target.chat("r", ASK, SAMPLING)
    assert drafts(answer) == [(d, a, a + 1) for d, a in STEPS], "in their order: chunks show it"
    done = answer.completion
    assert (done.text, len(done.token_ids), done.prompt_tokens) == (stub.text, stub.tokens, 17)
    assert target.facts.acceptance_source == source and target.facts.token_ids == "from text"
    times = [done.ttft_s, *(step.at_s for step in done.steps), done.total_s]
    assert times == sorted(times) and times[0] > 0
    target.close()
    target.close()


def test_the_request_asks_for_what_it_measures(connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_API_KEY", "letmein")
    target, stub = connect(reports="histogram")
    target.chat("r", [Message("system", "s"), *ASK], replace(SAMPLING, temperature=0.5, ignore_eos=True))
    target.chat("r", ASK, SAMPLING)
    assert stub.asked[0] == {
        "model": "toy",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 64,
        "seed": 5,
        "ignore_eos": True,
    }
    assert "ignore_eos" not in stub.asked[1], "servers refuse what they do not know"
    assert stub.headers[0]["Authorization"] == "Bearer letmein"
    calm = OpenAIChat(
        stub.url, "toy", target._tokenizer, target.facts, alone=True, template_args={"enable_thinking": False}
    )
    calm.chat("r", ASK, SAMPLING)
    assert stub.asked[2] == {**stub.asked[1], "chat_template_kwargs": {"enable_thinking": False}}


def test_tokens_are_counted_in_text_not_in_chunks(connect) -> None:
    """Two steps an event, and no count from the server: the tokenizer still finds every token."""
    target, stub = connect(merge=2, usage=False, draft_length=3)
    done = target.chat("r", ASK, SAMPLING).completion
    assert len(done.token_ids) == stub.tokens
    assert done.prompt_tokens == len("[user]hello")
    assert done.steps == (), "merged chunks say nothing of single steps"
    assert target.facts.acceptance_source.startswith("none:")


def test_chunks_say_nothing_of_acceptance_where_the_draft_length_is_unknown(connect) -> None:
    target, _ = connect()
    assert target.chat("r", ASK, SAMPLING).completion.steps == ()
    assert "--draft-length" in target.facts.acceptance_source


def test_a_stop_id_that_no_text_shows_is_counted_once(connect) -> None:
    target, stub = connect([(3, 2), (3, 1)], reports="steps", ends="stop")
    done = target.chat("r", ASK, SAMPLING).completion
    assert done.finish_reason == "stop"
    assert len(done.token_ids) == stub.tokens + 1 and done.token_ids[-1] == 0


def test_the_source_says_when_acceptance_by_position_is_approximate(connect) -> None:
    """A lookup that found nothing in one step: the histogram counts it among the refusals of position 1."""
    target, _ = connect([(3, 2), (0, 0), (2, 2)], reports="histogram")
    done = target.chat("r", ASK, SAMPLING).completion
    assert sum(s.drafted for s in done.steps) == 5 and sum(s.accepted for s in done.steps) == 4
    assert target.facts.acceptance_source.startswith(f"{BODY} (totals of drafts that vary in length")
    exact, _ = connect([(3, 2), (0, 0), (2, 2)], reports="steps")
    assert drafts(exact.chat("r", ASK, SAMPLING)) == [(3, 2, 3), (0, 0, 1), (2, 2, 3)]
    assert exact.facts.acceptance_source == BODY


def test_thoughts_are_tokens_but_the_next_turn_does_not_quote_them(
    connect, prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """Chat templates of reasoning models leave earlier thoughts out; sent as an answer they would come back in."""
    target, stub = connect(reports="steps", thinks=True)
    asked = EvalRequest("x", target, None, PromptSet("d", prompts[5:], ()), prompts[5:], RunSettings(64))
    one, two = evaluate(asked, tmp_path, silent).requests
    assert (len(one.token_ids), one.text, one.quoted) == (stub.tokens, stub.text, stub.text[1:])
    assert stub.asked[-1]["messages"][1] == {"role": "assistant", "content": stub.text[1:]}
    assert RunRecord.read(tmp_path).requests[1].quoted == two.quoted == stub.text[1:]


def test_the_cache_is_called_warm_where_the_server_says_so(
    connect, prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    for usage, share in ((True, 5 / 17), (False, None)):
        target, _ = connect(reports="steps", usage=usage)
        asked = EvalRequest("x", target, None, PromptSet("d", prompts, ()), prompts, RunSettings(64))
        found = evaluate(asked, tmp_path, silent).summary()["cached_prompt_share"]
        assert found == {"speculative": pytest.approx(share)}


def test_counters_are_left_alone_when_they_are_not_needed(connect) -> None:
    target, stub = connect(reports="histogram")
    for _ in range(3):
        target.chat("r", ASK, SAMPLING)
    assert stub.readings == 1, "one look before the first answer told it all"
    crowd, stub = connect(reports="counters", alone=False, draft_length=3)
    crowd.chat("r", ASK, SAMPLING)
    assert stub.readings == 0 and crowd.facts.acceptance_source == CHUNKS


def test_a_refused_a_broken_and_a_missing_server_fail_the_request(connect) -> None:
    target, stub = connect(reports="histogram")
    stub.refuse = (400, "max_tokens is too large")
    with pytest.raises(RequestFailed, match="max_tokens is too large") as refused:
        target.chat("r", ASK, SAMPLING)
    assert refused.value.code == "400"
    stub.refuse, stub.break_off = None, True
    with pytest.raises(RequestFailed) as broken:
        target.chat("r", ASK, SAMPLING)
    assert broken.value.code == "INCOMPLETE"
    stub.break_off = False
    assert drafts(target.chat("r", ASK, SAMPLING))
    gone = OpenAIChat("http://127.0.0.1:9/v1", "toy", target._tokenizer, target.facts, alone=True)
    with pytest.raises(RequestFailed, match="no answer"):
        gone.chat("r", ASK, SAMPLING)
    with pytest.raises(ConfigError, match="not an http"):
        OpenAIChat("ftp://x", "toy", target._tokenizer, target.facts, alone=True)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_two_sources_agree_in_every_acceptance_number_of_a_run(
    connect, prompts: tuple[Prompt, ...], tmp_path: Path, concurrency: int
) -> None:
    def summary(name: str, reports: str | None) -> dict:
        target, _ = connect(reports=reports, draft_length=3, alone=concurrency == 1)
        settings = RunSettings(64, concurrency=concurrency)
        asked = EvalRequest(name, target, None, PromptSet("here", prompts, ()), prompts, settings)
        return evaluate(asked, tmp_path / name, silent).summary()

    told = [summary("body", "histogram"), summary("counters", "counters"), summary("chunks", None)]
    for key in (
        *("acceptance_length", "draft_acceptance_rate", "conditional_acceptance", "acceptance_histogram"),
        *("requests", "output_tokens"),
    ):
        assert told[0][key] == told[1][key] == told[2][key], key
    assert told[0]["acceptance_length"]["token_weighted"] == pytest.approx(14 / 6)
    assert RunRecord.read(tmp_path / "body").speculative.acceptance_source == BODY


def test_the_output_is_compared_with_a_baseline_by_its_text(
    connect, prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    """The baseline's ids are the model's own, the server's were made from text: `ab` may be one token or two."""

    class Baseline(FakeTarget):
        def __init__(self, text: str) -> None:
            super().__init__()
            self._text = text

        def _answer(self, request_id, messages, sampling):
            found = super()._answer(request_id, messages, replace(sampling, max_tokens=9))
            return replace(
                found, completion=replace(found.completion, text=self._text, prompt_tokens=17), prompt=None
            )

    target, stub = connect(reports="histogram", draft_length=3)

    def check(text: str):
        data = PromptSet("here", prompts, ())
        return evaluate(
            EvalRequest("x", target, Baseline(text), data, prompts, RunSettings(64)), tmp_path, silent
        ).lossless

    assert check(stub.text).mismatches == 0 and check(stub.text).checked == 7
    assert check(stub.text[:-1] + "!").mismatches > 0
    record = RunRecord.read(tmp_path)
    one, other = record.of("speculative")[0], record.of("baseline")[0]
    same = replace(other, text=one.text)
    asked = {"exact": True, "dtype": "float32", "logits": lambda: None}
    assert compare(one, same, **asked, by_text=True) is None
    assert compare(one, same, **asked) is not None


def test_the_command_measures_a_url(connect, tokenizer_folder: Path, tmp_path: Path, capsys) -> None:
    _, stub = connect(reports="histogram")
    command = ["eval", stub.url, "--prompts", "2", "--out", str(tmp_path / "run"), "--json"]
    assert main([*command, "--model", "toy", "--tokenizer", str(tokenizer_folder)]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["acceptance_length"]["token_weighted"] == pytest.approx(14 / 6)
    facts = RunRecord.read(tmp_path / "run").speculative
    assert (facts.transport, facts.model, facts.location) == ("openai http", "toy", stub.url)
    assert "acceptance from response body" in render_html([RunRecord.read(tmp_path / "run")])
    assert main([*command, "--model", "toy"]) == 2
    assert "--tokenizer" in json.loads(capsys.readouterr().out)["error"]["hint"]
    assert main([*command, "--tokenizer", str(tokenizer_folder)]) == 2
    assert "--model" in json.loads(capsys.readouterr().out)["error"]["hint"]


def steps_of(
    found: Acceptance, tokens: int, chunks: Sequence[tuple[float, int]] = ()
) -> list[tuple[int, int, int]]:
    built = build_steps(found, tokens=tokens, chunks=chunks, first_s=0.1, last_s=1.1, seed=3)
    return [(s.drafted, s.accepted, s.emitted) for s in built]


def test_a_histogram_keeps_its_counts_and_shows_no_trend() -> None:
    found = from_answer(
        {
            "metrics": {
                "speculative_decoding": {"acceptance_histogram": [40, 0, 0, 40], "num_draft_tokens": 240}
            }
        }
    )
    steps = steps_of(found, tokens=1 + 40 + 160)
    assert Counter(steps) == {(3, 0, 1): 40, (3, 3, 4): 40}
    assert abs(sum(a for _, a, _ in steps[:40]) - 60) < 24, "neither the good nor the bad ones come first"
    assert steps == steps_of(found, tokens=201), "and the same every time"
    times = [s.at_s for s in build_steps(found, tokens=201, chunks=(), first_s=0.1, last_s=1.1, seed=3)]
    assert times == pytest.approx([0.1 + (i + 1) / 80 for i in range(80)])


def test_shorter_drafts_of_a_histogram_are_shared_out() -> None:
    field = {"acceptance_histogram": [2, 1, 0, 0], "num_draft_tokens": 5}
    found = from_answer({"metrics": {"speculative_decoding": field}})
    assert sorted(zip(found.drafted, found.accepted)) == [(1, 0), (2, 0), (2, 1)]
    assert found.shared_out, "who drafted how much was not said"
    full = from_answer({"metrics": {"speculative_decoding": {**field, "num_draft_tokens": 9}}})
    assert full.drafted == (3, 3, 3) and not full.shared_out
    short = {"spec_correct_drafts_histogram": [2, 1], "spec_num_proposed_drafts": 9}
    assert from_answer({"choices": [], "sglext": {"spec_tokens_details": short}}) == full
    assert from_answer({"choices": [], "sglext": {"spec_tokens_details": None}}) is None


@pytest.mark.parametrize(
    "field",
    [
        {"acceptance_histogram": [0, 0, 0], "num_draft_tokens": 0},  # never filled in
        {"acceptance_histogram": [0, 2], "num_draft_tokens": 1},  # accepted more than was drafted
        {"acceptance_histogram": [1, 2]},
        {},
    ],
)
def test_totals_that_say_nothing_are_no_measurement(field: dict) -> None:
    assert from_answer({"metrics": {"speculative_decoding": field}, "choices": [{"index": 0}]}) is None
    assert from_answer({"metrics": None, "choices": [{"speculative_decoding": None}]}) is None


def test_tokens_without_drafts_were_plain_steps_and_a_stop_cuts_the_last_draft() -> None:
    found = Acceptance((2,), (3,))
    assert Counter(steps_of(found, tokens=1 + 3 + 2)) == {(3, 2, 3): 1, (0, 0, 1): 2}
    assert steps_of(Acceptance((0, 3), (3, 3), ordered=True), tokens=1 + 1 + 2) == [(3, 0, 1), (3, 2, 2)]


def test_counters_of_several_engines_add_up_and_other_traffic_is_noticed() -> None:
    name = "vllm:spec_decode_num_"
    page = "\n".join(
        f'{name}{what}_total{{engine="{engine}"{place}}} {value}'
        for engine in (0, 1)
        for what, place, value in (
            ("drafts", "", 5),
            ("draft_tokens", "", 10),
            ("accepted_tokens", "", 6),
            ("accepted_tokens_per_pos", ',position="0"', 4),
            ("accepted_tokens_per_pos", ',position="1"', 2),
        )
    )
    assert read_counters(page) == Counters(10.0, 20.0, (8.0, 4.0))
    assert read_counters("# HELP nothing\nvllm:num_requests_running 1\n") is None
    before, after = Counters(0, 0, ()), Counters(10, 20, (8, 4))
    assert Counter(from_counters(before, after, tokens=23).accepted) == {0: 2, 1: 4, 2: 4}
    assert from_counters(before, after, tokens=12) is None, "22 tokens cannot be of a request of 12"
    assert from_counters(after, after, tokens=12) is None


def test_a_chunk_that_holds_more_than_a_step_can_emit_is_no_step() -> None:
    assert from_chunks([3, 1, 4], 3) == Acceptance((2, 0, 3), (3, 3, 3), ordered=True)
    assert from_chunks([3, 1, 5], 3) is None and from_chunks([], 3) is None


def test_our_own_front_is_such_a_server(tokenizer_folder: Path) -> None:
    """Its model answers with the prompt, accepting 1, 2, 3, 0, … of three drafts; every request field is understood."""
    front = OpenAIFront(FrontOptions((MODEL,), port=0), FakeUpstream)
    front.start()
    try:
        facts = TargetFacts("openai http", "toy", "unknown", None)
        target = OpenAIChat(f"{front.url}/v1", "toy", TextTokenizer.load(tokenizer_folder), facts, alone=True)
        done = target.chat("r", [Message("user", "abcdefghijklmnop")], SAMPLING).completion
        target.close()
    finally:
        front.close()
    assert done.text == "abcdefghijklmnop" and len(done.token_ids) == 16
    assert [(s.drafted, s.accepted) for s in done.steps] == [(3, 1), (3, 2), (3, 3), (3, 0), (3, 1), (3, 2)]
    assert target.facts.acceptance_source == BODY
