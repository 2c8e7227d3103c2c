"""A model on a Triton server, over gRPC's streaming call or HTTP's `generate_stream`, with trtspec's tensors.

Chunks carry token ids and verify steps on both, so both give the same record. Times are the client's.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from trtspec.evaluate.lossless import Floats
from trtspec.evaluate.record import TargetFacts
from trtspec.evaluate.sse import EventClient
from trtspec.evaluate.targets import Answer, Message, assemble
from trtspec.serve.client import (
    CHANNEL_OPTIONS,
    Chunk,
    RequestFailed,
    generation_inputs,
    read_outputs,
    stream_chunks,
)
from trtspec.values import SamplingParams

_Result = TypeVar("_Result")


class TritonGrpc:
    """The model `model_name` at `address`, host:port of the server's gRPC endpoint.

    One event loop reads all streams: handing every chunk to a thread of its own costs twice as much, and hundreds of
    streams would wait for the client.
    """

    def __init__(self, address: str, model_name: str, facts: TargetFacts) -> None:
        self._model = model_name
        self.facts = facts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="eval-grpc", daemon=True)
        self._thread.start()
        self._channel, self._stub = self._run(self._connect(address))

    def chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        inputs = _inputs(messages, sampling)
        start = time.perf_counter()
        chunks = self._run(self._chunks(request_id, inputs))
        return Answer(assemble(request_id, chunks, start, sampling.seed or 0), None)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> Floats | None:
        return None  # the server's contract has no logits

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self, address: str) -> tuple[Any, Any]:
        import grpc.aio
        from tritonclient.grpc import service_pb2_grpc

        channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        return channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def _chunks(self, request_id: str, inputs: Mapping[str, Any]) -> list[Chunk]:
        return [chunk async for chunk in stream_chunks(self._stub, self._model, request_id, inputs)]

    async def _end(self) -> None:
        """Close the channel, and end whoever still reads from it."""
        await self._channel.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class TritonHttp:
    """The model `model_name` at `url` (http://HOST:PORT/v2)."""

    def __init__(self, url: str, model_name: str, facts: TargetFacts) -> None:
        self._server = EventClient(url, "/v2")
        self._path = f"{self._server.path}/models/{model_name}/generate_stream"
        self.facts = facts

    def chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Answer:
        inputs = _inputs(messages, sampling)
        start = time.perf_counter()
        chunks = self._chunks(request_id, inputs)
        return Answer(assemble(request_id, chunks, start, sampling.seed or 0), None)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> Floats | None:
        return None  # the server's contract has no logits

    def close(self) -> None:
        self._server.close()

    def _chunks(self, request_id: str, inputs: Mapping[str, Any]) -> Iterator[Chunk]:
        for at, event in self._server.events(self._path, inputs, request_id):
            if "error" in event:
                raise RequestFailed(str(event["error"]), code="error", where=request_id)
            # JSON has an element by itself where a tensor has one.
            outputs = {
                name: tuple(value) if isinstance(value, list) else (value,) for name, value in event.items()
            }
            yield read_outputs(outputs, at_s=at, final="completion_tokens" in event)


def _inputs(messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
    conversation = json.dumps([asdict(message) for message in messages])
    return generation_inputs({"messages": conversation}, sampling, streaming=True)
