"""A server that only keeps time: every stream gets a chunk each step, and it remembers when it sent what.

python -m tests.bench.stream_stub openai|triton --step-ms 50

It prints its port, serves until its input ends, and then prints {seed of a request: [when each chunk was sent, …]}, in
seconds of the host's monotonic clock. openai: chat completions as server-sent events, one token a character. triton:
gRPC's ModelStreamInfer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

DRAFTED, ACCEPTED = 3, 3
PER_STEP = ACCEPTED + 1


class Pace:
    """When chunks are due, and when they were handed to the transport."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.sent: dict[int, list[float]] = {}

    async def chunks(self, seed: int, tokens: int) -> AsyncIterator[int]:
        """Yields the tokens of each chunk when it is due: the prefill token, then those of each step."""
        sent = self.sent[seed] = []
        due = time.monotonic()
        for size in (1, *[PER_STEP] * ((tokens - 1) // PER_STEP)):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent.append(time.monotonic())
            yield size
            due += self._step_s


async def serve_openai(pace: Pace) -> tuple[Any, int]:
    """Start it on a free loopback port; the server, which runs as long as it is kept, and the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            if head.startswith("GET"):  # the client asks for a list of models
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            fields = dict(line.lower().split(": ", 1) for line in head.strip().split("\r\n")[1:])
            asked = json.loads(await reader.readexactly(int(fields["content-length"])))
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            steps = 0
            async for tokens in pace.chunks(asked["seed"], asked["max_tokens"]):
                writer.write(_event({"choices": [{"index": 0, "delta": {"content": "x" * tokens}}]}))
                steps += tokens > 1
            writer.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
            told = {"per_step_drafted": [DRAFTED] * steps, "per_step_accepted": [ACCEPTED] * steps}
            usage = {"prompt_tokens": 8, "completion_tokens": 1 + PER_STEP * steps}
            writer.write(_event({"choices": [], "usage": usage, "metrics": {"speculative_decoding": told}}))
            writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    return server, server.sockets[0].getsockname()[1]


async def _head(reader: asyncio.StreamReader) -> str | None:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _event(event: dict[str, Any]) -> bytes:
    return _chunk(b"data: %s\n\n" % json.dumps(event).encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve_triton(pace: Pace) -> tuple[Any, int]:
    """Start it on a free loopback port; the server, which runs as long as it is kept, and the port."""
    import grpc
    from tritonclient.grpc import service_pb2

    first = _response(service_pb2, {"text_output": "x", "token_ids": [7]})
    told = {"drafted_per_step": DRAFTED, "accepted_per_step": ACCEPTED}
    step = _response(service_pb2, {"text_output": "x" * PER_STEP, "token_ids": [7] * PER_STEP, **told})

    async def answer(requests: Any, _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            raw = {t.name: r for t, r in zip(request.inputs, request.raw_input_contents, strict=True)}
            seed = int(np.frombuffer(raw["sampling_param_seed"], np.uint64)[0])
            limit = int(np.frombuffer(raw["sampling_param_max_tokens"], np.int32)[0])
            steps = 0
            async for tokens in pace.chunks(seed, limit):
                steps += tokens > 1
                yield step if tokens > 1 else first
            totals = {"prompt_tokens": 8, "completion_tokens": 1 + PER_STEP * steps, "num_steps": steps}
            totals |= {"total_draft_tokens": DRAFTED * steps, "total_accepted_draft_tokens": ACCEPTED * steps}
            yield _response(service_pb2, {"finish_reason": "length", **totals}, final=True)

    # Without a serializer, so that a chunk costs the server next to nothing.
    method = grpc.stream_stream_rpc_method_handler(answer, service_pb2.ModelInferRequest.FromString)
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelStreamInfer": method}
    )
    server = grpc.aio.server(handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


def _response(pb2: Any, outputs: dict[str, Any], *, final: bool = False) -> bytes:
    message = pb2.ModelStreamInferResponse()
    answer = message.infer_response
    answer.parameters["triton_final_response"].bool_param = final
    for name, value in outputs.items():
        if isinstance(value, str):
            data = value.encode()
            raw, kind, count = len(data).to_bytes(4, "little") + data, "BYTES", 1
        else:
            values = np.atleast_1d(np.asarray(value, np.int32))
            raw, kind, count = values.tobytes(), "INT32", len(values)
        answer.outputs.add(name=name, datatype=kind, shape=[count])
        answer.raw_output_contents.append(raw)
    return message.SerializeToString()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("protocol", choices=("openai", "triton"))
    parser.add_argument("--step-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    serve = serve_openai if arguments.protocol == "openai" else serve_triton
    pace = Pace(arguments.step_ms / 1e3)
    _server, port = await serve(pace)
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(pace.sent), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
