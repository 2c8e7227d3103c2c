"""A real Triton server on a packaged repository whose engine is `fake_runtime`."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.fake_runtime import QUEUE, SLOTS
from trtspec.engines.base import EngineSpec
from trtspec.engines.info import EngineInfo
from trtspec.package import PackageRequest, package_triton
from trtspec.serve.client import TritonClient
from trtspec.serve.triton import ServerOptions, TritonServer

MODEL = "tensorrt_llm"

# The packaged model with one method replaced; everything else is what users run.
MODEL_PY = """
import sys
sys.path.insert(0, {tests!r})
from tests.serve.fake_runtime import FakeRuntime
from trtspec.package import triton_model

class TritonPythonModel(triton_model.TritonPythonModel):
    def open_runtime(self, folder, settings, args):
        return FakeRuntime(settings.trtspec.max_concurrency, settings.trtspec.max_queue_size)
"""


def free_ports(**changes) -> dict[str, object]:
    return {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "drain_timeout_s": 15, **changes}


@pytest.fixture(scope="session")
def fake_engine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    spec = EngineSpec(256, 256, max_batch=64, max_seq_len=4096, max_rows=4)
    EngineInfo(
        trtspec_version="0",
        backend="onnxruntime",
        model="toy",
        spec=spec,
        layers=1,
        kv_heads=1,
        head_dim=1,
        least_rows=1,
        stop_token_ids=(),
        weights="none",
        speculation={"method": "ngram", "draft_length": 3},
    ).write(folder)
    return folder


@pytest.fixture(scope="session")
def make_repository(fake_engine, tmp_path_factory) -> Callable[..., Path]:
    def make(**request) -> Path:
        repository = tmp_path_factory.mktemp("repository")
        settings = {"model_name": MODEL, "max_concurrency": SLOTS, "max_queue_size": QUEUE, **request}
        package_triton(PackageRequest(fake_engine, **settings), repository)
        model = repository / settings["model_name"] / "1" / "model.py"
        model.write_text(MODEL_PY.format(tests=str(Path(__file__).parents[2])))
        return repository

    return make


class Served:
    """A running server and what tests ask of it."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.client = TritonClient(server.grpc_url, MODEL)

    def post(self, endpoint: str, body: object, timeout_s: float = 30) -> tuple[int, str]:
        host = self.server.http_url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=timeout_s)
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", f"/v2/models/{MODEL}/{endpoint}", payload, headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
        connection.close()
        return response.status, text

    def metrics(self) -> dict[str, float]:
        """Samples by name and distinguishing labels: `name` or `name{finish_reason=stop}`."""
        text = urllib.request.urlopen(self.server.metrics_url, timeout=10).read().decode()
        samples = {}
        for line in text.splitlines():
            if line.startswith(("trtspec_", "trtllm:")):
                name, value = line.rsplit(" ", 1)
                name, _, labels = name.partition("{")
                kept = [
                    label.replace('"', "")
                    for label in labels.rstrip("}").split(",")
                    if label.partition("=")[0] in ("finish_reason", "accepted")
                ]
                if "le=" not in labels:
                    samples[name + (f"{{{','.join(kept)}}}" if kept else "")] = float(value)
        return samples

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if metrics["trtspec_active_requests"] == metrics["trtspec_queued_requests"] == 0:
                return
            time.sleep(0.02)
        raise AssertionError(f"requests are still running: {self.metrics()}")


@pytest.fixture(scope="session")
def served(make_repository) -> Served:
    with TritonServer(ServerOptions(make_repository(), **free_ports())) as server:
        server.wait_ready(60)
        served = Served(server)
        yield served
        served.client.close()
