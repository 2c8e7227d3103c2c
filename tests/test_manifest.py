"""What a build says of itself: complete, deterministic, and nothing that was not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtspec.manifest import DataSet, ModelSource, damaged_files, make_manifest, read_manifest
from trtspec.model_card import build_readme, model_card
from trtspec.store import Artifact, Store, StoredFile

REPORT = {
    "format": "int8_weight_only",
    "perplexity_before": 20.0,
    "perplexity_after": 20.5,
    "heldout_tokens": 900,
}
ENGINE = {
    "backend": "onnxruntime",
    "weights": "210 projections: 210 8-bit",
    "spec": {"exact": True, "max_batch": 8, "max_seq_len": 2048},
    "checks": {"mean_kl_nats": 0.0042},
}
PLAN = {"method": "ngram", "draft_length": 7, "binding": "linear layers"}


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Artifact]:
    store = Store(tmp_path / "cache")

    def holding(kind: str, name: str, content: dict) -> Artifact:
        return store.get_or_build(kind, {}, lambda folder: (folder / name).write_text(json.dumps(content)))

    return {
        "target": holding("quantize", "quantization_report.json", REPORT),
        "engine": holding("compile", "engine.json", ENGINE),
        "repository": holding("package", "config.pbtxt", {}),
    }


def source(licence: str | None = "apache-2.0", revision: str | None = "0" * 40) -> ModelSource:
    file = StoredFile("model.safetensors", "ab" * 32, 123)
    return ModelSource(
        "target", "org/model", "hub", "hub:org/model@0", Path(), revision, licence, Path(), (file,)
    )


def manifest(artifacts, **changes) -> dict:
    given = {
        "name": "demo",
        "models": {"target": source()},
        "stages": {"quantize": {"digest": "d", "code": "c"}},
        "tools": {"onnxruntime": "1.32.0", "absent": None},
        "artifacts": artifacts,
        "texts": {"config.yaml": "name: demo\n", "plan.json": "{}\n"},
    }
    return make_manifest(**{**given, **changes})


def test_it_names_every_file_model_licence_version_and_data_set(artifacts):
    data = (DataSet("heldout", "Apache-2.0", "ef" * 32),)
    record = manifest(artifacts, data_sets=data)
    assert [file["name"] for file in record["files"]] == [
        "config.yaml", "engine/engine.json", "plan.json", "repository/config.pbtxt",
        "target/quantization_report.json",
    ]  # fmt: skip
    assert record["models"]["target"]["licence"] == "apache-2.0"
    assert record["models"]["target"]["files"][0]["sha256"] == "ab" * 32
    assert record["tools"] == {"absent": None, "onnxruntime": "1.32.0"}
    assert record["data"] == [{"name": "heldout", "licence": "Apache-2.0", "sha256": "ef" * 32}]
    assert {"trtspec_version", "python_version", "config_sha256", "plan_sha256"} <= record.keys()


def test_equal_builds_have_equal_digests_and_any_byte_changes_it(artifacts):
    texts = {"config.yaml": "name: demo\n", "plan.json": "{}\n"}
    digest = manifest(artifacts)["digest"]
    assert manifest(dict(reversed(artifacts.items())))["digest"] == digest
    assert manifest(artifacts, texts={**texts, "config.yaml": "name: demo2\n"})["digest"] != digest
    assert manifest({**artifacts, "engine": artifacts["target"]})["digest"] != digest


def test_nothing_of_this_machine_or_moment_gets_in(artifacts, tmp_path: Path):
    text = json.dumps(manifest(artifacts)) + model_card(manifest(artifacts), PLAN, artifacts)
    assert str(tmp_path) not in text and str(Path.home()) not in text


def test_the_card_tells_what_was_measured(artifacts):
    card = model_card(manifest(artifacts), PLAN, artifacts)
    assert "20.000 before, 20.500 after (+2.50%, over 900 tokens)" in card
    assert "Method `ngram`, draft length 7." in card and "linear layers" in card
    assert "mean KL divergence of the next-token distribution as it runs, in nats: 0.0042" in card
    assert "| target | `org/model` |" in card and "apache-2.0" in card
    assert "absent" not in card


def test_the_card_claims_exactness_only_of_exact_engines(artifacts, tmp_path: Path):
    assert "Numerics are exact" in model_card(manifest(artifacts), PLAN, artifacts)
    fast = {**ENGINE, "spec": {**ENGINE["spec"], "exact": False}}
    store = Store(tmp_path / "other")
    artifact = store.get_or_build("compile", {}, lambda f: (f / "engine.json").write_text(json.dumps(fast)))
    card = model_card(manifest(artifacts), PLAN, {**artifacts, "engine": artifact})
    assert "Numerics are exact" not in card and "can differ" in card


def test_a_model_that_states_no_licence_is_pointed_at(artifacts):
    record = manifest(artifacts, models={"target": source(licence=None, revision=None)})
    card = model_card(record, PLAN, artifacts)
    assert "not stated by the model: check before sharing" in card and "local files" in card


def test_plain_decoding_and_unquantized_weights_are_not_described_as_something_else(artifacts):
    card = model_card(manifest({}), {"method": "none", "draft_length": 0}, {})
    assert "without speculation" in card
    assert "## Speculation" not in card and "## Quantization" not in card and "## Engine" not in card


def test_the_readme_offers_to_serve_only_what_can_be_served(artifacts):
    assert "trtspec serve ." in build_readme(manifest(artifacts), artifacts)
    unpackaged = {"target": artifacts["target"]}
    assert "trtspec serve" not in build_readme(manifest(unpackaged), unpackaged)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"format": "something else"}'])
def test_a_folder_is_a_build_only_when_its_manifest_says_so(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    assert read_manifest(tmp_path) is None


def test_damage_is_found_file_by_file(tmp_path: Path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    record = make_manifest(
        name="x", models={}, stages={}, tools={}, artifacts={}, texts={n: n for n in ("a", "b", "c")}
        | {"config.yaml": "", "plan.json": ""},
    )  # fmt: skip
    for name in ("config.yaml", "plan.json"):
        (tmp_path / name).write_text("")
    assert damaged_files(tmp_path, record) == []
    (tmp_path / "b").write_text("B")
    (tmp_path / "c").unlink()
    assert damaged_files(tmp_path, record) == ["b: content changed", "c: missing"]
