"""`trtspec eval` over gRPC and over HTTP: one server, the same record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtspec.cli import main
from trtspec.evaluate.record import RunRecord

pytestmark = pytest.mark.server


def test_both_transports_give_the_same_record(served, tmp_path: Path, capsys) -> None:
    http = served.server.http_url.removeprefix("http://")
    urls = {"grpc": f"grpc://{served.server.grpc_url}", "http": f"http://{http}/v2"}
    found = {}
    for name, url in urls.items():
        command = ["eval", url, "--prompts", "6", "--output-length", "20", "--concurrency", "3", "--json"]
        assert main([*command, "--out", str(tmp_path / name)]) == 0
        result = json.loads(capsys.readouterr().out)["result"]
        record = RunRecord.read(tmp_path / name)
        assert record.speculative.transport == f"triton {name}"
        found[name] = {
            **{
                key: result[key]
                for key in (
                    *("acceptance_length", "draft_acceptance_rate", "conditional_acceptance"),
                    *("acceptance_histogram", "requests", "output_tokens", "errors"),
                )
            },
            "raw": sorted(
                (
                    r.question_id,
                    r.turn,
                    r.token_ids,
                    r.text,
                    *((s.drafted, s.accepted, s.emitted) for s in r.steps),
                )
                for r in record.requests
            ),
        }
    assert found["grpc"] == found["http"]
    assert found["http"]["errors"] == 0 and sum(found["http"]["acceptance_histogram"]) > 20
