"""The Triton server behind the front: its models as their packages describe them, and its streams, asynchronous."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.engines.info import EngineInfo
from trtspec.package.settings import MODEL_YAML, LLMSettings, load_settings
from trtspec.serve.client import CHANNEL_OPTIONS, Chunk, RequestFailed, generation_inputs, stream_chunks
from trtspec.trtllm.contract import contract_for
from trtspec.trtllm.requests import refusal
from trtspec.values import SamplingParams

_READY_S = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """max_seq_len: prompt and output, in tokens. draft_length: most tokens drafted per step, 0 without drafting.

    created: Unix time its package was written. tokenizer: turns token ids into text for log probabilities.
    samples: whether it serves requests with a temperature above 0.
    """

    name: str
    max_seq_len: int
    draft_length: int
    created: int
    tokenizer: TextTokenizer
    samples: bool = True

    @classmethod
    def read(cls, folder: Path) -> ServedModel:
        """A model folder of a Triton repository that trtspec packaged."""
        file = folder / "1" / MODEL_YAML
        settings, created = load_settings(file), int(file.stat().st_mtime)
        if isinstance(settings, LLMSettings):
            contract = contract_for(settings.trtspec.version)
            refused = refusal(SamplingParams(temperature=1.0), contract, settings.speculative_config)
            return cls(
                name=folder.name,
                max_seq_len=settings.max_seq_len,
                draft_length=settings.draft_length,
                created=created,
                tokenizer=TextTokenizer.load(file.parent / settings.model),
                samples=refused is None,
            )
        engine = file.parent / settings.model
        info, served = EngineInfo.read(engine), settings.trtspec
        planned = info.speculation.get("draft_length", 0)
        draft_length = (served.draft_length or planned) if served.speculate else 0
        return cls(folder.name, info.spec.max_seq_len, draft_length, created, TextTokenizer.load(engine))


class Upstream:
    """One connection to `address` ("host:port"); made and used in one event loop. metrics_url: Triton's own."""

    def __init__(self, address: str, metrics_url: str) -> None:
        import aiohttp
        import grpc.aio
        from tritonclient.grpc import service_pb2_grpc

        self._channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # An idle kept-alive connection would hold up the server's drain.
        self._session = aiohttp.ClientSession(headers={"Connection": "close"})
        self._metrics_url = metrics_url

    async def close(self) -> None:
        """Close the connections, which cancels their streams."""
        await self._session.close()
        await self._channel.close()

    async def ready(self, model: str) -> bool:
        """Whether the server answers and has the model loaded."""
        import grpc
        from tritonclient.grpc import service_pb2

        try:
            request = service_pb2.ModelReadyRequest(name=model)
            return (await self._stub.ModelReady(request, timeout=_READY_S)).ready
        except grpc.RpcError:
            return False

    async def metrics(self) -> str:
        """Triton's Prometheus page. Raises RequestFailed when it does not answer."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_READY_S)
        try:
            async with self._session.get(self._metrics_url, timeout=timeout) as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed(f"no metrics: {error or type(error).__name__}", code="UNAVAILABLE") from error

    def stream(
        self,
        model: str,
        request_id: str,
        prompt: Mapping[str, Any],
        sampling: SamplingParams,
        *,
        streaming: bool,
    ) -> AsyncIterator[Chunk]:
        """The chunks of one request (without `streaming`: one). Closing the iterator early cancels the request.

        Raises RequestFailed when the server refuses or loses it.
        """
        inputs = generation_inputs(prompt, sampling, streaming=streaming)
        return stream_chunks(self._stub, model, request_id, inputs)
