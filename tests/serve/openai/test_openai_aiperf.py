"""NVIDIA's AIPerf against the front: it understands every answer, and its acceptance is the server's.

AIPerf needs numpy 2 and lives in a venv of its own: $TRTSPEC_AIPERF names its program, else PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from tests.serve.conftest import MODEL as NAME
from tests.serve.conftest import Served, free_ports
from tests.serve.openai.conftest import fronted
from trtspec.serve.openai.front import FrontOptions
from trtspec.serve.supervise import options_from_build
from trtspec.serve.triton import TritonServer

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.model]

REQUESTS = 8


@pytest.fixture
def aiperf() -> str:
    program = os.environ.get("TRTSPEC_AIPERF") or shutil.which("aiperf")
    if program is None:
        pytest.skip(
            "aiperf is not here: pip install aiperf==0.13.0 in a venv, and name it in $TRTSPEC_AIPERF"
        )
    return program


def test_aiperf_counts_the_acceptance_that_the_server_counted(aiperf, quickstart_build, tmp_path):
    rows = [
        {
            "question_id": f"{index:032}",
            "category": "coding",
            "messages": [{"role": "user", "content": f"Count from {index} to {index + 9}."}],
        }
        for index in range(REQUESTS)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # set, AIPerf takes a folder for a repository's name
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    with TritonServer(options_from_build(quickstart_build, **free_ports())) as server:
        server.wait_ready(300)
        served = Served(server)
        with fronted(served, FrontOptions.from_build(quickstart_build, port=0)) as caller:
            options = {
                "model": NAME,
                "url": caller.front.url,
                "endpoint-type": "chat",
                "tokenizer": quickstart_build / "engine",
                "input-file": prompts,
                "custom-dataset-type": "speed_bench_coding",
                "concurrency": 2,
                "request-count": REQUESTS,
                "workers-max": 1,
                "ui": "none",
                "artifact-dir": tmp_path / "out",
                "server-metrics": f"{caller.front.url}/metrics",
            }
            command = [aiperf, "profile", "--streaming", "--no-gpu-telemetry"]
            command += [item for name, value in options.items() for item in (f"--{name}", str(value))]
            command += ["--extra-inputs", "max_tokens:24", "--extra-inputs", "temperature:0"]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            metrics = served.metrics()
        served.client.close()
    report = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text("utf-8"))
    assert report["request_count"]["avg"] == REQUESTS and not report["error_summary"]
    steps, accepted = metrics["trtspec_verify_steps_total"], metrics["trtspec_accepted_tokens_total"]
    assert report["total_spec_decode_steps"]["avg"] == steps > 0
    weighted = report["spec_decode_token_weighted_acceptance_length"]["avg"]
    assert weighted == pytest.approx(1 + accepted / steps)
    exported = json.loads((tmp_path / "out/server_metrics_export.json").read_text("utf-8"))
    assert "trtllm:spec_accept_length" in json.dumps(exported)
