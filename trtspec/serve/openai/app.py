"""The HTTP application: OpenAI's endpoints in front of an `Upstream`.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models[/NAME]   GET /health   GET /metrics

A request that fails before its first token has the status that says why; one that fails later, in a stream,
ends with an `error` event and without `[DONE]`. A client that goes away cancels its request on the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from aiohttp import http_exceptions, web

from trtspec.events import Emit, Note
from trtspec.serve.client import Chunk, RequestFailed
from trtspec.serve.openai.answers import Answer
from trtspec.serve.openai.errors import ApiError, from_server, unavailable
from trtspec.serve.openai.requests import Ask, openais_temperature, parse_chat, parse_completion
from trtspec.serve.openai.upstream import ServedModel

# A million tokens of text are about 4 MB; the server behind crashes on some larger bodies.
MAX_BODY_BYTES = 16 << 20
_BODY_S = 60.0
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server(Protocol):
    """What the application needs of the server behind it; `Upstream` is the real one."""

    async def ready(self, model: str) -> bool: ...

    async def metrics(self) -> str: ...

    def stream(
        self, model: str, request_id: str, prompt: Any, sampling: Any, *, streaming: bool
    ) -> AsyncGenerator[Chunk, None]: ...


class OpenAIApp:
    """Holds what requests share. `running`: requests being answered. `draining`: new ones get 503."""

    def __init__(self, server: Server, models: Sequence[ServedModel], emit: Emit) -> None:
        self._server = server
        self._models = {model.name: model for model in models}
        self._emit = emit
        self.running = 0
        self.draining = False

    def application(self) -> web.Application:
        """What an aiohttp runner serves."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._explain])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._list)
        app.router.add_get("/v1/models/{name}", self._one)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    # Endpoints

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        ask = parse_chat(await _body(request), self._default_temperature)
        return await self._answer(request, ask, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        ask = parse_completion(await _body(request), self._default_temperature)
        return await self._answer(request, ask, chat=False)

    async def _list(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_card(model) for model in self._models.values()]})

    async def _one(self, request: web.Request) -> web.Response:
        return _json(_card(self._model(request.match_info["name"])))

    async def _health(self, _: web.Request) -> web.Response:
        if self.draining:
            raise unavailable("the server is shutting down")
        for model in self._models:
            if not await self._server.ready(model):
                raise unavailable(f"{model} is not ready")
        return _json({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Triton's page. HEAD has an answer of its own, since Triton's has a body, which breaks kept-alive clients."""
        text = "" if request.method == "HEAD" else await self._server.metrics()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    # Generation

    async def _answer(self, request: web.Request, ask: Ask, *, chat: bool) -> web.StreamResponse:
        answer = Answer(ask, self._model(ask.model), chat=chat)
        with self._counted():
            async with aclosing(self._chunks(answer)) as chunks:
                if ask.stream:
                    return await self._streamed(request, answer, chunks)
                async for index, chunk in chunks:
                    answer.choices[index].add(chunk)
                return _json(answer.whole())

    def _chunks(self, answer: Answer) -> AsyncGenerator[tuple[int, Chunk], None]:
        ask, each = answer.ask, len(answer.ask.samplings)
        return merged(
            [
                self._server.stream(
                    ask.model,
                    f"{answer.id}-{choice.index}",
                    ask.prompts[choice.prompt],
                    ask.samplings[choice.index % each],
                    streaming=ask.stream,
                )
                for choice in answer.choices
            ]
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self.draining:
            raise unavailable("the server is shutting down")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _default_temperature(self, model: str) -> float:
        """Greedy where the model cannot sample: a client that asks for no temperature must not be refused for it."""
        known = self._models.get(model)
        return 0.0 if known is not None and not known.samples else openais_temperature(model)

    def _model(self, name: str) -> ServedModel:
        if name not in self._models:
            served = ", ".join(self._models)
            raise ApiError(
                404, f"there is no model {name!r}; served: {served}", "model", code="model_not_found"
            )
        return self._models[name]

    async def _streamed(
        self, request: web.Request, answer: Answer, chunks: AsyncIterator[tuple[int, Chunk]]
    ) -> web.StreamResponse:
        """Server-sent events, from the first chunk on: until then an error still has its status."""
        index, chunk = await anext(chunks)
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        try:
            for choice in answer.choices:
                await _send(response, answer.opening(choice))
            await _send(response, answer.part(answer.choices[index], chunk))
            async for index, chunk in chunks:
                await _send(response, answer.part(answer.choices[index], chunk))
            await _send(response, answer.closing())
        except ConnectionError:
            raise
        except Exception as error:
            await _send(response, self._explained(request, error).body())
        else:
            await response.write(_DONE)
        await response.write_eof()
        return response

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every failure as OpenAI's error object."""
        try:
            return await handler(request)
        except ConnectionError:  # the client went away; nobody reads an answer
            raise
        except Exception as error:
            told = self._explained(request, error)
            return web.json_response(told.body(), status=told.status, headers=told.headers)

    def _explained(self, request: web.Request, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestFailed):
            return from_server(error)
        if isinstance(error, web.HTTPException):  # aiohttp's own: no such path, wrong method, body too large
            allow = {name: value for name, value in error.headers.items() if name == "Allow"}
            return ApiError(error.status, error.text or error.reason, headers=allow)
        self._emit(Note("serve", f"{request.path}: {type(error).__name__}: {error}", "warning"))
        return ApiError(500, "an internal error of the server", code="internal_error")


async def merged(
    streams: Sequence[AsyncGenerator[Chunk, None]],
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of several streams as they come, with the stream's index; the first error ends them all."""
    waiting: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Chunk, None]) -> None:
        end = None
        async with aclosing(stream):
            try:
                async for chunk in stream:
                    waiting.put_nowait((index, chunk))
            except Exception as error:
                end = error
        waiting.put_nowait((index, end))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await waiting.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(response: web.StreamResponse, event: dict[str, Any] | None) -> None:
    if event is not None:
        await response.write(f"data: {_dumps(event)}\n\n".encode())


async def _body(request: web.Request) -> bytes:
    """The body of a JSON request. Its type is asked for, so that no foreign web page can send one unasked."""
    if request.content_type != "application/json":
        raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {_BODY_S:.0f} s") from error
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError) as error:
        raise ApiError(400, "the body is broken: not what its headers announce") from error


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "trtspec",
        "max_model_len": model.max_seq_len,
    }


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(text=_dumps(content), content_type="application/json")


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
