"""The quickstart build behind the real server: what its clients get is what the runtime gives in process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.conftest import Served, free_ports
from trtspec.runtime import Runtime
from trtspec.serve.supervise import options_from_build
from trtspec.serve.triton import TritonServer
from trtspec.values import Completion, GenerationRequest, SamplingParams

pytestmark = [pytest.mark.server, pytest.mark.model]

STREAMS = 32
SUBJECTS = ("rivers", "bread", "the moon", "prime numbers", "a lighthouse", "rain", "chess", "trains")
TASKS = (
    "Write a short story about {}.",
    "List five facts about {}.",
    "Explain {} to a child.",
    "Count from 1 to 20, then name {}.",
)


def sampling(index: int) -> SamplingParams:
    """Every fourth request is sampled; its seed makes it repeatable."""
    if index % 4 == 3:
        return SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=index)
    return SamplingParams(max_tokens=32)


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, str]]]:
    texts = [task.format(subject) for task in TASKS for subject in SUBJECTS]
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.fixture(scope="module")
def in_process(quickstart_build, conversations) -> list[Completion]:
    with Runtime.open(quickstart_build / "engine") as runtime:
        return runtime.generate_many(
            GenerationRequest(f"p{index}", tuple(runtime.tokenizer.chat(messages)), sampling(index))
            for index, messages in enumerate(conversations)
        )


@pytest.fixture(scope="module")
def quickstart(quickstart_build) -> Served:
    with TritonServer(options_from_build(quickstart_build, **free_ports())) as server:
        server.wait_ready(300)
        served = Served(server)
        yield served
        served.client.close()


def footprint(served: Served) -> dict[str, int]:
    (stub,) = served.server.stubs()
    process = Path(f"/proc/{stub}")
    return {
        "threads": len(list((process / "task").iterdir())),
        "descriptors": len(list((process / "fd").iterdir())),
        "shared memory": sum(
            region.stat().st_size for region in Path("/dev/shm").glob(f"{served.server._prefix}*")
        ),
    }


def test_32_streams_with_a_third_cancelled_leave_the_others_right_and_nothing_behind(
    quickstart, conversations, in_process
):
    list(quickstart.client.stream_chat("warm", conversations[0], sampling(0)))
    quickstart.wait_idle()
    before = footprint(quickstart)

    def one(index: int) -> tuple[str, list[int]] | None:
        text, token_ids = "", []
        with quickstart.client.stream_chat(f"s{index}", conversations[index], sampling(index)) as stream:
            for chunk in stream:
                text += chunk.text
                token_ids += chunk.token_ids
                if index % 3 == 0 and len(token_ids) >= 4:
                    return None
        return text, token_ids

    with ThreadPoolExecutor(STREAMS) as pool:
        streamed = list(pool.map(one, range(STREAMS)))
    assert [index for index, answer in enumerate(streamed) if answer is None] == list(range(0, STREAMS, 3))
    for answer, expected in zip(streamed, in_process, strict=True):
        if answer is not None:
            assert answer == (expected.text, list(expected.token_ids))
    quickstart.wait_idle()
    after = footprint(quickstart)
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["shared memory"] <= before["shared memory"]
    assert quickstart.server.probe("tensorrt_llm") is None
    assert quickstart.client.ready()


def test_a_cancelled_stream_frees_its_slot_at_once(quickstart, conversations):
    quickstart.wait_idle()
    stream = quickstart.client.stream_chat(
        "c", conversations[0], SamplingParams(max_tokens=1000, ignore_eos=True)
    )
    next(iter(stream))
    stream.cancel()
    began = time.monotonic()
    quickstart.wait_idle(5)
    assert time.monotonic() - began < 2


def test_acceptance_of_a_request_agrees_with_the_runtime(quickstart, conversations, in_process):
    chunks = list(quickstart.client.stream_chat("a", conversations[1], sampling(1)))
    steps = [step for chunk in chunks for step in chunk.steps]
    assert sum(accepted for _, accepted in steps) == chunks[-1].usage.accepted
    assert chunks[-1].usage.completion_tokens == len(in_process[1].token_ids)
    assert chunks[-1].usage.prompt_tokens == in_process[1].prompt_tokens


def test_the_server_shuts_down_cleanly_after_all_that(quickstart):
    quickstart.wait_idle()
    quickstart.client.close()
    assert quickstart.server.stop() == 0
