"""NVIDIA's AIPerf against the front and against Triton itself: it understands every answer, and counts as they do.

AIPerf needs numpy 2 and lives in a venv of its own: $TRTSPEC_AIPERF names its program, else PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.conftest import MODEL as NAME
from tests.serve.conftest import Served, free_ports
from tests.serve.openai.conftest import Caller, fronted
from trtspec.serve.openai.front import FrontOptions
from trtspec.serve.supervise import options_from_build
from trtspec.serve.triton import TritonServer

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.model]

REQUESTS = 8
TOKENS = 24
# A request to Triton's generate extension, with what of AIPerf's prompt and limit it is made of.
TEMPLATE = '{"text_input": {{ text|tojson }}, "streaming": true, "sampling_param_max_tokens": {{ max_tokens or 24 }}}'


@pytest.fixture(scope="module")
def served(quickstart_build) -> Iterator[tuple[Served, Caller]]:
    with TritonServer(options_from_build(quickstart_build, **free_ports())) as server:
        server.wait_ready(300)
        served = Served(server)
        with fronted(served, FrontOptions.from_build(quickstart_build, port=0)) as caller:
            yield served, caller
        served.client.close()


@pytest.fixture
def profile(quickstart_build, tmp_path) -> Callable[..., dict[str, Any]]:
    """`aiperf profile` with eight prompts; gives its report and what it read of the server's metrics."""
    program = os.environ.get("TRTSPEC_AIPERF") or shutil.which("aiperf")
    if program is None:
        pytest.skip(
            "aiperf is not here: pip install aiperf==0.13.0 in a venv, and name it in $TRTSPEC_AIPERF"
        )
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {
            "question_id": f"{index:032}",
            "category": "coding",
            "messages": [{"role": "user", "content": f"Count from {index} to {index + 9}."}],
        }
        for index in range(REQUESTS)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    def run(*flags: str, **options: object) -> dict[str, Any]:
        common = {
            "model": NAME,
            "tokenizer": quickstart_build / "engine",
            "input-file": prompts,
            "custom-dataset-type": "speed_bench_coding",
            "concurrency": 2,
            "request-count": REQUESTS,
            "workers-max": 1,
            "ui": "none",
            "artifact-dir": tmp_path / "out",
        }
        named = {**common, **{name.replace("_", "-"): value for name, value in options.items()}}
        command = [program, "profile", "--streaming", "--no-gpu-telemetry", *flags]
        command += [item for name, value in named.items() for item in (f"--{name}", str(value))]
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # set, it takes a folder for a repository's name
        environment = {name: value for name, value in os.environ.items() if name not in offline}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        files = {"report": "profile_export_aiperf.json", "server": "server_metrics_export.json"}
        return {
            name: json.loads((tmp_path / "out" / file).read_text("utf-8")) for name, file in files.items()
        }

    return run


def test_aiperf_counts_the_acceptance_that_the_server_counted(served, profile):
    triton, caller = served
    before = triton.metrics()
    found = profile(
        *("--extra-inputs", f"max_tokens:{TOKENS}", "--extra-inputs", "temperature:0"),
        url=caller.front.url,
        endpoint_type="chat",
        server_metrics=f"{caller.front.url}/metrics",
    )
    after, report = triton.metrics(), found["report"]
    assert report["request_count"]["avg"] == REQUESTS and not report["error_summary"]
    steps, accepted = (
        after[name] - before.get(name, 0)
        for name in ("trtspec_verify_steps_total", "trtspec_accepted_tokens_total")
    )
    assert report["total_spec_decode_steps"]["avg"] == steps > 0
    weighted = report["spec_decode_token_weighted_acceptance_length"]["avg"]
    assert weighted == pytest.approx(1 + accepted / steps)
    assert "trtllm:spec_accept_length" in json.dumps(found["server"])


def test_aiperf_drives_tritons_own_endpoint_and_reads_its_acceptance(served, profile):
    """The front's /metrics stands in for Triton's, whose answer to HEAD has a body and ends AIPerf's look at it."""
    triton, caller = served
    before = triton.metrics().get("trtspec_generated_tokens_total", 0)
    inputs = {"payload_template": TEMPLATE, "response_field": "text_output"}
    found = profile(
        url=triton.server.http_url,
        endpoint_type="template",
        custom_endpoint=f"/v2/models/{NAME}/generate_stream",
        extra_inputs=json.dumps(inputs),
        server_metrics=f"{caller.front.url}/metrics",
    )
    report = found["report"]
    assert report["request_count"]["avg"] == REQUESTS and not report["error_summary"]
    assert triton.metrics()["trtspec_generated_tokens_total"] - before <= REQUESTS * TOKENS
    assert report["output_sequence_length"]["avg"] > 0
    assert "trtllm:spec_accept_rate" in json.dumps(found["server"])
