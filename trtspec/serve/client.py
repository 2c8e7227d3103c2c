"""Talk to a served model over gRPC: many concurrent streams on one connection, each a plain iterator.

    with TritonClient("127.0.0.1:8001", "tensorrt_llm") as client:
        for chunk in client.stream(GenerationRequest("r1", prompt_ids, SamplingParams(max_tokens=64))):
            print(chunk.text, end="")

A client may be shared by any number of threads. A stream is cancelled by `cancel()`, by leaving its `with`
block, or when it is collected; the server then frees the request's slot within a few tokens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtspec.errors import TrtspecError
from trtspec.package.contract import INPUT_BY_NAME, WIRE_TYPES, split_status
from trtspec.values import FinishReason, GenerationRequest, SamplingParams

# Read when gRPC is imported. Its handlers of fork() abort the child now and then while streams run, and a child of ours
# only becomes another program: a server that is started again.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_NUMPY = {"BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32}
# Prompts and answers are small; this is the limit of one message, not an allocation.
_MESSAGE_BYTES = 256 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A connection of its own: channels to one address share one otherwise, and its flow control.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted server is back in seconds; gRPC would look for it again only after minutes.
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# How Triton's own error of a model that is not loaded begins.
_NO_MODEL = "Request for unknown model"


class RequestFailed(TrtspecError):
    """The server refused or lost one request. `code` is the gRPC status or server's code in words."""

    kind = "request"

    def __init__(self, message: str, *, code: str, where: str | None = None) -> None:
        super().__init__(message, where=where)
        self.code = code


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of a finished request, counted by the server.

    steps: verify steps (the prefill is not one). acceptance_length: tokens per verify step, None without one.
    cumulative_logprob: only when asked for.
    """

    prompt_tokens: int
    completion_tokens: int
    steps: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response: what one engine step added (of a request that does not stream: everything at once).

    steps: (drafted, accepted) of each verify step behind it; empty for the prefill token. drafted, accepted:
    their sums. token_logprobs: of token_ids, empty unless asked for. at_s: `time.perf_counter()` when it was
    received. finish_reason, stop_reason and usage are on the last chunk only; stop_reason is None when neither
    a stop string nor a stop id ended the text.
    """

    text: str
    token_ids: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    final: bool
    at_s: float
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    usage: Usage | None = None
    token_logprobs: tuple[float, ...] = ()

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.steps)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.steps)


class Stream:
    """The chunks of one request, in order. Iterate once; its `with` block cancels it when left early."""

    def __init__(self, call: Any, request_id: str) -> None:
        self._call = call
        self.request_id = request_id

    def __iter__(self) -> Iterator[Chunk]:
        import grpc

        complete, refused = False, None
        try:
            # The server ends the call after the last response, or after the error that refuses a request. Waiting
            # for that matters: Triton 2.51 may lose track of a request whose call is cancelled just as it
            # completes, and then never shuts down, or dies of it.
            for response in self._call:
                complete = bool(response.error_message)
                if complete:
                    refused = _refused(response.error_message, self.request_id)
                    continue
                chunk = read_chunk(response.infer_response)
                complete = chunk.final
                yield chunk
        except grpc.RpcError as error:
            raise RequestFailed(
                error.details() or "the connection broke", code=error.code().name, where=self.request_id
            ) from error
        finally:
            if not complete:
                self._call.cancel()
        if refused is not None:
            raise refused
        if not complete:
            raise RequestFailed("the stream ended early", code="INCOMPLETE", where=self.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop the request; harmless when it has ended. An iteration under way gets RequestFailed."""
        self._call.cancel()


class TritonClient:
    """One gRPC connection to `address` ("host:port") and one model on it."""

    def __init__(self, address: str, model: str) -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.model = model

    def __enter__(self) -> TritonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which cancels its streams."""
        self._channel.close()

    def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers and has the model loaded."""
        import grpc
        from tritonclient.grpc import service_pb2

        try:
            request = service_pb2.ModelReadyRequest(name=self.model)
            return self._stub.ModelReady(request, timeout=timeout_s).ready
        except grpc.RpcError:
            return False

    def stream(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Stream:
        """Start a request given as token ids; its chunks stream, one per engine step."""
        return self._start(request.request_id, {"input_ids": request.prompt}, request.sampling, timeout_s)

    def stream_text(
        self, request_id: str, text: str, sampling: SamplingParams, *, timeout_s: float | None = None
    ) -> Stream:
        """Start a raw completion of `text`; the server tokenizes it."""
        return self._start(request_id, {"text_input": text}, sampling, timeout_s)

    def stream_chat(
        self,
        request_id: str,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
    ) -> Stream:
        """Start the answer to a conversation of {role, content}; the server applies the chat template."""
        return self._start(request_id, {"messages": json.dumps(list(messages))}, sampling, timeout_s)

    def stop(self, request_id: str, timeout_s: float = 10.0) -> None:
        """End the running request with this id, whoever started it."""
        for _ in Stream(self._call(request_id, {"stop": True}, timeout_s), request_id):
            pass

    def _start(
        self, request_id: str, prompt: dict[str, Any], sampling: SamplingParams, timeout_s: float | None
    ) -> Stream:
        inputs = generation_inputs(prompt, sampling, streaming=True)
        return Stream(self._call(request_id, inputs, timeout_s), request_id)

    def _call(self, request_id: str, inputs: Mapping[str, Any], timeout_s: float | None) -> Any:
        message = infer_message(self.model, request_id, inputs)
        return self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s)


def _refused(text: str, request_id: str) -> RequestFailed:
    """What an error in a stream says; see `contract.STATUSES`."""
    message, status = split_status(text)
    if status is None:
        status = "NOT_FOUND" if text.startswith(_NO_MODEL) else "error"
    return RequestFailed(message, code=status, where=request_id)


async def stream_chunks(
    stub: Any, model: str, request_id: str, inputs: Mapping[str, Any]
) -> AsyncIterator[Chunk]:
    """The chunks of one request over an asynchronous stub (grpc.aio). Closing the iterator early cancels the request.

    Raises RequestFailed when the server refuses or loses it.
    """
    import grpc

    call = stub.ModelStreamInfer(iter([infer_message(model, request_id, inputs)]))
    complete, refused = False, None
    try:
        # Read to the end: see `Stream` for what cancelling a request that just completes does to Triton.
        async for response in call:
            complete = bool(response.error_message)
            if complete:
                refused = _refused(response.error_message, request_id)
                continue
            chunk = read_chunk(response.infer_response)
            complete = chunk.final
            yield chunk
    except grpc.RpcError as error:
        raise RequestFailed(
            error.details() or "the connection broke", code=error.code().name, where=request_id
        ) from error
    finally:
        if not complete:
            call.cancel()
    if refused is not None:
        raise refused
    if not complete:
        raise RequestFailed("the stream ended early", code="INCOMPLETE", where=request_id)


def generation_inputs(
    prompt: Mapping[str, Any], sampling: SamplingParams, *, streaming: bool
) -> dict[str, Any]:
    """Every llmapi input of a generation request. prompt: one of text_input, messages, input_ids."""
    return {
        **prompt,
        **sampling_inputs(sampling),
        "streaming": streaming,
        "accumulate_text": False,
        "return_finish_reason": True,
        "return_stop_reason": True,
    }


def infer_message(model: str, request_id: str, inputs: Mapping[str, Any]) -> Any:
    """The gRPC request that carries `inputs`, each typed by the contract; its answer ends with a final response."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        kind = WIRE_TYPES[INPUT_BY_NAME[name].data_type]
        values = list(value) if isinstance(value, tuple | list) else [value]
        message.inputs.add(name=name, datatype=kind, shape=[len(values)])
        message.raw_input_contents.append(_raw(kind, values))
    return message


def sampling_inputs(sampling: SamplingParams) -> dict[str, Any]:
    """The llmapi inputs that mean `sampling`; what has its default is left out."""
    if sampling.stop_token_ids:
        raise ValueError("stop_token_ids have no llmapi input; the served model stops at its own stop ids")
    default = SamplingParams()
    named = ("max_tokens", "temperature", "top_k", "top_p", "seed", "presence_penalty", "frequency_penalty")
    named += ("repetition_penalty", "stop", "ignore_eos")
    inputs = {
        f"sampling_param_{name}": getattr(sampling, name)
        for name in named
        if getattr(sampling, name) != getattr(default, name)
    }
    return {**inputs, "return_cumulative_logprob": True} if sampling.logprobs else inputs


def _raw(kind: str, values: Sequence[Any]) -> bytes:
    """A tensor's bytes on the wire: little-endian numbers, or strings each after its length."""
    if kind != "BYTES":
        return np.array(values, dtype=_NUMPY[kind]).tobytes()
    encoded = [value.encode("utf-8") for value in values]
    return b"".join(len(item).to_bytes(4, "little") + item for item in encoded)


def read_chunk(response: Any) -> Chunk:
    """One `ModelInferResponse` as a chunk, received now."""
    outputs = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        outputs[output.name] = _values(output.datatype, raw)
    final = response.parameters["triton_final_response"].bool_param
    return read_outputs(outputs, at_s=time.perf_counter(), final=final)


def read_outputs(outputs: Mapping[str, tuple[Any, ...]], *, at_s: float, final: bool) -> Chunk:
    """The outputs of one response, each a tuple of its elements by the contract's name, as a chunk."""
    drafted, accepted = (outputs.get(f"{name}_per_step", ()) for name in ("drafted", "accepted"))
    stop_reason = _first(outputs, "stop_reason")
    return Chunk(
        text="".join(outputs.get("text_output", ())),
        token_ids=outputs.get("token_ids", ()),
        steps=tuple(zip(drafted, accepted, strict=True)),
        final=final,
        at_s=at_s,
        finish_reason=_first(outputs, "finish_reason"),
        stop_reason=None if stop_reason == "None" else stop_reason,
        usage=_usage(outputs) if "completion_tokens" in outputs else None,
        token_logprobs=outputs.get("token_logprobs", ()),
    )


def _usage(outputs: Mapping[str, tuple[Any, ...]]) -> Usage:
    return Usage(
        prompt_tokens=outputs["prompt_tokens"][0],
        completion_tokens=outputs["completion_tokens"][0],
        steps=outputs["num_steps"][0],
        drafted=outputs["total_draft_tokens"][0],
        accepted=outputs["total_accepted_draft_tokens"][0],
        acceptance_length=_first(outputs, "acceptance_length"),
        cumulative_logprob=_first(outputs, "cumulative_logprob"),
    )


def _first(outputs: Mapping[str, tuple[Any, ...]], name: str) -> Any:
    return outputs[name][0] if name in outputs else None


def _values(kind: str, raw: bytes) -> tuple[Any, ...]:
    if kind != "BYTES":
        return tuple(np.frombuffer(raw, dtype=_NUMPY[kind]).tolist())
    values, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        values.append(raw[at + 4 : at + 4 + size].decode("utf-8"))
        at += 4 + size
    return tuple(values)
