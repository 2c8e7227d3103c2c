"""Every mechanism through the real Triton server and `trtspec eval`: what users of a deployment run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mechanisms.conftest import CHATS, BuildOf
from tests.mechanisms.table import MECHANISMS
from tests.serve.conftest import Served, free_ports
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.runtime import Runtime
from trtspec.serve.supervise import options_from_build
from trtspec.serve.triton import TritonServer
from trtspec.values import GenerationRequest, SamplingParams

pytestmark = pytest.mark.model

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": text, "category": ("qa", "math")[i % 2]} for i, text in enumerate(CHATS)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """The result of `trtspec eval`."""
    capsys.readouterr()
    code = main(["eval", *arguments, "--output-length", str(NEW_TOKENS), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == 0, answer
    return answer["result"]


@pytest.mark.server
@pytest.mark.parametrize(
    "method", [m for m in MECHANISMS if m != "ngram"]
)  # tests/serve has it, on the real model
def test_a_server_gives_what_the_runtime_gives_and_eval_measures_it(
    tiny_build: BuildOf, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    build = tiny_build(method)
    messages = [[{"role": "user", "content": text}] for text in CHATS]
    samplings = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8 * (i % 2), seed=i) for i in range(len(CHATS))
    ]
    with Runtime.open(build / "engine") as runtime:
        expected = runtime.generate_many(
            GenerationRequest(str(i), tuple(runtime.tokenizer.chat(message)), sampling)
            for i, (message, sampling) in enumerate(zip(messages, samplings, strict=True))
        )
    with TritonServer(options_from_build(build, **free_ports())) as server:
        server.wait_ready(120)
        served = Served(server)
        for i, (message, sampling) in enumerate(zip(messages, samplings, strict=True)):
            chunks = list(served.client.stream_chat(f"s{i}", message, sampling))
            assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected[i].token_ids
            assert "".join(chunk.text for chunk in chunks) == expected[i].text
        url = f"grpc://{server.grpc_url}"
        result = measured(capsys, url, "--build", str(build), "--data", str(data), "--out", str(tmp_path))
        served.client.close()
    assert (result["requests"], result["errors"], result["method"]) == (len(CHATS), 0, method)
    assert (result["lossless"]["checked"], result["lossless"]["mismatches"]) == (len(CHATS), 0)
    assert result["acceptance_length"]["token_weighted"] > 1.1
    assert result["speedup"] > 0


def test_builds_of_one_target_are_compared_in_one_run(
    tiny_build: BuildOf, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = [str(tiny_build(method)) for method in MECHANISMS]
    result = measured(capsys, *builds, "--data", str(data), "--out", str(tmp_path))
    assert [run["method"] for run in result["runs"]] == list(MECHANISMS)
    for run in result["runs"]:
        assert (run["lossless"]["checked"], run["lossless"]["mismatches"]) == (len(CHATS), 0)
        assert (
            set(run["acceptance_length"]["by_category"]) == set(run["speedup_by_category"]) == {"qa", "math"}
        )
    shared = [run for run in result["runs"] if not MECHANISMS[run["method"]].own_target]
    assert len(shared) > 1
    assert len({run["baseline_tokens_per_s"] for run in shared}) == 1, (
        "one baseline for all of one plain output"
    )
    table = Path(result["table"]).read_text()
    assert all(f"| {method}, D=" in table for method in MECHANISMS)
    assert json.loads((tmp_path / "comparison.json").read_text())["runs"] == result["runs"]
    assert all((Path(folder) / "run.json").is_file() for folder in result["folders"])


def test_what_cannot_be_compared_is_refused(
    tiny_build: BuildOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tiny_build("ngram"), tmp_path / "other"
    other.mkdir()
    for file in one.iterdir():
        if file.name != "manifest.json":
            (other / file.name).symlink_to(file)
    record = json.loads((one / "manifest.json").read_text())
    for file in record["files"]:
        if file["name"] == "target/model.safetensors":
            file["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(record))
    for targets, words in (
        ([str(one), str(other)], "not a build of the same target"),
        ([str(one), "grpc://127.0.0.1:1"], "can only be measured alone"),
        ([str(one), str(one), "--model", "x"], "can only be measured alone"),
    ):
        assert main(["eval", *targets, "--json"]) == ConfigError.exit_code
        assert words in json.loads(capsys.readouterr().out)["error"]["message"]
