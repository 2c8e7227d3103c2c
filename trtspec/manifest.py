"""`manifest.json`: what a build is made of, for whoever ships it.

It is a function of the build's content alone (no times, no machine names), so equal builds have equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trtspec
from trtspec.files import JSON, sha256_file, sha256_json
from trtspec.store import Artifact, StoredFile

FORMAT = "trtspec-build"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model a build is made from. role: target or draft. identity: equal for equal content (cache keys).

    revision: hub commit or package version, None for a folder. licence: as the model states it. config: its
    config.json or the folder of it. path and files are empty in a dry run: it may not be on this machine yet.
    """

    role: str
    reference: str
    kind: str
    identity: str
    config: Path
    revision: str | None = None
    licence: str | None = None
    path: Path | None = None
    files: tuple[StoredFile, ...] = ()


@dataclass(frozen=True, slots=True)
class DataSet:
    """Text a build was calibrated or checked with: its name, licence (SPDX id) and hex sha256."""

    name: str
    licence: str | None
    sha256: str

    def as_json(self) -> dict[str, JSON]:
        return {"name": self.name, "licence": self.licence, "sha256": self.sha256}


def make_manifest(
    *,
    name: str,
    models: Mapping[str, ModelSource],
    stages: Mapping[str, Mapping[str, JSON]],
    tools: Mapping[str, str | None],
    artifacts: Mapping[str, Artifact],
    texts: Mapping[str, str],
    data_sets: Sequence[DataSet] = (),
) -> dict[str, JSON]:
    """The manifest as plain JSON. artifacts: folder → artifact; texts: name → content of other files.

    Its `digest` is over every file listed, so it names the build's content.
    """
    files = {
        **{name: StoredFile(name, _sha256(text), len(text.encode())) for name, text in texts.items()},
        **{f"{folder}/{f.name}": f for folder, artifact in artifacts.items() for f in artifact.files},
    }
    listing: list[JSON] = [
        {"name": name, "sha256": file.sha256, "bytes": file.bytes} for name, file in sorted(files.items())
    ]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": name,
        "digest": sha256_json(listing),
        "trtspec_version": trtspec.__version__,
        "python_version": platform.python_version(),
        "tools": dict(sorted(tools.items())),
        "models": {role: _source_json(model) for role, model in models.items()},
        "data": [data.as_json() for data in sorted(data_sets, key=lambda data: data.name)],
        "config_sha256": _sha256(texts["config.yaml"]),
        "plan_sha256": _sha256(texts["plan.json"]),
        "stages": {stage: dict(record) for stage, record in stages.items()},
        "files": listing,
    }


def read_manifest(build: Path) -> dict | None:
    """The manifest of a build folder, or None when the folder is not a build."""
    try:
        record = json.loads((build / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def damaged_files(build: Path, record: Mapping) -> list[str]:
    """Every file whose bytes are not those the manifest lists, one line each. Reads all of them."""
    lines = []
    for file in record["files"]:
        path = build / file["name"]
        if not path.is_file():
            lines.append(f"{file['name']}: missing")
        elif path.stat().st_size != file["bytes"] or sha256_file(path) != file["sha256"]:
            lines.append(f"{file['name']}: content changed")
    return lines


def artifact_of(build: Path, record: Mapping, stage: str, folder: str) -> Artifact:
    """The artifact a stage left in a build folder, as the manifest has it; `key` is empty."""
    prefix = f"{folder}/"
    files = tuple(
        StoredFile(file["name"].removeprefix(prefix), file["sha256"], file["bytes"])
        for file in record["files"]
        if file["name"].startswith(prefix)
    )
    return Artifact(stage, build.absolute() / folder, record["stages"][stage]["digest"], "", files)


def sources_of(record: Mapping) -> dict[str, ModelSource]:
    """The models of a manifest by role. Their files are not on this machine: `path` is None, `config` empty."""

    def source(role: str, model: Mapping) -> ModelSource:
        files = tuple(StoredFile(file["name"], file["sha256"], file["bytes"]) for file in model["files"])
        same = {name: model[name] for name in ("reference", "kind", "identity", "revision", "licence")}
        return ModelSource(role=role, config=Path(), files=files, **same)

    return {role: source(role, model) for role, model in record["models"].items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _source_json(model: ModelSource) -> dict[str, JSON]:
    return {
        "reference": model.reference,
        "kind": model.kind,
        "identity": model.identity,
        "revision": model.revision,
        "licence": model.licence,
        "files": [{"name": f.name, "sha256": f.sha256, "bytes": f.bytes} for f in model.files],
    }
