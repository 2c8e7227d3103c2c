"""The front as a part of `trtspec serve`: one thread with an event loop, started, drained and closed from outside."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.errors import SetupError
from trtspec.events import Emit, silent
from trtspec.serve.openai.app import OpenAIApp, Server
from trtspec.serve.openai.upstream import ServedModel, Upstream
from trtspec.serve.ports import claim_ports
from trtspec.serve.supervise import served_repository

_LOOK_S = 0.05
# What a finished answer may still take to reach its client once the front closes.
_FLUSH_S = 2.0


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Where to listen; port 0 takes a free one. models: what is served, by the names clients use."""

    models: Sequence[ServedModel]
    address: str = "127.0.0.1"
    port: int = 9000

    @classmethod
    def from_build(cls, build: Path, **changes: object) -> FrontOptions:
        """How the config in a build folder says to serve it; `changes` are fields that win."""
        from trtspec.config import load_config

        config = load_config(build / "config.yaml")
        serving = config.serving
        configs = sorted(served_repository(build, config.engine.backend).glob("*/config.pbtxt"))
        models = tuple(ServedModel.read(config.parent) for config in configs)
        return replace(cls(models, serving.address, serving.openai_port), **changes)


class OpenAIFront:
    """Start it when the server behind is ready. `connect` makes its connection, in the front's own event loop."""

    def __init__(self, options: FrontOptions, connect: Callable[[], Upstream], emit: Emit = silent) -> None:
        self._options = options
        self._connect = connect
        self._emit = emit
        self._port = 0
        self._app: OpenAIApp | None = None
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="openai-front", daemon=True)

    @classmethod
    def before(cls, grpc_url: str, metrics_url: str, options: FrontOptions, emit: Emit) -> OpenAIFront:
        """A front before a running Triton server."""
        return cls(options, lambda: Upstream(grpc_url, metrics_url), emit)

    @property
    def url(self) -> str:
        host = f"[{self._options.address}]" if ":" in self._options.address else self._options.address
        return f"http://{host}:{self._port}"

    @property
    def running(self) -> int:
        """Requests being answered."""
        return 0 if self._app is None else self._app.running

    def start(self) -> None:
        """Listen, and return. Raises SetupError when the port is busy."""
        self._port = claim_ports(self._options.address, {"serving.openai_port": self._options.port})[
            "serving.openai_port"
        ]
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise SetupError(
                f"the OpenAI front cannot listen: {self._failure}", where=self.url
            ) from self._failure

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on and let running ones finish, `timeout_s` at most. Returns at once."""
        if self._app is not None:
            self._app.draining = True
        self._stop_at = time.monotonic() + timeout_s

    def close(self) -> None:
        """Wait for the drain to end (without one: cut running requests) and stop. Calling it twice is harmless."""
        if self._stop_at is None:
            self.drain(0)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failure = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        from aiohttp import web

        upstream: Server = self._connect()
        self._app = OpenAIApp(upstream, self._options.models, self._emit)
        # A handler is cancelled when its client goes away, and so is its request on the server.
        runner = web.AppRunner(
            self._app.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_FLUSH_S
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, self._options.address, self._port).start()
            self._up.set()
            while self._stop_at is None or (self._app.running and time.monotonic() < self._stop_at):
                await asyncio.sleep(_LOOK_S)
        finally:
            await runner.cleanup()
            await upstream.close()
