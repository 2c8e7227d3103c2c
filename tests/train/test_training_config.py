"""What the training section may say, and what it would cost: both before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trtspec.config import Config, load_config
from trtspec.errors import ConfigError
from trtspec.train.cost import Work, estimates, fit_rate, remember, write_rate

CONFIG = """
name: tiny
target: {{model: org/name}}
speculation: {{method: {method}, draft: {{model: ./draft}}}}
training: {training}
"""


def load(folder: Path, training: str, method: str = "eagle3") -> Config:
    (folder / "tiny.yaml").write_text(CONFIG.format(training=training, method=method))
    return load_config(folder / "tiny.yaml")


@pytest.mark.parametrize(
    ("method", "training", "said"),
    [
        ("eagle3", "{data: [self]}", "tokens does not say when there are enough"),
        ("eagle3", "{data: [builtin]}", "trained on builtin, which it is evaluated on"),
        ("medusa", "{draft_vocab_size: 100}", "medusa drafts from the target's whole vocabulary"),
        ("medusa", "{captured_layers: [1, 2]}", "medusa reads no inner layers"),
        ("medusa", "{options: {markov_rank: 8}}", "training has no option markov_rank for medusa"),
        ("eagle3", "{options: {layer: 2}}", "layers"),
        ("eagle3", "{options: {layers: two}}", "whole number"),
        ("eagle3", "{captured_layers: [3, 1]}", "ascending order"),
        ("eagle3", "{learning_rate: 1.5}", "less than 1"),
        ("eagle3", "{start: ./head, draft_vocab_size: 99}", "draft_vocab_size is settled by the head"),
        ("eagle3", "{start: ./head, options: {kv_heads: 4}}", "options.kv_heads is settled by the head"),
        ("eagle3", "{start: 'no such thing!'}", "neither an existing path nor a hub id"),
        ("medusa", "{start: ./head}", "begins with the target's weights, not with another head"),
    ],
)
def test_what_would_do_nothing_or_harm_is_refused(
    tmp_path: Path, method: str, training: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, training, method)
    assert said in str(refused.value) + str(refused.value.hint)
    assert "tiny.yaml:5:" in str(refused.value)


def test_a_response_must_leave_room_for_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(method="eagle3", training="{response_length: 96}"))
    small = [
        "engine.max_seq_len=96",
        "workload.context=32",
        "workload.output_length=32",
        "evaluation.output_length=32",
    ]
    with pytest.raises(ConfigError, match="leaves no room for a prompt in max_seq_len 96"):
        load_config(path, small)
    assert load_config(path, [*small, "training.response_length=95"]).training.response_length == 95


def test_tasks_about_answers_need_answers(tmp_path: Path) -> None:
    assert load(tmp_path, "{data: [packaged, follow_up]}").training.data == ("packaged", "follow_up")
    with pytest.raises(ConfigError, match="follow_up alone has no answers to ask about"):
        load(tmp_path, "{data: [follow_up]}")


def test_prompt_files_lie_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "why?"}\n')
    config = load(tmp_path, "{data: [packaged, asked.jsonl, self, org/data], tokens: 1000}")
    assert config.training.data == ("packaged", str(tmp_path / "asked.jsonl"), "self", "org/data")
    hash(config)


def test_a_start_lies_beside_the_config(tmp_path: Path) -> None:
    assert load(tmp_path, "{start: ./head}").training.start == str(tmp_path / "head")
    assert load(tmp_path, "{start: org/head}").training.start == "org/head"
    assert load(tmp_path, "{}").training.start is None


def test_an_estimate_goes_by_this_machine_once_it_has_trained(tmp_path: Path) -> None:
    work = Work("eagle3", 135_000_000, 1_000_000, True, 3, "bfloat16", True)
    write, fit = estimates(work, tmp_path)
    assert write.tokens == 1_000_000 and fit.tokens > 3_000_000
    assert estimates(replace(work, invent=False), tmp_path)[0].seconds < 0.8 * write.seconds
    larger = Work("eagle3", 1_350_000_000, 1_000_000, True, 3, "bfloat16", True)
    assert estimates(larger, tmp_path)[1].seconds == pytest.approx(10 * fit.seconds)
    assert estimates(replace(work, first_position_share=0.7), tmp_path)[1].seconds < 0.7 * fit.seconds
    remember(tmp_path, write_rate(invent=True), 135_000_000, 1000, 5.0)
    remember(tmp_path, fit_rate("eagle3", "bfloat16", True, 0.0), 135_000_000, 1000, 2.0)
    own = estimates(work, tmp_path)
    assert [round(one.seconds / one.tokens, 6) for one in own] == [0.005, 0.002]
    assert {one.basis for one in own} == {"last run on this machine"}
    other = Work("medusa", 135_000_000, 1_000_000, True, 3, "bfloat16", False)
    assert estimates(other, tmp_path)[1].basis != "last run on this machine"
