"""What comes out: the resolved file, the JSON Schema, the starter."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.config.conftest import MINIMAL
from trtspec.config import config_schema, dump_config, load_config, starter_config
from trtspec.config.fields import all_fields
from trtspec.config.speculation import METHODS, SPECULATION_MODELS
from trtspec.quantize.formats import FORMATS

DRAFT = "draft: {model: org/d, quantization: fp8}"
METHOD_OPTIONS = {
    **dict.fromkeys(["draft_model", "medusa", "hydra", "eagle", "eagle2", "eagle3"], DRAFT),
    **dict.fromkeys(["p_eagle", "mtp", "dflash", "dspark", "pard"], DRAFT),
    "rest": "datastore: ./store",
    "specinfer": "drafts: [{model: org/d}, {model: ./e}]",
}


@pytest.fixture(params=METHODS)
def text(request):
    options = ", ".join(filter(None, [f"method: {request.param}", METHOD_OPTIONS.get(request.param)]))
    return f"name: x\ntarget: {{model: org/m}}\nspeculation: {{{options}}}\n"


def test_dump_loads_to_the_same_config_and_is_byte_stable(text, write):
    config = load_config(write(text))
    dumped = dump_config(config)
    again = load_config(write(dumped, "build/config.yaml"))
    assert again == config
    assert dump_config(again) == dumped


def test_dump_writes_every_field_and_no_extends(write, tmp_path):
    write(MINIMAL, "base.yaml")
    dumped = dump_config(load_config(write("extends: base.yaml\nevaluation: {data: ./d.jsonl}\n")))
    data = yaml.safe_load(dumped)
    assert "extends" not in data
    assert data["evaluation"]["data"] == str(tmp_path / "d.jsonl")
    for facts in all_fields():
        if facts.methods and "ngram" not in facts.methods:
            continue
        value = data
        for key in facts.path.split("."):
            assert key in value, facts.path
            value = value[key]


@pytest.mark.parametrize(
    "name", ["no", "1e3", "1.5", "0x10", "010", "1_000", "null", "a.b", "2024-01-01", "1-30", "0o17", "7"]
)
def test_names_that_look_like_other_things_survive_the_dump(write, name):
    """YAML 1.1 and 1.2 readers disagree on these: quoted, they are text to both."""
    config = load_config(write(MINIMAL.replace("name: x", f'name: "{name}"')))
    dumped = dump_config(config)
    assert yaml.safe_load(dumped)["name"] == name
    assert load_config(write(dumped)) == config


def test_unusual_text_and_numbers_survive_the_dump(write, tmp_path):
    data = str(tmp_path / "пр 'o\"mpts: #1 \u2028…")
    text = (
        MINIMAL
        + json.dumps({"evaluation": {"data": data, "temperature": 1e-07}, "lossless": True})[1:-1]
        + "\n"
    )
    text = text.replace('"evaluation"', "evaluation").replace(', "lossless"', "\nlossless")
    config = load_config(write(text))
    assert config.evaluation.data == data
    assert load_config(write(dump_config(config))) == config


def test_starter_names_every_general_field_and_loads_as_it_is(write):
    starter = starter_config()
    config = load_config(write(starter))
    assert config.speculation.method == "ngram"
    keys = [line.strip().split(":")[0] for line in starter.splitlines() if ":" in line]
    for facts in all_fields():
        if not facts.methods or "ngram" in facts.methods:
            assert facts.path.split(".")[-1] in keys, facts.path
    assert starter.count("#") > 50, "each field is explained"
    assert max(map(len, starter.splitlines())) <= 110


def test_every_field_is_described():
    assert all(facts.info.description for facts in all_fields())
    assert len(SPECULATION_MODELS) == len(set(METHODS)) == 19


def _described(schema, definitions, path=()):
    for name, body in schema.get("properties", {}).items():
        referred = definitions.get(body.get("$ref", "").removeprefix("#/$defs/"), {})
        yield (*path, name), "description" in body or "description" in referred


def test_schema_describes_every_field_and_names_the_formats():
    schema = config_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(schema)) == schema, "plain JSON"
    definitions = schema["$defs"]
    missing = [p for p, fine in _described(schema, definitions) if not fine]
    for name, body in definitions.items():
        missing += [p for p, fine in _described(body, definitions, (name,)) if not fine]
        assert body["additionalProperties"] is False
    assert not missing
    assert "extends" in schema["properties"]
    assert set(schema["$defs"]["Target"]["properties"]["quantization"]["enum"]) == {"none", *FORMATS}


@pytest.fixture(scope="module")
def valid():
    jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema package is not installed")
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid


def test_schema_accepts_what_loads(text, valid):
    assert valid(yaml.safe_load(text))
    assert valid(yaml.safe_load(starter_config()))


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("extends: a.yaml", True),
        ("extends: [a.yaml]\nspeculation: {draft_length: 4}", True),
        ("extends: a.yaml\nspeculation: {method: eagle3, draft_length: 4}", True),
        ("extends: 3", False),
        ("extends: a.yaml\ntarget: {modl: x}", False),
        ("extends: a.yaml\nspeculation: {method: eagle3, max_ngram: 4}", False),
        ("name: x", False),
        ("name: x\ntarget: {}\nspeculation: {method: none}", False),
        ("name: x\ntarget: {model: a}\nspeculation: {draft_length: 4}", False),
        ("name: x\ntarget: {model: a}\nspeculation: {method: eagle3}", False),
        ("name: x\ntarget: {model: a}\nspeculation: {method: ngram, draft_length: 65}", False),
        ("name: x\ntarget: {model: a}\nspeculation: {method: ngram, draft_length: auto}", True),
        ("name: x\ntarget: {model: a}\nspeculation: {method: mtp}", True),
        ("name: x\ntarget: {model: a, quantization: fp9}\nspeculation: {method: none}", False),
    ],
)
def test_schema_refuses_what_does_not_load(text, fine, valid):
    assert valid(yaml.safe_load(text)) is fine
