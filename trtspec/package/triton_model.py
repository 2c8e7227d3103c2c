"""The Triton model behind every repository trtspec packages: llmapi tensors in front of one `GenerationBackend`.

Threads of one instance, and what each may do:

    Triton's      execute() checks a request, tokenizes it, submits it and returns; it never waits
    engine's      (inside the backend) decodes all requests together; `on_delta` only puts into a queue
    responder     builds and sends every response, updates metrics, notices cancelled clients

So a slow client or a busy metrics lock never holds up a decoding step. Imported inside Triton's Python
backend only, which is where `triton_python_backend_utils` exists.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtspec.errors import TrtspecError
from trtspec.package.contract import INPUT_BY_NAME, OUTPUT_BY_NAME, QUEUE_FULL, with_status
from trtspec.package.metrics import ModelMetrics, RequestOutcome
from trtspec.package.protocol import GenerationBackend
from trtspec.package.requests import (
    BadRequest,
    Limits,
    ModelRequest,
    check_parameters,
    check_prompt_length,
    is_stop,
    parse_request,
)
from trtspec.package.settings import MODEL_YAML, LLMSettings, Settings, load_settings
from trtspec.runtime import Refused, Runtime
from trtspec.values import Completion, Delta, GenerationRequest

# Streaming clients are checked for cancellation with every so many responses, besides the periodic check.
RESPONSES_PER_CANCELLATION_CHECK = 4

_NUMPY = {
    name: np.dtype(pb_utils.triton_string_to_numpy(tensor.data_type))
    for name, tensor in OUTPUT_BY_NAME.items()
}


@dataclass(slots=True, eq=False)
class _Stream:
    """One running request; after its birth only the responder thread touches it.

    text, token_ids, token_logprobs: what no response has carried yet (with `accumulate`, text is never emptied).
    sent_steps: how many of `steps`, (drafted, accepted) pairs, have been sent.
    """

    id: str
    client_id: str
    sender: Any
    request: ModelRequest
    outputs: frozenset[str]
    prompt_tokens: int
    accumulate: bool
    arrived_ns: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    sent_steps: int = 0
    generated: int = 0
    logprob: float = 0.0
    first_ns: int | None = None
    last_ns: int | None = None
    responses: int = 0
    cancelled: bool = False

    def add(self, delta: Delta, now_ns: int) -> None:
        self.text += delta.text
        self.logprob += sum(delta.logprobs)
        if not delta.token_ids:
            return
        self.first_ns = self.first_ns or now_ns
        self.last_ns = now_ns
        self.token_ids += delta.token_ids
        self.token_logprobs += delta.logprobs
        self.generated += len(delta.token_ids)
        if delta.step > 0:
            self.steps.append((delta.drafted, delta.accepted))

    def take(self) -> dict[str, Any]:
        """What the next response carries: outputs by name, as lists."""
        steps = self.steps[self.sent_steps :]
        values = {
            "text_output": [self.text.encode("utf-8")],
            "token_ids": self.token_ids,
            "token_logprobs": self.token_logprobs,
            "drafted_per_step": [drafted for drafted, _ in steps],
            "accepted_per_step": [accepted for _, accepted in steps],
        }
        self.sent_steps = len(self.steps)
        self.token_ids, self.token_logprobs = [], []
        self.text = self.text if self.accumulate else ""
        return values

    def outcome(self, finish_reason: str, now_ns: int) -> RequestOutcome:
        return RequestOutcome(
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            generated=self.generated,
            steps=self.steps,
            first_token_s=None if self.first_ns is None else (self.first_ns - self.arrived_ns) / 1e9,
            duration_s=((self.last_ns or now_ns) - self.arrived_ns) / 1e9,
        )

    def summary(self, outcome: RequestOutcome, stop_reason: str | int | None) -> dict[str, Any]:
        """What only the last response carries."""
        values: dict[str, Any] = {
            "acceptance_rate": [outcome.accepted / outcome.drafted if outcome.drafted else 0.0],
            "total_accepted_draft_tokens": [outcome.accepted],
            "total_draft_tokens": [outcome.drafted],
            "num_steps": [len(self.steps)],
            "prompt_tokens": [self.prompt_tokens],
            "completion_tokens": [self.generated],
        }
        if outcome.acceptance_length is not None:
            values["acceptance_length"] = [outcome.acceptance_length]
        if self.request.finish_reason:
            values["finish_reason"] = [outcome.finish_reason.encode()]
        if self.request.stop_reason:
            values["stop_reason"] = [str(stop_reason).encode()]
        if self.request.sampling.logprobs:
            values["cumulative_logprob"] = [self.logprob]
        if self.request.perf_metrics:
            values["arrival_time_ns"] = [self.arrived_ns]
            if self.first_ns is not None:
                values["first_token_time_ns"] = [self.first_ns]
                values["last_token_time_ns"] = [self.last_ns]
        return values


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Repeat model.yaml's policy, as TensorRT-LLM's model does, when the server completes configs."""
        settings = load_settings(Path(pb_utils.get_model_dir()) / MODEL_YAML)
        config.set_max_batch_size(settings.triton_config.max_batch_size)
        config.set_model_transaction_policy({"decoupled": settings.triton_config.decoupled})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(pb_utils.get_model_dir())
        self._settings = load_settings(folder / MODEL_YAML)
        self._runtime = self.open_runtime(folder, self._settings, args)
        spec = self._runtime.info.spec
        self._limits = Limits(max_seq_len=spec.max_seq_len, vocab_size=spec.tokenizer_vocab_size)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = ModelMetrics(pb_utils, labels, args["model_instance_name"])
        self._load = (0, 0)
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()  # guards _streams
        self._numbers = itertools.count(1)
        self._broken: TrtspecError | None = None
        # What the responder does next; None ends it.
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._responder = threading.Thread(target=self._respond, name="responder", daemon=True)
        self._responder.start()

    def open_runtime(self, folder: Path, settings: Settings, args: dict[str, str]) -> GenerationBackend:
        """What this instance serves. folder: where model.yaml lies."""
        if isinstance(settings, LLMSettings):
            from trtspec.trtllm.runtime import LLMRuntime, gpus_of

            parameter = json.loads(args["model_config"]).get("parameters", {}).get("gpu_device_ids")
            gpus = gpus_of(args["model_instance_name"], parameter["string_value"]) if parameter else ()
            return LLMRuntime.open(folder, settings, gpus)
        served = settings.trtspec
        return Runtime.open(
            folder / settings.model,
            speculate=served.speculate,
            draft_length=served.draft_length,
            max_concurrency=served.max_concurrency,
            max_queue=served.max_queue_size,
            reuse_prefixes=served.reuse_prefixes,
            threads=served.threads,
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except ValueError as error:  # BadRequest, and what the runtime itself finds wrong with a request
                _send_error(sender, str(error), "INVALID_ARGUMENT")
            except Refused:
                self._metrics.refused()
                _send_error(sender, self._refusal(), "UNAVAILABLE")
            except TrtspecError as error:  # the engine has stopped; nothing will be served any more
                self._broken = error
                _send_error(sender, error.message, "INTERNAL")
            except Exception as error:  # one request's failure must not take the others of this call with it
                pb_utils.Logger.log_error(f"request {request.request_id()!r}: {traceback.format_exc()}")
                _send_error(sender, f"{type(error).__name__}: {error}", "INTERNAL")

    def finalize(self) -> None:
        """Close the runtime. Triton calls this only when every request has had its last response."""
        self._runtime.close()
        self._events.put(None)
        self._responder.join()

    # Triton's thread

    def _start(self, request: Any, sender: Any) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        inputs = {
            name: value for name, value in inputs.items() if value is not None and name in INPUT_BY_NAME
        }
        parameter_id = check_parameters(request.parameters())
        client_id = request.request_id() or parameter_id
        if is_stop(inputs):
            self._stop(client_id, sender)
            return
        arrived_ns = time.monotonic_ns()
        parsed = parse_request(inputs, self._limits)
        prompt = self._tokenize(parsed)
        check_prompt_length(len(prompt), self._limits)
        stream = _Stream(
            id=f"{client_id}#{next(self._numbers)}",  # clients may use one id twice
            client_id=client_id,
            sender=sender,
            request=parsed,
            outputs=frozenset(request.requested_output_names()),
            prompt_tokens=len(prompt),
            accumulate=self._accumulate(parsed),
            arrived_ns=arrived_ns,
            text=parsed.text if parsed.echo_prompt else "",
        )
        with self._lock:
            self._streams[stream.id] = stream
        try:
            self._runtime.submit(
                GenerationRequest(stream.id, prompt, parsed.sampling),
                lambda delta: self._events.put(partial(self._answer, stream, delta, time.monotonic_ns())),
                lambda end: self._events.put(partial(self._ended, stream, end, time.monotonic_ns())),
            )
        except BaseException:
            with self._lock:
                del self._streams[stream.id]
            raise
        self._events.put(self._update_load)  # wakes the responder, so that it watches this client from now on

    def _stop(self, client_id: str, sender: Any) -> None:
        """End every running request with this id. A request that has just ended is no error."""
        if not client_id:
            raise BadRequest("stop needs the id of the request to end, as this request's own id")
        if self._broken is not None:
            raise self._broken
        with self._lock:
            named = [stream.id for stream in self._streams.values() if stream.client_id == client_id]
        for identity in named:
            self._runtime.cancel(identity)
        _send_last(sender, [pb_utils.Tensor("text_output", np.array([b""], dtype=np.object_))])

    def _refusal(self) -> str:
        stats, served = self._runtime.stats(), self._settings.trtspec
        return (
            f"{QUEUE_FULL}: {stats.active} requests are being decoded and {stats.queued} wait; "
            f"max_queue_size is {served.max_queue_size} (serving.max_queue_size of the config, "
            "trtspec.max_queue_size of model.yaml). Try again later"
        )

    def _tokenize(self, request: ModelRequest) -> tuple[int, ...]:
        tokenizer = self._runtime.tokenizer
        if request.input_ids is not None:
            return request.input_ids
        if request.messages is not None:
            return tuple(tokenizer.chat(request.messages))
        return tuple(tokenizer.encode(request.text))

    def _accumulate(self, request: ModelRequest) -> bool:
        if not request.streaming:
            return True
        if request.accumulate is not None:
            return request.accumulate
        return self._settings.trtspec.stream_text == "accumulated"

    # The responder thread

    def _respond(self) -> None:
        period_s = self._settings.triton_config.cancellation_check_period_ms / 1e3
        next_check = 0.0
        while True:
            busy = self._streams or self._load != (0, 0)
            try:
                event = self._events.get(timeout=period_s if busy else None)
                if event is None:
                    return
                event()
            except queue.Empty:
                pass
            if time.monotonic() >= next_check:
                with self._lock:
                    streams = list(self._streams.values())
                for stream in streams:
                    self._cancel_if_gone(stream)
                self._update_load()
                next_check = time.monotonic() + period_s

    def _answer(self, stream: _Stream, delta: Delta, now_ns: int) -> None:
        """Turn one step of one request into a response, where it makes one."""
        stream.add(delta, now_ns)
        try:
            if delta.finish_reason is not None:
                self._finish(stream, delta, now_ns)
            elif stream.request.streaming:
                tensors = _tensors(stream.take(), stream.outputs)
                stream.sender.send(pb_utils.InferenceResponse(output_tensors=tensors))
                stream.responses += 1
                if stream.responses % RESPONSES_PER_CANCELLATION_CHECK == 0:
                    self._cancel_if_gone(stream)
        except Exception:  # a client that cannot be answered must not silence the others
            pb_utils.Logger.log_error(f"request {stream.client_id!r}: {traceback.format_exc()}")
            self._cancel(stream)

    def _finish(self, stream: _Stream, delta: Delta, now_ns: int) -> None:
        """The last response, after the metrics: a client that scrapes afterwards sees its own request."""
        self._forget(stream)
        outcome = stream.outcome(delta.finish_reason, now_ns)
        try:
            self._account(outcome)
        finally:
            values = {**stream.take(), **stream.summary(outcome, delta.stop_reason)}
            _send_last(stream.sender, _tensors(values, stream.outputs))

    def _ended(self, stream: _Stream, end: Completion | TrtspecError, now_ns: int) -> None:
        """An engine error ends its request here; a completion was answered with its last delta."""
        if isinstance(end, TrtspecError):
            self._forget(stream)
            self._account(stream.outcome("error", now_ns))
            _send_error(stream.sender, end.message, "INTERNAL")

    def _account(self, outcome: RequestOutcome) -> None:
        self._metrics.finished(outcome)
        self._update_load()

    def _forget(self, stream: _Stream) -> None:
        with self._lock:
            del self._streams[stream.id]

    def _cancel_if_gone(self, stream: _Stream) -> None:
        if not stream.cancelled and stream.sender.is_cancelled():
            self._cancel(stream)

    def _cancel(self, stream: _Stream) -> None:
        stream.cancelled = True
        self._runtime.cancel(stream.id)

    def _update_load(self) -> None:
        stats = self._runtime.stats()
        if (stats.active, stats.queued) != self._load:
            self._load = (stats.active, stats.queued)
            self._metrics.load(*self._load)


def _tensors(values: dict[str, Any], wanted: frozenset[str]) -> list[Any]:
    """Output tensors of the wanted names; an empty one is left out, text_output excepted."""
    return [
        pb_utils.Tensor(name, np.array(value, dtype=_NUMPY[name]))
        for name, value in values.items()
        if value and name in wanted
    ]


def _send_last(sender: Any, tensors: list[Any]) -> None:
    response = pb_utils.InferenceResponse(output_tensors=tensors)
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _send_error(sender: Any, text: str, status: str) -> None:
    """status: one of contract.STATUSES; over HTTP, Triton makes its own of the code."""
    codes = {"INVALID_ARGUMENT": "INVALID_ARG"}
    error = pb_utils.TritonError(
        with_status(text, status), getattr(pb_utils.TritonError, codes.get(status, status))
    )
    response = pb_utils.InferenceResponse(output_tensors=[], error=error)
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
