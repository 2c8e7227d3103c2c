"""Where models come from, and every half-finished or dangerous folder that must not pass for one."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trtspec.checkpoints.sources import model_identity, resolve_config, resolve_model
from trtspec.errors import ConfigError, SetupError
from trtspec.events import Note, Progress

CONFIG = {"model_type": "llama", "vocab_size": 8}


def safetensors(path: Path, name: str = "w", values: int = 4) -> None:
    data = np.arange(values, dtype="<f4").tobytes()
    entry = {"dtype": "F32", "shape": [values], "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small complete model folder."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    safetensors(model / "model.safetensors")
    return model


@pytest.fixture
def resolve(tmp_path: Path):
    """resolve(reference, …) against a cache of its own, relative to tmp_path."""

    def call(reference: object, **options: object):
        return resolve_model(str(reference), cache=tmp_path / "cache", base=tmp_path, **options)

    return call


def test_importing_sources_loads_nothing_heavy():
    heavy = {"torch", "transformers", "huggingface_hub", "gguf", "numpy", "modelopt"}
    code = f"import sys, trtspec.checkpoints.sources; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# --- folders ---


def test_a_folder_relative_to_the_config_is_found_with_its_hashes(folder, resolve):
    found = resolve("model")
    assert (found.kind, found.path, found.revision) == ("folder", folder, None)
    assert [file.name for file in found.files] == ["config.json", "model.safetensors"]
    done = subprocess.run(["sha256sum", folder / "config.json"], capture_output=True, text=True, check=True)
    assert found.files[0].sha256 == done.stdout.split()[0]
    assert found.files[0].bytes == (folder / "config.json").stat().st_size


def test_a_folder_that_is_not_there_is_a_config_error(resolve):
    with pytest.raises(ConfigError, match="no model folder"):
        resolve("./absent")


def test_a_bare_config_can_be_planned_but_not_built(folder, tmp_path, resolve):
    with pytest.raises(ConfigError) as caught:
        resolve("model/config.json")
    assert "planned" in caught.value.hint
    found = resolve_config("model/config.json", cache=tmp_path / "cache", base=tmp_path)
    assert found == folder / "config.json"


def test_a_revision_means_nothing_for_a_folder(folder, resolve):
    with pytest.raises(ConfigError, match="revision"):
        resolve(folder, revision="main")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_weights_are_refused_and_never_opened(folder, resolve, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    (folder / name).chmod(0)
    with pytest.raises(SetupError) as caught:
        resolve(folder)
    assert name in caught.value.message and "safetensors" in caught.value.hint


def test_pickle_files_beside_safetensors_are_ignored(folder, resolve):
    (folder / "optimizer.pt").write_bytes(b"\x80")
    assert "optimizer.pt" not in [file.name for file in resolve(folder).files]


def test_a_folder_without_any_weights_says_so(folder, resolve):
    (folder / "model.safetensors").unlink()
    with pytest.raises(SetupError, match=r"no \.safetensors"):
        resolve(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_that_brings_code_is_refused_unless_trusted_by_name(folder, resolve, name):
    (folder / name).write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "modeling_x.Model"}}))
    for trust in (None, "yes", "other/model"):
        with pytest.raises(ConfigError) as caught:
            resolve(folder, trust_remote_code=trust)
        assert f"trust_remote_code: {folder}" in caught.value.hint
    assert resolve(folder, trust_remote_code=str(folder)).path == folder


def test_a_shard_its_index_lists_and_the_folder_lacks_is_named(folder, resolve):
    safetensors(folder / "model-00001-of-00002.safetensors", "a")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SetupError, match="model-00002-of-00002"):
        resolve(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 20, -3])
def test_a_download_that_stopped_half_way_is_told(folder, resolve, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SetupError, match="incomplete"):
        resolve(folder)


def test_a_git_lfs_pointer_is_not_taken_for_weights(folder, resolve):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(SetupError) as caught:
        resolve(folder)
    assert "LFS" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README.md": "---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n"}, "apache-2.0"),
        ({"README.md": "---\nlicense: other\nlicense_name: qwen-research\n---\n"}, "qwen-research"),
        ({"LICENSE": "\n   Apache License\n   Version 2.0\n"}, "apache-2.0"),
        ({"README.md": "# no front matter\nlicense: mit\n", "LICENSE": "MIT License\n"}, "mit"),
        ({"LICENSE": "Ask my lawyer.\n"}, None),
        ({}, None),
    ],
)
def test_the_licence_is_the_one_the_model_states(folder, resolve, files, licence):
    for name, text in files.items():
        (folder / name).write_text(text)
    events: list = []
    assert resolve(folder, emit=events.append).licence == licence
    warned = any(isinstance(event, Note) and "licence" in event.text for event in events)
    assert warned == (licence is None)


# --- identity ---


def test_identity_follows_content_and_not_name_or_time(folder, tmp_path):
    def identity(reference: str) -> str:
        return model_identity(reference, cache=tmp_path / "cache", base=tmp_path)

    before = identity("model")
    assert before.startswith("folder:")
    folder.rename(tmp_path / "renamed")
    (tmp_path / "renamed" / "config.json").touch()
    assert identity("renamed") == before
    safetensors(tmp_path / "renamed" / "model.safetensors", values=5)
    assert identity("renamed") != before


def test_unchanged_files_are_not_read_twice_and_changed_ones_are(folder, tmp_path):
    def hashed() -> list:
        events: list = []
        model_identity("model", cache=tmp_path / "cache", base=tmp_path, emit=events.append)
        return [event for event in events if isinstance(event, Progress)]

    assert len(hashed()) == 2
    assert hashed() == []
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 9}))
    assert len(hashed()) == 1


def test_a_damaged_memory_of_hashes_costs_time_and_nothing_else(folder, tmp_path):
    def identity() -> str:
        return model_identity("model", cache=tmp_path / "cache", base=tmp_path)

    before = identity()
    for memory in (tmp_path / "cache" / "hashes").iterdir():
        memory.write_text("{not json")
    assert identity() == before


# --- hub ---


class _Hub:
    """Stands in for huggingface_hub's three functions; counts what is fetched."""

    def __init__(self, snapshot: Path, files: list[str], commit: str = "c" * 40) -> None:
        self.snapshot, self.files, self.commit, self.calls = snapshot, files, commit, []

    def model_info(self, repo, revision=None):
        from types import SimpleNamespace

        self.calls.append(("info", repo, revision))
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        return SimpleNamespace(sha=self.commit, siblings=siblings)

    def snapshot_download(self, repo, revision=None, **options):
        self.calls.append(("download", repo, revision, options["allow_patterns"]))
        return str(self.snapshot)


@pytest.fixture
def hub(monkeypatch, folder):
    import huggingface_hub

    made = _Hub(folder, ["config.json", "model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "model_info", made.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_a, **_k: None)
    return made


def test_a_hub_model_is_pinned_to_the_commit_that_was_fetched(hub, resolve):
    found = resolve("org/name", revision="main")
    assert (found.kind, found.revision) == ("hub", hub.commit)
    assert hub.calls[0] == ("info", "org/name", "main")
    assert hub.calls[-1][:3] == ("download", "org/name", hub.commit)


def test_code_of_a_hub_model_is_fetched_only_for_one_trusted_by_name(hub, resolve):
    resolve("org/name")
    assert not any(pattern.endswith(".py") for pattern in hub.calls[-1][3])
    resolve("org/name", trust_remote_code="org/name")
    assert "*.py" in hub.calls[-1][3]


def test_a_hub_model_of_pickles_is_refused_before_anything_is_downloaded(hub, resolve):
    hub.files = ["config.json", "pytorch_model.bin"]
    with pytest.raises(SetupError, match="pickle"):
        resolve("org/name")
    assert not any(call[0] == "download" for call in hub.calls)


def test_without_a_network_the_error_names_the_model_and_two_ways_out(monkeypatch, resolve):
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    def offline(*_args, **_options):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_a, **_k: None)
    with pytest.raises(SetupError) as caught:
        resolve("org/name")
    assert "org/name" in caught.value.message
    assert "network" in caught.value.hint and "folder" in caught.value.hint


def test_a_hub_nobody_answers_at_is_a_setup_error_and_no_traceback(tmp_path):
    code = (
        "from pathlib import Path\n"
        "from trtspec.checkpoints.sources import resolve_model\n"
        "from trtspec.errors import SetupError\n"
        "try:\n"
        f"    resolve_model('org/name', cache=Path({str(tmp_path)!r}), base=Path({str(tmp_path)!r}))\n"
        "except SetupError as error:\n"
        "    print(error.message)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "org/name could not be fetched" in done.stdout
    assert done.returncode == 0


def test_a_pinned_model_on_disk_needs_no_network(monkeypatch, folder, tmp_path, resolve):
    import huggingface_hub

    commit = "d" * 40
    snapshot = folder.rename(tmp_path / commit)

    def offline(*_args, **_options):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_a, **_k: str(snapshot / "config.json")
    )
    assert resolve("org/name", revision=commit).revision == commit


def test_the_identity_of_a_pinned_hub_model_asks_nobody(tmp_path):
    commit = "e" * 40
    found = model_identity("org/name", revision=commit, cache=tmp_path, base=tmp_path)
    assert found == f"hub:org/name@{commit}"
