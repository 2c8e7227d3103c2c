"""Random tokens load a server at a known length, and everything measured on them says that it is no acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluate.openai_stub import OpenAIStub
from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.evaluate.random_tokens import CAUTION, prompt_length, random_prompts
from trtspec.evaluate.record import RunRecord
from trtspec.plan.measured import read_measured


def test_prompts_have_the_length_and_depend_on_the_seed_alone(tokenizer_folder: Path) -> None:
    tokenizer = TextTokenizer.load(tokenizer_folder)
    found = random_prompts(tokenizer, 300, 3, seed=7)
    texts = [prompt.turns[0] for prompt in found.prompts]
    assert [len(tokenizer.encode(text)) for text in texts] == [300] * 3
    assert not any("\ufffd" in text or "</s>" in text for text in texts)
    assert len(set(texts)) == 3 and len(set(texts[0])) > 50
    assert random_prompts(tokenizer, 300, 2, seed=7).prompts == found.prompts[:2]
    assert random_prompts(tokenizer, 300, 1, seed=8).prompts != found.prompts[:1]
    assert found.caution == CAUTION and "23 %" in CAUTION


@pytest.mark.parametrize("name", ["random:", "random:0", "random:many", "random:-5", "random:1.5"])
def test_a_length_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="how many tokens"):
        prompt_length(name)
    assert prompt_length("random:64") == 64 and prompt_length("builtin") is None


def test_a_run_on_them_warns_and_is_nothing_to_plan_by(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = OpenAIStub([(3, 2), (3, 0)], reports="histogram")
    try:
        command = [
            "eval",
            stub.url,
            "--data",
            "random:40",
            "--out",
            str(tmp_path),
            "--json",
            "--model",
            "toy",
        ]
        assert main(command) == 2
        assert json.loads(capsys.readouterr().out)["error"]["hint"] == "add --prompts N"
        assert main([*command, "--prompts", "2"]) == 2
        assert "--tokenizer" in json.loads(capsys.readouterr().out)["error"]["hint"]
        assert main([*command, "--prompts", "2", "--tokenizer", str(tokenizer_folder)]) == 0
    finally:
        stub.close()
    out = capsys.readouterr()
    assert "not acceptance data" in out.err and json.loads(out.out)["result"]["caution"] == CAUTION
    record = RunRecord.read(tmp_path)
    assert (record.data.name, record.data.prompts, record.data.caution) == ("random:40", 2, CAUTION)
    assert len(stub.asked[-1]["messages"][0]["content"]) == 40
    with pytest.raises(ConfigError, match="nothing to plan by"):
        read_measured(tmp_path)
