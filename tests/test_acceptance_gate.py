"""A quantized draft that loses too much acceptance stops the build; its loss is measured, not guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer
from trtspec.config import load_config
from trtspec.errors import StageFailed
from trtspec.pipeline import Build, build
from trtspec.store import Store

pytestmark = pytest.mark.model

CONFIG = """
name: pair
target: {{model: {target}, quantization: int8_weight_only, max_perplexity_increase: 1}}
speculation:
  method: draft_model
  draft_length: 3
  draft: {{model: {target}, quantization: {format}, max_acceptance_loss: {limit}}}
  min_token_probability: 0
engine: {{max_batch_size: 4, max_seq_len: 96, threads: 1}}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, float], Build]:
    """A function from the draft's format and the limit to the build of a target that is its own draft."""
    place = tmp_path_factory.mktemp("gate")
    (place / "target").mkdir()
    target = with_tokenizer(tiny_model("llama"), place / "target")
    store = Store(place / "cache")

    def make(format: str, limit: float) -> Build:
        path = place / "pair.yaml"
        path.write_text(CONFIG.format(target=target, format=format, limit=limit))
        return build(load_config(path), place / format, store=store)

    return make


def test_a_good_format_passes_and_its_loss_is_reported(made: Callable[[str, float], Build]) -> None:
    found = made("int8_weight_only", 0.5)
    steps = [step.stage for step in found.steps]
    assert steps[-2:] == ["acceptance", "package"], "measured before it is packaged"
    assert "compile_unquantized" in steps
    report = json.loads((found.out / "acceptance" / "acceptance_report.json").read_text())
    before, after = report["unquantized"], report["quantized"]
    assert before["draft_acceptance_rate"] == 1, "the target itself is its best draft"
    assert 1 < after["acceptance_length"] <= before["acceptance_length"] <= 4
    assert report["loss"] == pytest.approx(1 - after["acceptance_length"] / before["acceptance_length"])
    assert "max_acceptance_loss: 0.5" in (found.out / "config.yaml").read_text()


def test_a_loss_above_the_limit_stops_the_build(made: Callable[[str, float], Build]) -> None:
    with pytest.raises(StageFailed, match="of the acceptance length on held-out prompts") as failure:
        made("int4_weight_only", 0.0)
    assert "max_acceptance_loss: 0." in str(failure.value.hint)


def test_nothing_is_measured_where_the_draft_is_as_it_was(made: Callable[[str, float], Build]) -> None:
    assert "acceptance" not in [step.stage for step in made("none", 0.0).steps]
