"""`trtspec serve`: a Triton server that is watched, restarted when it or a model instance dies, and drained.

Triton does not restart a model instance that died: the model goes on reporting ready, and the requests it was
answering stay open for good. So instances are counted every second, asked every ten, and replaced: through
the load API when other instances still serve, else with the whole server, which also ends those requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import SetupError, StageFailed
from trtspec.events import Emit, Note
from trtspec.serve.triton import ServerOptions, TritonServer

if TYPE_CHECKING:
    from trtspec.serve.openai.front import OpenAIFront

_LOOK_S = 1.0
_PROBE_S = 10.0
# An instance that is only busy answers late now and then.
_PROBES_FAILED = 3
_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
# Once it has run so long, a restart counts as a success and the next failure as a first one.
_HEALTHY_S = 60.0
# TensorRT-LLM reads weights, splits them over ranks and tunes kernels when it starts.
_LLM_LOAD_S = 3600


def options_from_build(build: Path, **changes: object) -> ServerOptions:
    """How the config in a build folder says to serve it; `changes` are `ServerOptions` fields that win.

    Raises SetupError when the folder holds no build, or one that was stopped before it was packaged, and for a build of
    the tensorrt_llm backend where TensorRT-LLM is not.
    """
    from trtspec.config import load_config

    if not (build / "config.yaml").is_file() or not (build / "repository").is_dir():
        raise SetupError(
            "this is not a build that can be served: it needs config.yaml and repository/",
            where=str(build),
            hint="run `trtspec build CONFIG` first, without --until",
        )
    config = load_config(build / "config.yaml")
    serving = config.serving
    options = ServerOptions(
        served_repository(build, config.engine.backend),
        address=serving.address,
        http_port=serving.http_port,
        grpc_port=serving.grpc_port,
        metrics_port=serving.metrics_port,
    )
    if config.engine.backend == "tensorrt_llm":
        if find_spec("tensorrt_llm") is None:
            raise SetupError(
                "TensorRT-LLM is not installed here; NVIDIA's containers, which have it, serve this build",
                where=str(build),
                hint=f"{build / 'trtllm' / 'README.md'} has the commands",
            )
        options = replace(options, load_timeout_s=_LLM_LOAD_S)
    return replace(options, **changes)


def served_repository(build: Path, backend: str) -> Path:
    """The repository of a build around trtspec's own model; `repository` of a TensorRT-LLM build is the stock one."""
    return build / ("trtllm/repository" if backend == "tensorrt_llm" else "repository")


def ready_text(server: TritonServer) -> str:
    """Where a ready server is, and a command that talks to it."""
    url = f"{server.http_url}/v2/models/{server.models[0]}/generate_stream"
    return (
        f"serving {', '.join(server.models)}; Ctrl-C drains and stops\n"
        f"  HTTP     {server.http_url}\n"
        f"  gRPC     {server.grpc_url}\n"
        f"  metrics  {server.metrics_url}\n"
        f"  log      {server.log}\n\n"
        f"curl -N -H 'Content-Type: application/json' {url} \\\n"
        """  -d '{"text_input": "Once upon a time", "streaming": true, "sampling_param_max_tokens": 32}'"""
    )


def serve_forever(
    options: ServerOptions,
    *,
    emit: Emit,
    ready: Callable[[TritonServer], None],
    open_front: Callable[[TritonServer], OpenAIFront] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain; returns 0 when every stream finished, 1 when some were cut.

    ready is called once, when every model is loaded and the front, if `open_front` makes one, listens. A second
    signal stops at once. Main thread only.
    Raises SetupError for a busy port or a missing server, StageFailed when the models do not load, or do not
    stay alive after several restarts in a row.
    """
    stopping = threading.Event()
    server = TritonServer(options)
    front: OpenAIFront | None = None

    def on_signal(number: int, _frame: object) -> None:
        if stopping.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
        stopping.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        if server.wait_ready(options.load_timeout_s, stopping):
            if open_front is not None:
                front = open_front(server)
                front.start()
            ready(server)
            keeper = Keeper(server, emit, stopping)
            while not stopping.wait(_LOOK_S):
                keeper.look()
        emit(Note("serve", f"draining; running streams have {options.drain_timeout_s} s to finish"))
        if front is not None:  # its streams are the server's: both drain at once, in the same time
            front.drain(options.drain_timeout_s)
        code = server.stop()
    finally:
        if front is not None:
            front.close()
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code != 0:
        emit(Note("serve", f"the drain ended with running streams (Triton's exit code {code})", "warning"))
    return 1 if code else 0


class Keeper:
    """Notices that a server or one of its model instances is dead, and replaces it. Call look() often."""

    def __init__(self, server: TritonServer, emit: Emit, stopping: threading.Event) -> None:
        self._server = server
        self._emit = emit
        self._stopping = stopping
        self._stubs: frozenset[int] | None = None  # as last seen; None: count them all at the next look
        self._next_probe = time.monotonic() + _PROBE_S
        self._unanswered = dict.fromkeys(server.models, 0)
        self._failures = 0
        self._healthy_since = time.monotonic()

    def look(self) -> None:
        """One look. Returns after a recovery, if one was needed, succeeded or `stopping` was set."""
        server = self._server
        if (code := server.exit_code()) is not None:
            self._recover(f"Triton died (exit code {code}){server.told()}", ())
            return
        stubs = frozenset(server.stubs())
        # A gone instance is missed only where its model still claims to be there: unloading is no fault.
        gone = self._stubs is None or self._stubs - stubs
        if gone and (dead := server.dead_models()):
            self._recover(f"an instance of {', '.join(dead)} died", dead if stubs else ())
            return
        self._stubs = stubs
        if time.monotonic() >= self._next_probe:
            self._probe()

    def _probe(self) -> None:
        self._next_probe = time.monotonic() + _PROBE_S
        loaded = set(self._server.stubs().values())
        for model in self._server.models:
            problem = self._server.probe(model) if model in loaded else None
            self._unanswered[model] = self._unanswered[model] + 1 if problem else 0
            if problem and self._unanswered[model] >= _PROBES_FAILED:
                self._recover(f"{model} does not answer ({problem})", ())
                return

    def _recover(self, reason: str, models: tuple[str, ...]) -> None:
        """Load `models` again, or, when none are named, start the whole server again; with growing pauses."""
        if time.monotonic() - self._healthy_since > _HEALTHY_S:
            self._failures = 0
        while not self._stopping.is_set():
            if self._failures == len(_BACKOFF_S):
                raise StageFailed(f"gave up after {self._failures} restarts in a row: {reason}")
            pause = _BACKOFF_S[self._failures]
            self._failures += 1
            what = f"loading {', '.join(models)} again" if models else "restarting Triton"
            self._emit(Note("serve", f"{reason}; {what}{f' in {pause:g} s' if pause else ''}", "warning"))
            if self._stopping.wait(pause):
                return
            problem = self._reload(models) if models else self._restart()
            if problem is None:
                break
            reason, models = problem, ()
        self._healthy_since = time.monotonic()
        self._next_probe = time.monotonic() + _PROBE_S
        self._stubs = None
        self._unanswered = dict.fromkeys(self._server.models, 0)
        self._emit(Note("serve", "serving again"))

    def _reload(self, models: tuple[str, ...]) -> str | None:
        for model in models:
            if problem := self._server.reload(model):
                return f"{model} could not be loaded again ({problem})"
        return None

    def _restart(self) -> str | None:
        self._server.restart()
        try:
            self._server.wait_ready(self._server.options.load_timeout_s, self._stopping)
        except StageFailed as error:
            return error.message
        return None
