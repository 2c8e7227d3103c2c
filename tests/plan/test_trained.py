"""A draft that `trtspec train` made is planned by what was measured of it, not by other models' heads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtspec.checkpoints.facts import read_facts
from trtspec.checkpoints.heads import read_head
from trtspec.errors import ConfigError
from trtspec.plan import Plan, make_plan
from trtspec.plan.trained import trained_acceptance

RATES = [0.6, 0.5, 0.45, 0.4]
REPORT = {
    "method": "eagle3",
    "held_out_tokens": 12345,
    "held_out": [[0, {"conditional_acceptance": [0.1] * 4}], [9, {"conditional_acceptance": RATES}]],
    "settings": {"temperature": 0.0},
}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def tell(head: Path, **changes: object) -> str:
    (head / "training_report.json").write_text(json.dumps({**REPORT, **changes}))
    return str(head / "config.json")


def test_the_last_measurement_of_the_same_method_counts(head: Path) -> None:
    assert trained_acceptance(str(head / "config.json"), "eagle3") is None
    curve, temperature = trained_acceptance(tell(head), "eagle3")
    assert (list(curve.conditional), curve.measured_to, curve.kind, temperature) == (RATES, 4, "trained", 0)
    assert "12,345 held-out tokens, T = 0" in curve.source
    assert curve.acceptance_length(4) == pytest.approx(1 + 0.6 * (1 + 0.5 * (1 + 0.45 * (1 + 0.4))))
    assert trained_acceptance(tell(head), "p_eagle") is None
    assert trained_acceptance(tell(head, method="eagle"), "eagle2")[0].conditional == tuple(RATES)


@pytest.mark.parametrize("broken", [{"held_out": []}, {"settings": None}, {"held_out_tokens": "many"}])
def test_another_file_of_that_name_is_said(head: Path, broken: dict) -> None:
    with pytest.raises(ConfigError, match="not the report of a training run") as refused:
        trained_acceptance(tell(head, **broken), "eagle3")
    assert refused.value.where.endswith("training_report.json")


@pytest.fixture
def plan(tmp_path: Path, make_config):
    """Of a head that lies beside a report with these changes."""
    shipped = Path(__file__).parents[2] / "build_configs" / "heads" / "smollm2-eagle3"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(shipped / name)

    def make(workload: dict, **changes: object) -> Plan:
        tell(tmp_path, **changes)
        draft = SimpleNamespace(model=str(tmp_path), quantization="int8_weight_only")
        config = make_config(
            engine={"backend": "onnxruntime", "device": "cpu"},
            speculation={"method": "eagle3", "shape": "chain", "draft": draft},
            workload=workload,
        )
        target = tmp_path / "target"
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps(SMOLLM2))
        return make_plan(config, read_facts(target), draft=read_head(tmp_path))

    return make


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_the_plan_goes_by_it(plan) -> None:
    good, poor = (plan({}, held_out=[[9, {"conditional_acceptance": [rate] * 4}]]) for rate in (0.95, 0.05))
    assert good.curve.kind == poor.curve.kind == "trained"
    assert good.draft_length > poor.draft_length
    assert good.as_json()["acceptance"]["rates"] == [0.95] * 4
    assert not [warning for warning in good.warnings if "temperature" in warning]


def test_what_was_declared_comes_first_and_another_temperature_is_said(plan) -> None:
    assert plan({"acceptance": [0.5]}).curve.kind == "declared"
    warm = plan({"temperature": 0.8})
    assert [w for w in warm.warnings if "text of temperature 0, the workload has 0.8" in w]
