"""See the package."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from dataclasses import dataclass, field

import tensorrt_llm
from trtspec.trtllm.check import check_settings

END = 256
STEP_S = 0.002


class RequestError(RuntimeError):
    pass


@dataclass(kw_only=True)
class SamplingParams:
    """The real one's fields that concern one text; a keyword it does not have is an error there too."""

    end_id: int | None = None
    max_tokens: int = 32
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class RequestOutput:
    """Grows with every step; must be made inside a running event loop, as the real one must to be awaited."""

    def __init__(self, prompt: bytes, sampling: SamplingParams) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue = asyncio.Queue()
        self.prompt, self.sampling = prompt, sampling
        self.outputs = [CompletionOutput()]
        self.finished = self.aborted = False
        self.step = 0
        self.rest = self._answer()

    def _answer(self) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.sampling.max_tokens:
            byte = self.prompt[::-1][len(tokens) % len(self.prompt)]
            tokens.append(byte)
            if byte == ord("\n") and not self.sampling.ignore_eos:
                return [*tokens, END][: self.sampling.max_tokens]
        return tokens

    def abort(self) -> None:
        self.aborted = True

    def put(self, item: object) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._steps.put_nowait, item)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        item = await self._steps.get()
        if isinstance(item, Exception):
            raise item
        tokens, reason = item
        output = self.outputs[0]
        output.token_ids.extend(tokens)
        if self.sampling.logprobs:
            # The likeliest token and, where that is another one, the chosen one.
            output.logprobs.extend({0: Logprob(-0.1, 1), token: Logprob(-0.5, 2)} for token in tokens)
        output.finish_reason = reason
        self.finished = reason is not None
        return self


class LLM:
    """running: requests the engine holds, queued ones too. Its keywords and GPUs go to the file $FAKE_LLM_LOG."""

    def __init__(self, **keywords: object) -> None:
        if faults := [f for f in check_settings(keywords, tensorrt_llm.__version__) if f.level == "error"]:
            raise ValueError("\n".join(map(str, faults)))
        with open(os.environ["FAKE_LLM_LOG"], "a") as log:
            log.write(json.dumps({**keywords, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\n")
        speculative = keywords.get("speculative_config") or {}
        self.drafts = speculative.get("max_draft_len", 0)
        self.slots = keywords["max_batch_size"]
        self.running: list[RequestOutput] = []
        self._down = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def generate_async(
        self, inputs: list[int], sampling_params: SamplingParams, streaming: bool = False
    ) -> RequestOutput:
        if self._down:
            raise RuntimeError("the executor is shut down")
        if bytes(inputs).startswith(b"refuse"):
            raise RequestError("the prompt is longer than max_num_tokens")
        assert streaming
        output = RequestOutput(bytes(inputs), sampling_params)
        self.running.append(output)
        return output

    def shutdown(self) -> None:
        self._down = True
        self._thread.join()

    def _run(self) -> None:
        while not self._down:
            for output in [o for o in self.running if o.aborted] + self.running[: self.slots]:
                if output in self.running:
                    self._advance(output)
            time.sleep(STEP_S)

    def _advance(self, output: RequestOutput) -> None:
        if output.aborted:
            self._end(output, ([], "cancelled"))
            return
        if output.prompt.startswith(b"break") and output.step:
            self._end(output, RuntimeError("CUDA error: device-side assert triggered"))
            return
        accepted = 0 if output.step == 0 else min(output.step % (self.drafts + 1), len(output.rest) - 1)
        tokens, output.rest = output.rest[: accepted + 1], output.rest[accepted + 1 :]
        output.step += 1
        if output.rest:
            output.put((tokens, None))
        else:
            self._end(output, (tokens, "stop" if tokens[-1] == END else "length"))

    def _end(self, output: RequestOutput, last: object) -> None:
        self.running.remove(output)
        output.put(last)
