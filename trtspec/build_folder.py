"""The build folder: config, plan, manifest, card and artifacts, put in place in one step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtspec import manifest
from trtspec.errors import ConfigError
from trtspec.files import pretty_json, remove_tree, replace_folder, setup_error, sha256_file, sync_tree
from trtspec.manifest import DataSet
from trtspec.model_card import build_readme, model_card
from trtspec.stage import Job, Stage, code_digest, tool_version
from trtspec.store import Artifact, Store, StoredFile, fill


def write_build(
    job: Job,
    stages: Sequence[Stage],
    out: Path,
    config_text: str,
    store: Store,
    *,
    earlier: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """Put the build folder in place in one step; returns its digest and whether anything changed.

    earlier: the manifest of the build in `out` that was resumed; what it says of stages that did not run again, and of
    their tools and data, is kept.
    A folder that already holds exactly this build is left untouched. Raises ConfigError when `out` holds
    something that trtspec did not write, SetupError when the disk is full or may not be written.
    """
    out = out.absolute()
    refuse_foreign(out)
    built = [stage for stage in stages if stage.name in job.artifacts]
    texts = {"config.yaml": config_text, "plan.json": pretty_json(job.plan)}
    artifacts = {stage.folder: job.artifacts[stage.name] for stage in built if stage.folder}
    here = [stage for stage in built if job.artifacts[stage.name].path.parent != out]
    known = {"stages": {}, "tools": {}, "data": []} if earlier is None else earlier
    data_sets = [DataSet(**data) for data in known["data"]]
    data_sets += [data for stage in here for data in stage.data(job)]
    record = manifest.make_manifest(
        name=job.config.name,
        models=job.models,
        stages={
            **known["stages"],
            **{s.name: {"digest": job.artifacts[s.name].digest, "code": code_digest(s.code)} for s in here},
        },
        tools={**known["tools"], **{tool: tool_version(tool) for stage in here for tool in stage.tools}},
        artifacts=artifacts,
        texts=texts,
        data_sets=tuple(dict.fromkeys(data_sets)),
    )
    texts |= {
        "MODEL_CARD.md": model_card(record, job.plan, artifacts),
        "README.md": build_readme(record, artifacts),
        "manifest.json": pretty_json(record),
    }
    try:
        with store.lock(
            f"out-{hashlib.sha256(str(out).encode()).hexdigest()}", f"another build writes {out}"
        ):
            if _holds(out, texts, artifacts):
                return str(record["digest"]), False
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_name(f".{out.name}.partial")
            remove_tree(partial)
            partial.mkdir()
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
            for folder, artifact in artifacts.items():
                fill(artifact, partial / folder)
            sync_tree(partial)
            replace_folder(partial, out)
    except OSError as error:
        raise setup_error(error, out.parent) or setup_error(error, store.root) or error from error
    return str(record["digest"]), True


def refuse_foreign(out: Path) -> None:
    """Raise ConfigError when `out` holds something that trtspec did not write."""
    if out.is_file():
        raise ConfigError(f"{out} is a file", hint="name a folder with --out")
    if out.is_dir() and any(out.iterdir()) and manifest.read_manifest(out) is None:
        raise ConfigError(
            f"{out} holds files that are not a trtspec build; it would be replaced",
            hint="name an empty or new folder with --out",
        )


def _holds(out: Path, texts: Mapping[str, str], artifacts: Mapping[str, Artifact]) -> bool:
    """Whether `out` already is this build: the same texts, and every artifact file as in the store."""
    try:
        if any((out / name).read_text(encoding="utf-8") != text for name, text in texts.items()):
            return False
        return all(
            _same_file(out / folder / file.name, artifact.path / file.name, file)
            for folder, artifact in artifacts.items()
            for file in artifact.files
        )
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def _same_file(mine: Path, stored: Path, file: StoredFile) -> bool:
    here, there = mine.stat(), stored.stat()
    if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
        return True
    return here.st_size == file.bytes and sha256_file(mine) == file.sha256
