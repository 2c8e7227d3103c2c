"""Requests that are refused in quick succession, from many clients, and servers that start while streams run."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trtspec.serve.client import RequestFailed
from trtspec.serve.process import die_with_parent
from trtspec.values import SamplingParams

pytestmark = pytest.mark.server


def test_a_server_outlives_hundreds_of_refusals(served) -> None:
    """With Triton's header `triton_grpc_error` it died of a dozen."""

    def ask(number: int) -> str:
        with pytest.raises(RequestFailed) as refused:
            list(served.client.stream_text(f"refused-{number}", "x", SamplingParams(max_tokens=10**6)))
        return refused.value.code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(400))) == {"INVALID_ARGUMENT"}
    assert served.server.exit_code() is None
    served.wait_idle()


def test_a_process_starts_while_streams_run(served) -> None:
    """gRPC's handlers of fork() aborted some before they became the program they should be."""
    ended = threading.Event()

    def stream(number: int) -> None:
        while not ended.is_set():
            list(served.client.stream_text(f"running-{number}", "hello", SamplingParams(max_tokens=40)))

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(stream, number) for number in range(8)]
        try:
            codes = [
                subprocess.run([sys.executable, "-S", "-c", ""], preexec_fn=die_with_parent()).returncode
                for _ in range(40)
            ]
        finally:
            ended.set()
        for stopped in running:
            stopped.result()
    assert codes == [0] * 40
