"""One Triton server process: start it, wait until it is ready, look after its model instances, stop it.

The process is in a session of its own, so that Ctrl-C in a terminal reaches trtspec alone, which then drains
it; and it gets a SIGTERM when trtspec itself dies. Whatever it makes (a folder of links, a log, shared-memory
regions with a prefix of their own) is removed when it stops.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from trtspec.errors import SetupError, StageFailed
from trtspec.serve.install import find_triton, link_backends, server_environment
from trtspec.serve.ports import claim_ports
from trtspec.serve.process import children, decisive_lines, die_with_parent

# A request id no client uses: stopping it answers at once, without touching the engine's slots.
_PROBE = {"id": "trtspec-probe", "stop": True}
# Past the drain, what Triton takes to end the last streams and unload models before it gives up.
_UNLOAD_S = 10
_STUB_NAME = "triton_python_b"  # the kernel keeps 15 characters
_LOAD_GAUGES = ("trtspec_active_requests", "trtspec_queued_requests")
# Triton unloads idle models and exits within seconds; one that takes longer waits for something that never comes.
_FLUSH_S = 6
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """repository: folder of models. Ports: 0 chooses a free one. server: the binary; None finds one.

    drain_timeout_s: how long a stopping server lets running streams finish. load_timeout_s: how long a model
    may take to load. log: where the server's own log goes; None is a file that is removed with the server.
    """

    repository: Path
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    server: Path | None = None
    drain_timeout_s: int = 30
    load_timeout_s: int = 300
    log: Path | None = None


class TritonServer:
    """A server on `options.repository`. Use as a context manager, or call start() and stop()."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.models = tuple(sorted(path.parent.name for path in options.repository.glob("*/config.pbtxt")))
        if not self.models:
            raise SetupError("there is no model to serve here", where=str(options.repository))
        self._install = find_triton(options.server)
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime: Path | None = None
        self._ports: dict[str, int] = {}
        self._prefix = f"trtspec_{os.getpid()}_{os.urandom(4).hex()}_"

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return self._url("serving.http_port")

    @property
    def grpc_url(self) -> str:
        return self._url("serving.grpc_port")

    @property
    def metrics_url(self) -> str:
        return f"{self._url('serving.metrics_port')}/metrics"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> Path:
        """The server's log; gone after stop() unless `options.log` named it."""
        return self.options.log or self._runtime / "server.log"

    def start(self) -> None:
        """Start the process and return. Raises SetupError when a port is busy or the binary cannot run."""
        options = self.options
        self._ports = claim_ports(
            options.address,
            {
                "serving.http_port": options.http_port,
                "serving.grpc_port": options.grpc_port,
                "serving.metrics_port": options.metrics_port,
            },
        )
        self._runtime = Path(tempfile.mkdtemp(prefix="trtspec-serve-"))
        self._spawn()

    def restart(self) -> None:
        """End the process at once, which breaks its clients' connections; start another at the same ports."""
        self._running().kill()
        self._reap()
        claim_ports(self.options.address, self._ports)
        self._spawn()

    def wait_ready(self, timeout_s: float = 300.0, stop: threading.Event | None = None) -> bool:
        """True when every model is loaded, False when `stop` was set first.

        Raises StageFailed with the log's decisive lines when the server exits or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        stop = stop or threading.Event()
        while time.monotonic() < deadline:
            if (code := self._running().poll()) is not None:
                raise StageFailed(
                    f"Triton exited with code {code} before it was ready{self.told()}", where=str(self.log)
                )
            if self._try("GET", "/v2/health/ready", None, 5)[0] == 200:
                return True
            if stop.wait(0.05):
                return False
        raise StageFailed(f"Triton was not ready after {timeout_s:.0f} s{self.told()}", where=str(self.log))

    def exit_code(self) -> int | None:
        """None while the server runs."""
        return self._running().poll()

    def stubs(self) -> dict[int, str]:
        """Living model instances: process id → model."""
        found = {}
        for pid, arguments in children(self.pid, _STUB_NAME):
            # …/triton_python_backend_stub REPOSITORY/MODEL/VERSION/model.py …
            script = next((Path(argument) for argument in arguments if argument.endswith(".py")), None)
            if script is not None:
                found[pid] = script.parent.parent.name
        return found

    def dead_models(self) -> tuple[str, ...]:
        """Models the server calls ready although they have fewer living instances than they should."""
        living = list(self.stubs().values())
        return tuple(model for model in self.models if living.count(model) < self._instances(model))

    def probe(self, model: str, timeout_s: float = 10.0) -> str | None:
        """Why `model` does not answer, or None when it does. A dead instance still reports ready: ask it."""
        status, body = self._try("POST", f"/v2/models/{model}/generate", _PROBE, timeout_s)
        return None if status == 200 and "error" not in body else str(body.get("error", f"HTTP {status}"))

    def reload(self, model: str) -> str | None:
        """Load `model` again, which replaces its instances. Returns why it failed, or None.

        Requests that a dead instance was answering stay open until their clients give up; Triton forgot them.
        """
        path = f"/v2/repository/models/{model}/load"
        status, body = self._try("POST", path, {}, self.options.load_timeout_s)
        return None if status == 200 else str(body.get("error", f"HTTP {status}"))

    def stop(self) -> int:
        """Drain and end the server; 0 when every stream finished, otherwise the code it died with.

        Once its last model instance is gone nothing runs any more; what then still holds it up are idle
        connections that clients keep open, or what a crashed instance left behind. It is not waited for.
        Calling it twice, or before start(), is harmless.
        """
        code = 0
        if self._runtime is None:
            return code
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                self._process.terminate()
                code = self._drain()
            self._reap()
        shutil.rmtree(self._runtime, ignore_errors=True)
        self._runtime = None
        return code

    def told(self) -> str:
        """What its log says about why it failed, each line on a line of its own."""
        lines = decisive_lines(self.log.read_text("utf-8", "replace"))
        return "".join(f"\n  {line}" for line in lines) or "; its log is empty"

    def _spawn(self) -> None:
        empty = self._runtime / "cwd"
        empty.mkdir(exist_ok=True)  # a stray types.py in the current folder would shadow the standard library
        command = self._command(link_backends(self._install, self._runtime))
        with open(self.log, "ab") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=empty,
                    env=server_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                raise SetupError(f"cannot start the server: {error}", where=command[0]) from error

    def _reap(self) -> None:
        """Leave nothing of the process behind: instances notice its end late, their shared memory stays."""
        process = self._running()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for region in _SHARED_MEMORY.glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)

    def _drain(self) -> int:
        process, began = self._running(), time.monotonic()
        idle_since: float | None = None
        while time.monotonic() - began < self.options.drain_timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.1)
            if self.stubs() and self._busy():
                idle_since = None
            elif idle_since is None:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _FLUSH_S:
                return 0
        return 1

    def _busy(self) -> bool:
        """Whether any model has running or waiting requests, by the models' own count.

        Triton's count is not asked: a client that cancels just as its request completes leaves it one too high.
        """
        try:
            _, text = self._exchange("serving.metrics_port", "GET", "/metrics", None, 5)
        except (OSError, http.client.HTTPException):
            return True
        gauges = [line.split() for line in text.splitlines() if line.startswith(_LOAD_GAUGES)]
        return not gauges or any(float(value) > 0 for *_, value in gauges)

    def _instances(self, model: str) -> int:
        """How many instances a loaded model has; 0 for one that is not loaded."""
        status, config = self._try("GET", f"/v2/models/{model}/config", None, 5)
        return sum(group["count"] for group in config["instance_group"]) if status == 200 else 0

    def _command(self, backends: Path) -> list[str]:
        options = self.options
        flags = {
            "model-repository": options.repository.resolve(),
            "backend-directory": backends,
            "http-address": options.address,
            "http-port": self._ports["serving.http_port"],
            "grpc-address": options.address,
            "grpc-port": self._ports["serving.grpc_port"],
            "metrics-address": options.address,
            "metrics-port": self._ports["serving.metrics_port"],
            "allow-gpu-metrics": "false",
            "pinned-memory-pool-byte-size": 0,
            "model-control-mode": "explicit",
            "load-model": "*",
            "exit-on-error": "true",
            "exit-timeout-secs": options.drain_timeout_s + _UNLOAD_S,
        }
        if self._install.caches is not None:
            flags["cache-directory"] = self._install.caches
        python = {
            "shm-default-byte-size": 1 << 20,
            "shm-region-prefix-name": self._prefix,
            "stub-timeout-seconds": options.load_timeout_s,
        }
        return [
            str(self._install.binary),
            "--disable-auto-complete-config",  # the config is complete; completing starts stubs twice
            *(f"--{name}={value}" for name, value in flags.items()),
            *(f"--backend-config=python,{name}={value}" for name, value in python.items()),
        ]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise SetupError("the server has not been started")
        return self._process

    def _url(self, setting: str) -> str:
        host = f"[{self.options.address}]" if ":" in self.options.address else self.options.address
        return f"{'' if setting == 'serving.grpc_port' else 'http://'}{host}:{self._ports[setting]}"

    def _try(
        self, method: str, path: str, body: dict[str, object] | None, timeout_s: float
    ) -> tuple[int, dict]:
        """`_call`, with status 0 where there is no answer."""
        try:
            return self._call(method, path, body, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            return 0, {"error": f"no answer: {error or type(error).__name__}"}

    def _call(
        self, method: str, path: str, body: dict[str, object] | None = None, *, timeout_s: float
    ) -> tuple[int, dict]:
        payload = None if body is None else json.dumps(body)
        status, text = self._exchange("serving.http_port", method, path, payload, timeout_s)
        try:
            content = json.loads(text or "{}")
        except ValueError:
            content = {"error": text}
        return status, content if isinstance(content, dict) else {"answer": content}

    def _exchange(
        self, setting: str, method: str, path: str, payload: str | None, timeout_s: float
    ) -> tuple[int, str]:
        """One HTTP exchange on a connection of its own: an idle kept-alive one would hold up the drain."""
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.address, self.options.address)
        connection = http.client.HTTPConnection(address, self._ports[setting], timeout=timeout_s)
        headers = {"Connection": "close", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
