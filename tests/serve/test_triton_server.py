"""Starting, watching and stopping the real server: what is left when it fails, dies or is told to go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.fake_runtime import answer
from trtspec.errors import SetupError, StageFailed
from trtspec.serve.client import RequestFailed, TritonClient
from trtspec.serve.triton import ServerOptions, TritonServer
from trtspec.values import SamplingParams

pytestmark = pytest.mark.server
MODEL = "tensorrt_llm"
PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}

# `trtspec serve` in a process of its own: signals go to main threads.
SERVE = """
import sys
from pathlib import Path
from trtspec.serve.supervise import serve_forever
from trtspec.serve.triton import ServerOptions

options = ServerOptions(Path(sys.argv[1]), http_port=0, grpc_port=0, metrics_port=0, drain_timeout_s=int(sys.argv[2]))
say = lambda text: print(text, flush=True)
sys.exit(serve_forever(
    options,
    emit=lambda note: say("note " + note.text),
    ready=lambda server: say(f"ready {server.grpc_url} {server.http_url} {server.pid}"),
))
"""


class Serving:
    """A running `serve_forever`, its lines and its server."""

    def __init__(self, repository: Path, drain_timeout_s: int = 15) -> None:
        command = [sys.executable, "-c", SERVE, str(repository), str(drain_timeout_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.terminated = False
        _, self.grpc, self.http, pid = self.line("ready").split()
        self.server_pid = int(pid)

    def line(self, word: str) -> str:
        """The next line with `word`."""
        for line in self.process.stdout:
            if word in line:
                return line.strip()
        raise AssertionError(f"ended without saying {word!r}")

    def stub(self) -> int:
        """The process id of the one model instance of whichever server runs now."""
        return next(iter(descendants(self.process.pid, "triton_python_b")))

    def terminate(self) -> None:
        """Send SIGTERM once: a second one means "at once"."""
        if not self.terminated and self.process.poll() is None:
            self.process.terminate()
        self.terminated = True

    def end(self) -> int:
        self.terminate()
        self.rest, _ = self.process.communicate(timeout=60)  # reads on, so that the last notes find a reader
        return self.process.returncode


def descendants(ancestor: int, name: str) -> list[int]:
    rows = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            own, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            rows[int(stat.parent.name)] = (own, int(parent), state)
    found, frontier = [], {ancestor}
    while frontier:
        frontier = {pid for pid, (_, parent, _) in rows.items() if parent in frontier}
        found += [pid for pid in frontier if rows[pid][0] == name and rows[pid][2] != "Z"]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def regions() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("trtspec_*")}


@pytest.fixture
def serving(make_repository):
    running = Serving(make_repository())
    yield running
    running.end()


def tokens(grpc: str, count: int, name: str = "r") -> str:
    with TritonClient(grpc, MODEL) as client:
        return "".join(
            chunk.text for chunk in client.stream_text(name, "hello", SamplingParams(max_tokens=count))
        )


def test_sigterm_lets_a_running_stream_finish_and_leaves_nothing_behind(make_repository):
    before = regions()
    serving = Serving(make_repository())
    stub = serving.stub()
    with TritonClient(serving.grpc, MODEL) as client, ThreadPoolExecutor() as pool:
        chunks = iter(client.stream_text("s", "hello", SamplingParams(max_tokens=1500)))
        text = next(chunks).text
        rest = pool.submit(lambda: "".join(chunk.text for chunk in chunks))
        serving.terminate()
        assert "draining" in serving.line("note")
        assert text + rest.result(30) == answer(b"hello", 1500).decode()
    assert serving.end() == 0, serving.rest
    assert not alive(serving.server_pid)
    assert not alive(stub)
    assert regions() <= before


def test_streams_that_outlast_the_drain_are_cut_and_the_exit_code_says_so(make_repository):
    serving = Serving(make_repository(), drain_timeout_s=1)
    with TritonClient(serving.grpc, MODEL) as client:
        chunks = iter(client.stream_text("s", "hello", SamplingParams(max_tokens=4000)))
        next(chunks)
        serving.terminate()
        with pytest.raises(RequestFailed) as cut:
            list(chunks)
        assert cut.value.code == "UNAVAILABLE"
    assert serving.end() == 1


def test_idle_keep_alive_connections_do_not_hold_up_the_end(make_repository):
    serving = Serving(make_repository(), drain_timeout_s=30)
    host, port = serving.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in idle.recv(1000)
        began = time.monotonic()
        assert serving.end() == 0
        assert time.monotonic() - began < 15


def test_a_killed_model_instance_is_noticed_and_replaced_and_its_streams_end(serving):
    assert tokens(serving.grpc, 5) == "olleh"
    with TritonClient(serving.grpc, MODEL) as client:
        chunks = iter(client.stream_text("doomed", "hello", SamplingParams(max_tokens=4000), timeout_s=30))
        next(chunks)
        first = serving.stub()
        os.kill(first, signal.SIGKILL)
        # Now and then the server aborts (-6) over an instance killed in the middle of a response.
        assert serving.line("note").startswith(("note an instance of tensorrt_llm died", "note Triton died"))
        # Triton alone would keep this stream open for good.
        with pytest.raises(RequestFailed) as failed:
            list(chunks)
        assert failed.value.code != "DEADLINE_EXCEEDED"
    serving.line("serving again")
    assert serving.stub() != first
    assert tokens(serving.grpc, 5) == "olleh"


def test_a_killed_server_is_started_again_at_the_same_ports(serving):
    os.kill(serving.server_pid, signal.SIGKILL)
    assert "Triton died (exit code -9)" in serving.line("note")
    serving.line("serving again")
    assert tokens(serving.grpc, 5) == "olleh"


def test_unloading_a_model_on_purpose_is_no_fault(serving):
    def control(action: str) -> None:
        subprocess.run(
            ["curl", "-sf", "-X", "POST", f"{serving.http}/v2/repository/models/{MODEL}/{action}"],
            check=True,
            timeout=30,
        )

    control("unload")
    time.sleep(2.5)
    control("load")
    assert tokens(serving.grpc, 5) == "olleh"
    serving.terminate()
    assert serving.line("note").startswith("note draining")  # and no note of a dead instance before it


def test_with_a_second_instance_only_the_dead_one_is_replaced(make_repository):
    serving = Serving(make_repository(instances=2))
    try:
        dead, _ = descendants(serving.process.pid, "triton_python_b")
        os.kill(dead, signal.SIGKILL)
        assert "loading tensorrt_llm again" in serving.line("note")
        serving.line("serving again")
        assert alive(serving.server_pid)
        assert tokens(serving.grpc, 5) == "olleh"
    finally:
        assert serving.end() == 0


def test_two_servers_at_once_do_not_touch_each_other(make_repository, serving):
    with TritonServer(ServerOptions(make_repository(), **PORTS)) as other:
        other.wait_ready(60)
        assert len(regions()) >= 2
        assert tokens(other.grpc_url, 5) == tokens(serving.grpc, 5) == "olleh"
    assert tokens(serving.grpc, 5) == "olleh"


def test_the_server_dies_with_the_process_that_started_it(make_repository):
    serving = Serving(make_repository())
    stub = serving.stub()
    serving.process.kill()
    serving.process.wait()
    deadline = time.monotonic() + 30
    while (alive(serving.server_pid) or alive(stub)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(serving.server_pid)
    assert not alive(stub)


def test_a_busy_port_is_refused_with_its_setting_and_its_holder(make_repository):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = TritonServer(ServerOptions(make_repository(), **{**PORTS, "grpc_port": port}))
        with pytest.raises(SetupError) as refused:
            server.start()
    assert refused.value.where == "serving.grpc_port"
    assert f"port {port}" in refused.value.message
    assert f"pid {os.getpid()}" in refused.value.message
    assert server.stop() == 0


def test_a_model_that_cannot_load_is_reported_with_its_own_words(make_repository):
    repository = make_repository()
    (repository / MODEL / "1" / "model.py").write_text("raise RuntimeError('the engine file is truncated')")
    server = TritonServer(ServerOptions(repository, **PORTS))
    with server, pytest.raises(StageFailed, match="the engine file is truncated"):
        server.wait_ready(60)


def test_settings_that_make_no_sense_are_reported_by_key(make_repository):
    repository = make_repository()
    settings = repository / MODEL / "1" / "model.yaml"
    settings.write_text(settings.read_text().replace("max_queue_size: 6", "max_queue_sise: 6"))
    server = TritonServer(ServerOptions(repository, **PORTS))
    with server, pytest.raises(StageFailed, match=r"trtspec\.max_queue_sise"):
        server.wait_ready(60)


def test_the_packaged_model_also_loads_where_the_server_completes_configs(make_repository, monkeypatch):
    """NVIDIA's containers start Triton without --disable-auto-complete-config."""
    complete = TritonServer._command

    def command(self, backends):
        return [part for part in complete(self, backends) if part != "--disable-auto-complete-config"]

    monkeypatch.setattr(TritonServer, "_command", command)
    with TritonServer(ServerOptions(make_repository(), **PORTS)) as server:
        server.wait_ready(60)
        assert tokens(server.grpc_url, 5) == "olleh"
        _, config = server._call("GET", f"/v2/models/{MODEL}/config", timeout_s=5)
        assert json.dumps(config["model_transaction_policy"]) == '{"decoupled": true}'
