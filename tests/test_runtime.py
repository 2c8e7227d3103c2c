"""The runtime on a real engine folder: what a caller sees of concurrency, limits, failures and closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer
from trtspec.compile import CompileRequest, compile_engine
from trtspec.errors import InternalError, SetupError
from trtspec.runtime import Refused, Runtime
from trtspec.values import Completion, Delta, GenerationRequest, SamplingParams

SPECULATION = {"method": "ngram", "draft_length": 4, "max_ngram": 3, "min_ngram": 1}


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("model"))
    into = tmp_path_factory.mktemp("engine")
    compile_engine(CompileRequest(model, "tiny", SPECULATION, max_batch=4), into)
    return into


@pytest.fixture(scope="module")
def runtime(engine: Path) -> Iterator[Runtime]:
    with Runtime.open(engine) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(engine: Path) -> Iterator[Runtime]:
    with Runtime.open(engine, speculate=False) as opened:
        yield opened


def request(name: str, number: int = 0, **sampling: object) -> GenerationRequest:
    prompt = tuple((number * 7 + i * i) % 50 + 10 for i in range(12 + number % 9))
    return GenerationRequest(
        name, prompt, SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling})
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.3}])
def test_output_is_the_plain_engine_s_whatever_runs_beside_it(
    runtime: Runtime, plain: Runtime, sampling: dict[str, float]
) -> None:
    requests = [request(f"r{i}", i, seed=i, **sampling) for i in range(12)]
    expected = [plain.generate(r).token_ids for r in requests]
    together = runtime.generate_many(requests)
    assert [c.token_ids for c in together] == expected
    if not sampling:  # a random model repeats itself only when it is greedy
        assert sum(step.accepted for c in together for step in c.steps) > 0, "nothing was ever accepted"


def test_deltas_add_up_to_the_completion(runtime: Runtime) -> None:
    deltas: list[Delta] = []
    outcome: list[Completion] = []
    ended = threading.Event()
    runtime.submit(request("deltas"), deltas.append, lambda c: (outcome.append(c), ended.set()))
    assert ended.wait(30)
    completion = outcome[0]
    assert tuple(t for d in deltas for t in d.token_ids) == completion.token_ids
    assert "".join(d.text for d in deltas) == completion.text
    assert [d.step for d in deltas] == list(range(len(deltas)))
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert [(d.drafted, d.accepted) for d in deltas[1:]] == [
        (s.drafted, s.accepted) for s in completion.steps
    ]


def test_a_cancelled_request_ends_and_frees_its_slot(runtime: Runtime) -> None:
    first = threading.Event()
    ended = threading.Event()
    outcome: list[Completion] = []
    runtime.submit(
        request("cancel", max_tokens=200),
        lambda _: (first.set(), runtime.cancel("cancel")),
        lambda c: (outcome.append(c), ended.set()),
    )
    assert first.wait(30) and ended.wait(30)
    assert outcome[0].finish_reason == "cancelled"
    assert 1 <= len(outcome[0].token_ids) < 200
    assert runtime.stats().active == runtime.stats().queued == 0
    runtime.cancel("cancel")
    runtime.cancel("never seen")


def test_requests_past_the_queue_are_refused_and_the_rest_served(engine: Path) -> None:
    with Runtime.open(engine, max_concurrency=1, max_queue=1) as small:
        started, release, all_done = threading.Event(), threading.Event(), threading.Semaphore(0)
        done: list[str] = []

        def finished(completion: Completion) -> None:
            done.append(completion.request_id)
            all_done.release()

        small.submit(request("runs"), lambda _: (started.set(), release.wait(30)), finished)
        assert started.wait(30)
        small.submit(request("waits"), None, finished)
        with pytest.raises(Refused, match="max_queue_size"):
            small.submit(request("too many"), None, finished)
        release.set()
        assert all_done.acquire(timeout=30) and all_done.acquire(timeout=30)
        assert done == ["runs", "waits"]


@pytest.mark.parametrize("reuse", [True, False])
def test_the_same_prompt_again_starts_from_its_rows_if_it_may(engine: Path, reuse: bool) -> None:
    with Runtime.open(engine, reuse_prefixes=reuse) as opened:
        first, second = (opened.generate(request(name)) for name in ("first", "second"))
    assert second.token_ids == first.token_ids
    assert second.cached_tokens == (second.prompt_tokens - 1 if reuse else 0)


def test_a_bad_request_is_refused_alone(runtime: Runtime) -> None:
    limit = runtime.info.spec.max_seq_len
    with pytest.raises(ValueError, match="context limit"):
        runtime.submit(GenerationRequest("long", (5,) * limit))
    with pytest.raises(ValueError, match="empty"):
        runtime.submit(GenerationRequest("empty", ()))
    assert runtime.generate(request("after")).finish_reason == "length"


def test_one_id_serves_one_request_at_a_time(runtime: Runtime) -> None:
    ended = threading.Event()
    outcomes: list[object] = []
    runtime.submit(request("twin"), None, lambda c: (outcomes.append(c), ended.set()))
    with pytest.raises(ValueError, match="already in use"):
        runtime.submit(request("twin"), None, outcomes.append)
    assert ended.wait(30)
    assert len(outcomes) == 1
    assert runtime.generate(request("twin")).finish_reason == "length"


def test_an_engine_that_breaks_ends_every_request_with_its_error(engine: Path) -> None:
    broken = Runtime.open(engine)

    def fail(_: object) -> None:
        raise MemoryError("no more memory")

    broken._engine.forward = fail
    with pytest.raises(InternalError, match="no more memory"):
        broken.generate(request("victim"))
    with pytest.raises(InternalError, match="no more memory"):
        broken.submit(request("later"))
    broken.close()


def test_closing_ends_what_runs_and_refuses_what_comes(engine: Path) -> None:
    runtime = Runtime.open(engine)
    outcomes: list[Completion] = []
    for i in range(6):
        runtime.submit(request(f"r{i}", i, max_tokens=200), None, outcomes.append)
    runtime.close()
    runtime.close()
    assert len(outcomes) == 6
    assert "cancelled" in {c.finish_reason for c in outcomes}
    with pytest.raises(SetupError, match="closed"):
        runtime.submit(request("late"))


def test_an_engine_that_is_not_exact_here_is_not_served(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtspec.runtime.inexact_steps", lambda _: ["1 of 9 rows at 0"])
    with pytest.raises(SetupError, match="row-invariant"):
        Runtime.open(engine)
