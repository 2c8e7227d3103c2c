"""The models a config names, found on this machine or (when asked to) brought to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import ConfigError, SetupError
from trtspec.events import Emit, Note, silent
from trtspec.files import sha256_file
from trtspec.manifest import ModelSource
from trtspec.store import StoredFile

if TYPE_CHECKING:
    from trtspec.config import Config

TARGET, DRAFT = "target", "draft"


@contextmanager
def describe_models(
    config: Config, cache: Path, emit: Emit = silent, *, fetch: bool, may_lack: bool = False
) -> Iterator[Mapping[str, ModelSource]]:
    """Every model of a config by its role: "target", "draft", and "draft 2", … where there are several.

    With `fetch` each is fetched or converted and checked. Without, nothing is written: `path` is None, and
    `config` may lie in a temporary folder that is gone when the block ends.
    may_lack: a bare config.json, or a hub model whose weights cannot be fetched, is described without weights.
    """
    named = _named(config)
    fetched = _fetched_or_described if may_lack else _fetched
    described = _described_or_bare if may_lack else _described
    if fetch:
        yield {role: fetched(role, model, cache, emit) for role, model in named.items()}
        return
    with _scratch_cache(cache) as scratch:
        yield {role: described(role, model, scratch, emit) for role, model in named.items()}


@contextmanager
def find_configs(config: Config, cache: Path) -> Iterator[Mapping[str, Path]]:
    """The config.json (or its folder) of every model of a config by role: enough to plan; weights are not read.

    Nothing is written that outlives the block.
    """
    with _scratch_cache(cache) as scratch:
        yield {
            role: _config_of(model.model, model.revision, scratch) for role, model in _named(config).items()
        }


@contextmanager
def find_config(reference: str, cache: Path, revision: str | None = None) -> Iterator[Path]:
    """As `find_configs`, for one model reference."""
    with _scratch_cache(cache) as scratch:
        yield _config_of(reference, revision, scratch)


def pin_revisions(config: Config, models: Mapping[str, ModelSource]) -> Config:
    """The config with the hub commits that were found in place of branches and blanks."""

    def pinned(section: Any, role: str) -> Any:
        if models[role].kind != "hub":
            return section
        return section.model_copy(update={"revision": models[role].revision})

    speculation, update = config.speculation, {}
    if getattr(speculation, "draft", None) is not None:
        update["draft"] = pinned(speculation.draft, DRAFT)
    if getattr(speculation, "drafts", None):
        update["drafts"] = tuple(pinned(d, draft_role(i)) for i, d in enumerate(speculation.drafts))
    return config.model_copy(
        update={
            "target": pinned(config.target, TARGET),
            "speculation": speculation.model_copy(update=update),
        }
    )


def _named(config: Config) -> dict[str, Any]:
    """Role → the section of the config that names a model there.

    Raises ConfigError for a draft that is still to be trained.
    """
    from trtspec.config.references import is_path
    from trtspec.train.head_modules import METHODS

    drafts = [d for d in (getattr(config.speculation, "draft", None),) if d is not None]
    for draft in drafts:
        if config.speculation.method in METHODS and is_path(draft.model) and not Path(draft.model).exists():
            raise ConfigError(
                f"there is no draft yet at {draft.model}",
                where="speculation.draft.model",
                hint="`trtspec train CONFIG`, with this same config, makes it from the target",
            )
    drafts += getattr(config.speculation, "drafts", ())
    return {TARGET: config.target, **{draft_role(i): draft for i, draft in enumerate(drafts)}}


def draft_role(index: int) -> str:
    """The role of a config's drafts, counted from 0."""
    return DRAFT if index == 0 else f"{DRAFT} {index + 1}"


def _fetched(role: str, section: Any, cache: Path, emit: Emit) -> ModelSource:
    from trtspec.checkpoints.sources import model_identity, resolve_model

    folder = resolve_model(
        section.model,
        revision=section.revision,
        trust_remote_code=getattr(section, "trust_remote_code", None),
        cache=cache,
        base=Path.cwd(),
        emit=emit,
    )
    revision = folder.revision if folder.kind == "hub" else section.revision
    return ModelSource(
        role=role,
        reference=section.model,
        kind=folder.kind,
        identity=model_identity(section.model, revision=revision, cache=cache, base=Path.cwd(), emit=emit),
        config=folder.path,
        revision=folder.revision,
        licence=folder.licence,
        path=folder.path,
        files=tuple(StoredFile(file.name, file.sha256, file.bytes) for file in folder.files),
    )


def _described(role: str, section: Any, scratch: Path, emit: Emit) -> ModelSource:
    from trtspec.checkpoints.sources import model_identity

    config = _config_of(section.model, section.revision, scratch)
    identity = model_identity(
        section.model, revision=section.revision, cache=scratch, base=Path.cwd(), emit=emit
    )
    kind, _, content = identity.partition(":")
    revision = content.rpartition("@")[2] if kind == "hub" else None
    return ModelSource(role, section.model, kind, identity, config, revision)


def _fetched_or_described(role: str, section: Any, cache: Path, emit: Emit) -> ModelSource:
    """As `_fetched`; without weights (`path` None) for a bare config.json and where the hub has none to give."""
    from trtspec.config.references import is_hub_id

    try:
        return _described_or_bare(role, section, cache, emit, fetch=True)
    except SetupError as error:
        if not is_hub_id(section.model) or Path(section.model).exists():
            raise
        try:
            model = _described(role, section, cache, emit)
        except SetupError:
            raise error from None  # not even its config is here: nothing can be planned
        emit(Note("model", f"without the weights of {section.model}: {error.message}", "warning"))
        return model


def _described_or_bare(
    role: str, section: Any, cache: Path, emit: Emit, *, fetch: bool = False
) -> ModelSource:
    """The source of a bare config.json, and of anything else as `_fetched` or `_described` give it."""
    bare = Path(section.model)
    if bare.is_file() and bare.suffix == ".json":
        return ModelSource(role, section.model, "config", f"config:{sha256_file(bare)}", bare)
    return (_fetched if fetch else _described)(role, section, cache, emit)


def _config_of(reference: str, revision: str | None, cache: Path) -> Path:
    from trtspec.checkpoints.sources import resolve_config

    return resolve_config(reference, revision=revision, cache=cache, base=Path.cwd())


@contextmanager
def _scratch_cache(cache: Path) -> Iterator[Path]:
    """A cache for one look: knows the hashes of unchanged files from `cache`, and is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="trtspec-") as scratch:
        if (remembered := cache / "hashes").is_dir():
            shutil.copytree(remembered, Path(scratch) / "hashes")
        yield Path(scratch)
