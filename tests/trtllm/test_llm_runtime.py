"""TensorRT-LLM's LLM API as a generator: deltas, counts, ends and refusals, over the fake in `fake/`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trtllm.toy_llm import DRAFT, END, FAKE, LONGEST, QUEUE, SLOTS, answer, llm_settings, write_build
from trtspec.errors import ConfigError, SetupError, StageFailed
from trtspec.package.settings import MODEL_YAML, load_settings
from trtspec.runtime import Refused
from trtspec.trtllm.runtime import LLMRuntime, gpus_of
from trtspec.values import Completion, Delta, GenerationRequest, SamplingParams


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What `LLM()` was called with, a line a call."""
    return tmp_path / "log.jsonl"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, log: Path):
    """The fake, importable as tensorrt_llm; the environment is put back afterwards."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("FAKE_LLM_LOG", str(log))
    before = dict(os.environ)
    import tensorrt_llm.llmapi

    yield tensorrt_llm
    os.environ.clear()
    os.environ.update(before)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


class Opened:
    """A runtime, and what one request after the other gets from it."""

    def __init__(self, runtime: LLMRuntime) -> None:
        self.runtime = runtime
        self.llm = runtime._llm

    def start(self, request_id: str, prompt: bytes, **sampling):
        deltas: list[Delta] = []
        ends: list[Completion | Exception] = []
        ended = threading.Event()

        def done(end) -> None:
            ends.append(end)
            ended.set()

        request = GenerationRequest(request_id, tuple(prompt), SamplingParams(**sampling))
        self.runtime.submit(request, deltas.append, done)
        return deltas, ends, ended

    def run(self, prompt: bytes, **sampling) -> tuple[list[Delta], Completion | Exception]:
        deltas, ends, ended = self.start("r", prompt, **sampling)
        assert ended.wait(10)
        return deltas, ends[0]

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 5
        while self.llm.running or self.runtime.stats().active:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def open_llm(fake, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    opened: list[LLMRuntime] = []

    def make(*arguments, gpus=(), **changes) -> Opened:
        made = llm_settings(*arguments, **changes)
        folder = write_build(tmp_path / f"build{len(opened)}", made) / "tensorrt_llm" / "1"
        fake.__version__ = made.version
        opened.append(LLMRuntime.open(folder, load_settings(folder / MODEL_YAML), gpus))
        return Opened(opened[-1])

    yield make
    for runtime in opened:
        runtime.close()


@pytest.fixture
def toy(open_llm) -> Opened:
    return open_llm()


def test_each_chunk_is_one_step_and_its_tokens_are_the_accepted_drafts_and_one_more(toy):
    deltas, completion = toy.run(b"hello", max_tokens=12)
    assert completion.text == "".join(delta.text for delta in deltas) == answer(b"hello", 12).decode()
    assert bytes(completion.token_ids) == answer(b"hello", 12)
    # The prefill token, then 1, 2 and 3 accepted; of the fourth step's 4 the limit leaves 2 tokens: 1 + 2 + 3 + 4 + 2.
    assert [(delta.step, delta.accepted, delta.drafted) for delta in deltas] == [
        (0, 0, 0),
        (1, 1, DRAFT),
        (2, 2, DRAFT),
        (3, 3, DRAFT),
        (4, 1, DRAFT),
    ]
    assert completion.acceptance_length == 11 / 4
    assert (completion.finish_reason, completion.prompt_tokens) == ("length", 5)
    toy.wait_idle()


def test_characters_cut_by_steps_arrive_whole(toy):
    text = "héllo wörld 😀 日本"
    deltas, completion = toy.run(text.encode()[::-1], max_tokens=len(text.encode()))
    assert completion.text == "".join(delta.text for delta in deltas) == text
    assert "�" not in "".join(delta.text for delta in deltas)


def test_a_stop_string_over_two_steps_ends_the_text_before_it_and_the_engines_work(toy):
    # olleholleh…: "hol" begins in one step and ends in another.
    deltas, completion = toy.run(b"hello", max_tokens=3000, stop=("hol",))
    assert completion.text == "".join(delta.text for delta in deltas) == "olle"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "hol")
    toy.wait_idle()


def test_the_models_own_end_ends_the_text_is_counted_and_can_be_ignored(toy):
    _, completion = toy.run(b"ab\ncd", max_tokens=50)
    assert (completion.text, completion.token_ids[-1]) == ("dc\n", END)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", END)
    _, ignored = toy.run(b"ab\ncd", max_tokens=10, ignore_eos=True)
    assert ignored.text == "dc\nbadc\nba" and ignored.finish_reason == "length"


def test_without_max_tokens_a_text_fills_the_context_and_no_more(toy):
    _, completion = toy.run(b"x" * (LONGEST - 3))
    assert len(completion.token_ids) == 3 and completion.finish_reason == "length"
    for length in (LONGEST, LONGEST + 1):
        with pytest.raises(ValueError, match="context limit"):
            toy.run(b"x" * length)


def test_log_probabilities_are_of_the_chosen_tokens(toy):
    deltas, completion = toy.run(b"hello", max_tokens=6, logprobs=True)
    assert completion.logprobs == (-0.5,) * 6 == tuple(p for delta in deltas for p in delta.logprobs)


def test_log_probabilities_that_do_not_come_are_an_error_and_not_left_out(toy, monkeypatch):
    made = toy.runtime._sampling_class
    monkeypatch.setattr(
        toy.runtime, "_sampling_class", lambda **keywords: made(**{**keywords, "logprobs": None})
    )
    _, error = toy.run(b"hello", max_tokens=6, logprobs=True)
    assert isinstance(error, StageFailed) and "log probabilities" in error.message
    toy.wait_idle()


def test_what_the_deployment_cannot_honour_is_refused_before_it_takes_a_place(open_llm):
    eagle = open_llm("1.2.1", "Eagle3")
    for sampling in ({"temperature": 1.0}, {"logprobs": True}, {"presence_penalty": 1.0}):
        with pytest.raises(ValueError, match=r"1\.2\.1"):
            eagle.run(b"hello", **sampling)
    assert eagle.runtime.stats().active == 0
    assert eagle.run(b"hello", max_tokens=3)[1].text == "oll"


def test_a_cancelled_request_ends_at_once_here_and_there(toy):
    deltas, ends, ended = toy.start("c", b"hello", max_tokens=4000)
    while not deltas:
        time.sleep(0.001)
    toy.runtime.cancel("c")
    assert ended.wait(2)
    assert ends[0].finish_reason == deltas[-1].finish_reason == "cancelled"
    assert ends[0].text == "".join(delta.text for delta in deltas)
    toy.runtime.cancel("c")  # known no more
    toy.wait_idle()


def test_a_request_cancelled_before_it_began_leaves_nothing(toy):
    for number in range(50):
        _, ends, ended = toy.start(f"c{number}", b"hello", max_tokens=4000)
        toy.runtime.cancel(f"c{number}")
        assert ended.wait(2) and ends[0].finish_reason == "cancelled"
    toy.wait_idle()


def test_past_slots_and_queue_a_request_is_refused_and_served_once_another_ended(toy):
    started = [toy.start(f"q{i}", b"hello", max_tokens=2000) for i in range(SLOTS + QUEUE)]
    assert (toy.runtime.stats().active, toy.runtime.stats().queued) == (SLOTS, QUEUE)
    with pytest.raises(Refused):
        toy.start("late", b"hello")
    with pytest.raises(ValueError, match="already in use"):
        toy.start("q0", b"hello")
    toy.runtime.cancel("q0")
    assert started[0][2].wait(5)
    toy.start("late", b"hello", max_tokens=1)
    for number in range(SLOTS + QUEUE):
        toy.runtime.cancel(f"q{number}")
    toy.wait_idle()


def test_an_engine_error_ends_its_request_and_no_other(toy):
    _, _, other_ended = toy.start("other", b"hello", max_tokens=100)
    _, error = toy.run(b"break me", max_tokens=100)
    assert isinstance(error, StageFailed) and "device-side assert" in error.message
    assert other_ended.wait(5)
    toy.wait_idle()


def test_what_tensorrt_llm_itself_refuses_is_the_requests_fault_and_its_end_is_not(toy):
    with pytest.raises(ValueError, match="max_num_tokens"):
        toy.run(b"refuse me")
    toy.llm.shutdown()
    with pytest.raises(StageFailed, match="takes no requests any more"):
        toy.run(b"hello")
    assert toy.runtime.stats().active == 0


def test_closing_cancels_what_runs(toy):
    _, ends, ended = toy.start("c", b"hello", max_tokens=4000)
    toy.runtime.close()
    assert ended.is_set() and ends[0].finish_reason == "cancelled"
    with pytest.raises(SetupError, match="closed"):
        toy.start("late", b"hello")
    toy.runtime.close()


def test_the_llm_gets_its_keywords_and_the_builds_folders_wherever_the_build_lies(open_llm, log, tmp_path):
    open_llm("1.2.1", "Eagle3")
    made = json.loads(log.read_text())
    assert Path(made["model"]).resolve() == tmp_path / "build0" / "target"
    speculative = made["speculative_config"]
    assert Path(speculative["speculative_model_dir"]).resolve() == tmp_path / "build0" / "draft"
    assert speculative["max_draft_len"] == 3 and made["max_num_tokens"] == 8448
    assert not {"triton_config", "trtspec"} & made.keys()


def test_an_instance_sees_its_own_gpus_and_no_launchers_leftovers(open_llm, log, monkeypatch):
    """Under mpirun the server is rank 0 of a job of one; workers that inherit that never start."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("OMPI_MCA_PML", "ob1")
    open_llm(gpus=("2", "3"))
    made = json.loads(log.read_text())
    assert (made["gpus"], made["gpus_per_node"]) == ("2,3", 2)
    assert os.environ["TRTLLM_VISIBLE_DEVICES"] == "2,3" and os.environ["OMPI_MCA_PML"] == "ob1"
    assert not {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"} & os.environ.keys()


def test_gpus_of_an_instance():
    assert gpus_of("tensorrt_llm_0_0", "0,1;2,3") == ("0", "1")
    assert gpus_of("tensorrt_llm_0_1", "0, 1; 2, 3") == ("2", "3")
    with pytest.raises(SetupError, match="instance 2 has no GPUs"):
        gpus_of("tensorrt_llm_0_2", "0;1")


def test_another_version_than_the_settings_are_for_is_refused_with_both(fake, tmp_path):
    folder = write_build(tmp_path / "build", llm_settings()) / "tensorrt_llm" / "1"
    fake.__version__ = "1.3.0rc27"
    with pytest.raises(SetupError, match=r"of TensorRT-LLM 1\.2\.1, and here is 1\.3\.0rc27"):
        LLMRuntime.open(folder, load_settings(folder / MODEL_YAML))


def test_an_edited_file_is_held_against_the_contract_before_anything_loads(fake, tmp_path):
    file = write_build(tmp_path / "build", llm_settings()) / "tensorrt_llm" / "1" / MODEL_YAML
    file.write_text(file.read_text().replace("max_num_tokens", "max_num_tokns"))
    with pytest.raises(ConfigError, match="max_num_tokens"):
        LLMRuntime.open(file.parent, load_settings(file))
    file.write_text(file.read_text() + "stream_interval: 10\n")
    with pytest.raises(ConfigError, match="stream_interval"):  # chunks would not be steps any more
        load_settings(file)


def test_without_tensorrt_llm_it_says_where_there_is_one(tmp_path):
    folder = write_build(tmp_path / "build", llm_settings()) / "tensorrt_llm" / "1"
    with pytest.raises(SetupError, match="cannot be imported"):
        LLMRuntime.open(folder, load_settings(folder / MODEL_YAML))
