"""A TensorRT-LLM build behind the real Triton server and the OpenAI front: all of it but TensorRT-LLM, which is faked.

The packaged model.py runs unmodified; a model's version folder is on its path, and there the fake lies.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.conftest import Served, free_ports
from tests.serve.openai.conftest import Caller, events, fronted
from tests.serve.openai.malformed import crowd
from tests.trtllm.toy_llm import DRAFT, FAKE, answer, llm_settings, write_build
from trtspec.serve.client import RequestFailed
from trtspec.serve.openai.front import FrontOptions
from trtspec.serve.openai.upstream import ServedModel
from trtspec.serve.triton import ServerOptions, TritonServer
from trtspec.values import SamplingParams

pytestmark = pytest.mark.server

NAME = "tensorrt_llm"


class Deployment:
    """A running server on a build, the front before it, and what `LLM()` was called with in each instance."""

    def __init__(self, served: Served, caller: Caller, log: Path) -> None:
        self.served, self.caller, self._log = served, caller, log

    def llms(self) -> list[dict]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@contextlib.contextmanager
def deployed(folder: Path, *arguments: str, instances: int = 1, **changes) -> Iterator[Deployment]:
    made = llm_settings(*arguments, **changes)
    repository = write_build(folder / "build", made, instances=instances, max_queue_size=100)
    shutil.copytree(FAKE / "tensorrt_llm", repository / NAME / "1" / "tensorrt_llm")
    log = folder / "log.jsonl"
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("FAKE_LLM_LOG", str(log))
        server = stack.enter_context(TritonServer(ServerOptions(repository, **free_ports())))
        server.wait_ready(60)
        served = Served(server)
        front = FrontOptions((ServedModel.read(repository / NAME),), port=0)
        with fronted(served, front) as caller:
            yield Deployment(served, caller, log)
        served.wait_idle()
        served.client.close()
        assert server.stop() == 0


@pytest.fixture(scope="module")
def ngram(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("ngram")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("eagle")
    with deployed(folder, "1.2.1", "Eagle3", instances=2, tensor_parallel_size=2) as deployment:
        yield deployment


def body(prompt: str, **fields: object) -> dict[str, object]:
    return {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}


def test_tritons_clients_get_the_deltas_and_counts_of_every_other_backend(ngram):
    served = ngram.served
    chunks = list(served.client.stream_text("a", "hello", SamplingParams(max_tokens=12)))
    assert "".join(chunk.text for chunk in chunks) == answer(b"hello", 12).decode()
    assert [chunk.steps for chunk in chunks] == [
        (),
        ((DRAFT, 1),),
        ((DRAFT, 2),),
        ((DRAFT, 3),),
        ((DRAFT, 1),),
    ]
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.accepted, usage.steps) == (5, 12, 7, 4)
    status, whole = served.post("generate", {"text_input": "hello", "sampling_param_max_tokens": 12})
    assert status == 200 and json.loads(whole)["acceptance_length"] == pytest.approx(11 / 4)
    assert served.metrics()["trtllm:spec_accept_length"] == pytest.approx(11 / 4)


def test_openais_clients_get_the_template_usage_and_acceptance(ngram):
    caller = ngram.caller
    conversation = [{"role": "user", "content": "hi"}]
    ask = {"model": NAME, "messages": conversation, "max_tokens": 8, "temperature": 0}
    _, _, chat = caller.send("POST", "/v1/chat/completions", ask)
    assert chat["choices"][0]["message"]["content"] == answer(b"<user>hi", 8).decode()
    assert chat["usage"] == {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}
    speculation = chat["metrics"]["speculative_decoding"]
    assert speculation["per_step_accepted"] == [1, 2, 1]
    assert speculation["num_spec_tokens"] == DRAFT
    streamed = events(
        caller.send(
            "POST",
            "/v1/completions",
            body("hello", stream=True, n=3, stop=["hol"], logprobs=0, stream_options={"include_usage": True}),
        )[2]
    )
    said = dict.fromkeys(range(3), "")
    for part in streamed[:-1]:
        said[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert said == dict.fromkeys(range(3), "olle")
    # The stop string's own tokens were generated.
    assert streamed[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 21, "total_tokens": 26}
    assert caller.send("GET", "/v1/models")[2]["data"][0]["max_model_len"] == 4096


def test_what_this_tensorrt_llm_would_ignore_is_a_400_over_either_protocol(eagle):
    served, caller = eagle.served, eagle.caller
    for fields in ({"temperature": 1}, {"logprobs": 0}, {"presence_penalty": 1.0}):
        for stream in (False, True):
            status, _, reply = caller.send("POST", "/v1/completions", body("x", **fields, stream=stream))
            assert status == 400 and "1.2.1" in reply["error"]["message"], reply
    with pytest.raises(RequestFailed, match="log probabilities") as refused:
        list(served.client.stream_text("a", "x", SamplingParams(logprobs=True)))
    assert refused.value.code == "INVALID_ARGUMENT"
    # A client that says nothing of temperature gets what the deployment can do.
    unsaid = {key: value for key, value in body("hello").items() if key != "temperature"}
    status, _, reply = caller.send("POST", "/v1/completions", unsaid)
    assert status == 200 and reply["choices"][0]["text"] == answer(b"hello", 12).decode()
    # Greedy: there is nothing that a seed decides.
    assert caller.send("POST", "/v1/completions", body("hello", seed=7))[0] == 200
    status, _, reply = caller.send("POST", "/v1/completions", body("refuse this"))
    assert status == 400 and "max_num_tokens" in reply["error"]["message"]


def test_an_engine_error_is_a_500_of_that_request(ngram):
    caller = ngram.caller
    status, _, reply = caller.send("POST", "/v1/completions", body("break this"))
    assert status == 500 and "device-side assert" in reply["error"]["message"]
    assert caller.send("POST", "/v1/completions", body("hello"))[0] == 200


def test_two_instances_have_gpus_of_their_own_and_answer_alike(eagle):
    served, caller = eagle.served, eagle.caller
    assert len(served.server.stubs()) == 2
    assert sorted((llm["gpus"], llm["gpus_per_node"]) for llm in eagle.llms()) == [("0,1", 2), ("2,3", 2)]
    prompts = [f"{index} instance" for index in range(12)]
    with ThreadPoolExecutor(12) as pool:
        asked = pool.map(lambda p: caller.send("POST", "/v1/completions", body(p, max_tokens=200)), prompts)
        for prompt, (status, _, reply) in zip(prompts, asked, strict=True):
            assert status == 200
            assert reply["choices"][0]["text"] == answer(prompt.encode(), 200).decode()


def test_64_streams_with_cancels_and_malformed_requests_leave_the_others_right(ngram):
    crowd(ngram.served, ngram.caller, NAME, answer)
