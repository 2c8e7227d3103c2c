"""TensorRT-LLM's `LLM` behind the Triton model, by the protocol that trtspec's own `Runtime` has too.

    submit ──▶ LLM.generate_async ──▶ a task per request, on one event loop ──▶ on_delta, on_done

TensorRT-LLM is asked for token ids alone. Text, stop strings, stop ids and limits are those of trtspec's decode
loop, and so is the count of accepted drafts: each chunk is one step (stream_interval is 1), and a verify step
accepted one draft less than it has tokens. That holds in every version, also where the version's own statistics are
all zeros. How many were drafted no chunk says; the planned length is taken, which n-gram lookups and scheduled
lengths may stay below.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.base import EngineSpec
from trtspec.errors import ConfigError, SetupError, StageFailed, TrtspecError
from trtspec.package.settings import MODEL_YAML, LLMSettings
from trtspec.runtime import Refused, RuntimeStats
from trtspec.trtllm.check import check_settings
from trtspec.trtllm.contract import contract_for
from trtspec.trtllm.requests import refusal, sampling_keywords
from trtspec.values import Completion, Delta, GenerationRequest
from trtspec.verify.acceptance import Verdict
from trtspec.verify.randomness import PositionRandom
from trtspec.verify.sequence import Sequence as Answer
from trtspec.verify.sequence import check_request

# What a launcher leaves in the environment of the one process it starts: MPI would take TensorRT-LLM's workers for
# a part of that job. Settings (…_MCA_…) are kept, all but those of the run itself.
_LAUNCHERS = re.compile(r"(OMPI|PMIX)_(?!MCA_)|PMI_|ORTE_|OMPI_MCA_orte_")


@dataclass(frozen=True, slots=True)
class LLMInfo:
    """spec: the deployment's limits."""

    spec: EngineSpec


class LLMRuntime:
    """Use `LLMRuntime.open`. See `trtspec.package.protocol.GenerationBackend` for the methods."""

    def __init__(self, llm: Any, settings: LLMSettings, tokenizer: TextTokenizer) -> None:
        """llm: has generate_async(ids, SamplingParams, streaming=True) and shutdown()."""
        from tensorrt_llm.llmapi import RequestError, SamplingParams

        self.info = LLMInfo(
            EngineSpec(
                vocab_size=tokenizer.vocab_size,
                tokenizer_vocab_size=tokenizer.vocab_size,
                max_batch=settings.max_batch_size,
                max_seq_len=settings.max_seq_len,
                max_rows=settings.draft_length + 1,
                exact=False,
            )
        )
        self.tokenizer = tokenizer
        self._llm = llm
        self._settings = settings
        self._contract = contract_for(settings.trtspec.version)
        self._sampling_class = SamplingParams
        self._request_errors = (ValueError, RequestError)
        self._lock = threading.Lock()  # guards _open and _closing
        self._open: set[str] = set()
        self._closing = False
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of the event loop's thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trtspec-llm", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, folder: Path, settings: LLMSettings, gpus: Sequence[str] = ()) -> LLMRuntime:
        """Load the models that `folder`/model.yaml names. gpus: those of this process, () for all it sees.

        Changes this process's environment, so nothing may have imported TensorRT-LLM in it before. Raises SetupError
        where TensorRT-LLM is missing or another one than the settings are for, ConfigError for settings it refuses.
        """
        _set_environment(gpus)
        try:
            import tensorrt_llm
            from tensorrt_llm.llmapi import LLM
        except ImportError as error:
            raise SetupError(
                f"TensorRT-LLM cannot be imported: {error}",
                hint="serve in NVIDIA's Triton container for TensorRT-LLM, with trtspec installed in it",
            ) from error
        version, here = settings.trtspec.version, tensorrt_llm.__version__
        if here != version:
            raise SetupError(
                f"the settings are of TensorRT-LLM {version}, and here is {here}",
                where=str(folder / MODEL_YAML),
                hint=f"build with engine.version: {here}, or serve in the container of {version}",
            )
        keywords = settings.arguments(folder)
        if faults := [str(f) for f in check_settings(keywords, version) if f.level == "error"]:
            raise ConfigError("\n".join(faults), where=str(folder / MODEL_YAML))
        tokenizer = TextTokenizer.load(Path(keywords["model"]))
        if gpus:
            keywords["gpus_per_node"] = len(gpus)
        return cls(LLM(**keywords), settings, tokenizer)

    def submit(
        self,
        request: GenerationRequest,
        on_delta: Callable[[Delta], None] | None = None,
        on_done: Callable[[Completion | TrtspecError], None] | None = None,
    ) -> None:
        """Hand a request to TensorRT-LLM; waits for the event loop's turn, milliseconds, so that it can be refused."""
        check_request(request, self.info.spec)
        if problem := refusal(request.sampling, self._contract, self._settings.speculative_config):
            raise ValueError(problem)
        answer = self._answer(request)
        started: Future[None] = Future()
        most = self._settings.trtspec.max_queue_size
        with self._lock:
            if self._closing:
                raise SetupError("the runtime is closed")
            if request.request_id in self._open:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            if len(self._open) >= self.info.spec.max_batch + most:
                raise Refused(f"{most} requests are waiting already (max_queue_size); try again later")
            self._open.add(request.request_id)
            self._loop.call_soon_threadsafe(self._start, answer, on_delta, on_done, started)
        started.result()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._open:
                self._loop.call_soon_threadsafe(self._cancel, request_id)

    def stats(self) -> RuntimeStats:
        """Of the requests TensorRT-LLM holds, as many as it has slots count as being decoded."""
        slots, held = self.info.spec.max_batch, len(self._open)
        return RuntimeStats(min(held, slots), max(held - slots, 0), slots)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._llm.shutdown()

    def _answer(self, request: GenerationRequest) -> Answer:
        sampling = request.sampling
        room = self.info.spec.max_seq_len - len(request.prompt)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        model_stops = () if sampling.ignore_eos else self.tokenizer.stop_ids
        return Answer(
            request=request,
            seed=seed,
            limit=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            stop_ids=frozenset(model_stops).union(sampling.stop_token_ids),
            target=_Reported(),
            random=PositionRandom(seed),
            text=self.tokenizer.stream(sampling.stop),
            submitted_s=time.perf_counter(),
            prompt=np.array(request.prompt, np.int64),
        )

    # The event loop's thread

    def _start(self, answer: Answer, on_delta: Any, on_done: Any, started: Future[None]) -> None:
        request = answer.request
        try:
            keywords = sampling_keywords(
                request.sampling, limit=answer.limit, stop_ids=answer.stop_ids, seed=answer.seed
            )
            output = self._llm.generate_async(
                list(request.prompt), self._sampling_class(**keywords), streaming=True
            )
            task = self._loop.create_task(self._follow(output, answer, on_delta, on_done))
            self._tasks[request.request_id] = task
        except Exception as error:
            self._forget(request.request_id)
            started.set_exception(self._told(error))
        else:
            started.set_result(None)

    async def _follow(self, output: Any, answer: Answer, on_delta: Any, on_done: Any) -> None:
        """Pass one request's chunks on until it ends, here or there."""
        last: Delta | None = None
        error: TrtspecError | None = None
        try:
            async for result in output:
                for delta in self._deltas(answer, result.outputs[0]):
                    if delta.finish_reason is not None:
                        last = delta
                        break
                    if on_delta is not None:
                        on_delta(delta)
                if last is not None:
                    break
            else:
                error = StageFailed("TensorRT-LLM ended the request without a reason")
        except asyncio.CancelledError:
            last = answer.cancel()
        except Exception as cause:
            error = cause if isinstance(cause, TrtspecError) else StageFailed(f"TensorRT-LLM failed: {cause}")
        if not output.finished:
            output.abort()
        # A client that has its last chunk may ask again at once: its place is free before.
        self._forget(answer.request.request_id)
        if last is not None and on_delta is not None:
            on_delta(last)
        if on_done is not None:
            on_done(error or answer.completion(time.perf_counter()))

    def _deltas(self, answer: Answer, output: Any) -> Iterator[Delta]:
        """What one chunk adds. output: TensorRT-LLM's, whose lists grow from chunk to chunk."""
        had = len(answer.tokens)
        new = tuple(output.token_ids[had:])
        logprobs = _logprobs(output, had, new) if answer.request.sampling.logprobs else ()
        # The first token is the prompt's and belongs to no verify step, whatever came along with it.
        cuts = (0, len(new)) if had else (0, min(1, len(new)), len(new))
        for begin, end in pairwise(cuts):
            if begin < end and answer.finish_reason is None:
                verdict = Verdict(new[begin:end], tuple(range(end - begin - 1)))
                drafted = self._settings.draft_length if answer.tokens else 0
                yield answer.emit(verdict, logprobs[begin:end], drafted, time.perf_counter())
        if output.finish_reason is not None and answer.finish_reason is None:
            if output.finish_reason not in ("stop", "length", "cancelled"):
                raise StageFailed(f"TensorRT-LLM ended the request: {output.finish_reason}")
            last = replace(answer.cancel(), finish_reason=output.finish_reason)
            answer.finish_reason = last.finish_reason
            yield last

    def _cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            self._loop.call_soon(task.cancel)  # a task that has not begun would end without a word

    def _forget(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        with self._lock:
            self._open.discard(request_id)

    async def _end_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _told(self, error: Exception) -> Exception:
        """A request that TensorRT-LLM finds wrong, or the end of TensorRT-LLM."""
        if isinstance(error, self._request_errors):
            return ValueError(str(error))
        failed = StageFailed(f"TensorRT-LLM takes no requests any more: {error}")
        failed.__cause__ = error
        return failed


def gpus_of(instance: str, gpu_device_ids: str) -> tuple[str, ...]:
    """The GPUs of one model instance, of Triton's name for it ("tensorrt_llm_0_1") and all lists ("0,1;2,3")."""
    lists = [tuple(gpu.strip() for gpu in group.split(",")) for group in gpu_device_ids.split(";")]
    number = int(instance.rpartition("_")[2])
    if number >= len(lists):
        raise SetupError(f"instance {number} has no GPUs: gpu_device_ids is {gpu_device_ids!r}")
    return lists[number]


def _set_environment(gpus: Sequence[str]) -> None:
    """CUDA opens devices as soon as it is loaded, and workers inherit them: say which before that."""
    for name in [name for name in os.environ if _LAUNCHERS.match(name)]:
        del os.environ[name]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = ",".join(gpus)


class _Reported:
    """Log probabilities that TensorRT-LLM computed, in place of a distribution to compute them from."""

    def logprob(self, reported: float, _token: int) -> float:
        return reported


def _logprobs(output: Any, had: int, new: Sequence[int]) -> tuple[float, ...]:
    """Those of `new`. An entry is a number, or what it is for each of some tokens, the chosen one among them."""
    entries = (output.logprobs or [])[had:]
    if len(entries) != len(new):
        raise StageFailed("TensorRT-LLM did not return the log probabilities it was asked for")
    found = [
        entry[token] if isinstance(entry, Mapping) else entry
        for entry, token in zip(entries, new, strict=True)
    ]
    return tuple(float(getattr(entry, "logprob", entry)) for entry in found)
