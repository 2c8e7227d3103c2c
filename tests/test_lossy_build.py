"""A lossy acceptance rule from the config to the report: built, decoded, counted, and called lossy all the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer
from trtspec.cli import main
from trtspec.config import load_config
from trtspec.engines.info import EngineInfo
from trtspec.evaluate.record import RunRecord
from trtspec.evaluate.report import render_html
from trtspec.pipeline import build
from trtspec.runtime import Runtime
from trtspec.store import Store
from trtspec.values import GenerationRequest, SamplingParams

pytestmark = pytest.mark.model

CONFIG = """
name: lossy
target: {{model: {target}}}
speculation: {{method: ngram, draft_length: 4}}
verification: {verification}
engine: {{max_batch_size: 3, max_seq_len: 192}}
workload: {{context: 64, output_length: 64}}
evaluation: {{data: {data}, output_length: 48, temperature: {temperature}}}
lossless: false
"""


@pytest.fixture(scope="module")
def builds(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("lossy")
    target = with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("target"), chat=True)
    data = place / "prompts.jsonl"
    rows = [{"prompt": f"{word} and {word} and {word}", "category": "qa"} for word in ("one", "two", "three")]
    data.write_text("\n".join(map(json.dumps, rows)))
    made = {}
    for rule, verification, temperature in (
        ("typical", "{acceptance: typical, epsilon: 0.001, delta: 0.9}", 1.0),
        ("relaxed", "{acceptance: relaxed, top_k: 100, delta: 1.0}", 0),
    ):
        path = place / f"{rule}.yaml"
        text = CONFIG.format(target=target, verification=verification, data=data, temperature=temperature)
        path.write_text(text)
        made[rule] = build(load_config(path), place / rule, store=Store(place / "cache")).out
    return made


def test_the_engine_carries_the_rule_and_plain_decoding_is_untouched_by_it(builds: dict[str, Path]) -> None:
    engine = builds["typical"] / "engine"
    assert EngineInfo.read(engine).speculation["verification"] == {
        "acceptance": "typical", "epsilon": 0.001, "delta": 0.9,
    }  # fmt: skip
    asked = GenerationRequest(
        "r", tuple(b"again and again and again"), SamplingParams(48, temperature=1.0, seed=3, ignore_eos=True)
    )
    other = builds["relaxed"] / "engine"  # of the same target, and its rule leaves sampled requests alone
    with Runtime.open(engine) as lossy, Runtime.open(other) as exact:
        assert lossy.generate(asked).token_ids != exact.generate(asked).token_ids
    with Runtime.open(engine, speculate=False) as lossy, Runtime.open(other, speculate=False) as exact:
        assert lossy.generate(asked).token_ids == exact.generate(asked).token_ids


@pytest.mark.parametrize("rule", ["typical", "relaxed"])
def test_eval_counts_what_the_rule_changed_and_does_not_call_it_a_failure(
    builds: dict[str, Path], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["eval", str(builds[rule]), "--out", str(out), "--log", "plain"]) == 0
    said = capsys.readouterr()
    assert "Lossy by choice" in said.out
    assert f"{rule} acceptance is lossy, and this is what it changed" in said.err
    record = RunRecord.read(out)
    assert record.speculative.acceptance == record.lossless.acceptance == rule
    assert record.baseline.acceptance == "exact"
    differing = record.lossless.mismatches
    assert record.lossless.checked == 3 and differing > 0
    page = render_html([record])
    assert f"under {rule} acceptance {differing} of 3 requests gave other output" in page
    assert f"{rule} (lossy)" in page
    card = (builds[rule] / "MODEL_CARD.md").read_text()
    assert f"the `{rule}` rule" in card and "equals greedy output without" not in card
