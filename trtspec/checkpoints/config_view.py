"""One view of a `config.json`, whatever wrapper it came in and however its keys are spelled.

Multimodal wrappers keep the language model under `text_config` (or a synonym), EAGLE-1 exports under
`model`, speculators under `transformer_layer_config`. `ConfigView` lays the inner object over the outer one
and gives typed access under all spellings of a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtspec.checkpoints.json_file import JsonObject, read_json_object
from trtspec.errors import ConfigError

# Where wrappers keep the decoder's own configuration, outermost spelling first.
_NESTED = (
    "thinker_config",
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "transformer_layer_config",
)
# `hidden_size` and its synonyms: their presence tells a decoder's configuration from a wrapper's.
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "dim")


class ConfigView:
    """Typed, spelling-tolerant access to a configuration.

    root: the object as stored. keys: root with the nested decoder configuration laid over it.
    where: the file, for errors. Accessors treat null as absent.
    """

    __slots__ = ("keys", "root", "where")

    def __init__(self, root: JsonObject, where: str) -> None:
        self.root = root
        self.where = where
        self.keys = _flatten(root, where)

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null; a dot steps into an object. None if none is."""
        for name in names:
            value: Any = self.keys
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def integer(self, *names: str, minimum: int = 0) -> int | None:
        """An integer, or None where absent, a per-layer list or "auto". Raises ConfigError for anything else."""
        for name in names:
            value = self.get(name)
            if value is None or value == "auto" or isinstance(value, list):
                continue
            return self._checked(name, value, minimum)
        return None

    def integers(self, *names: str) -> tuple[int, ...] | None:
        """A list of integers, or None where absent (or where a single number is given)."""
        for name in names:
            value = self.get(name)
            if isinstance(value, list) and value:
                return tuple(self._checked(name, item, 0) for item in value)
        return None

    def number(self, *names: str) -> float | None:
        """A finite or infinite number, or None where absent."""
        for name in names:
            value = self.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    def flag(self, *names: str) -> bool | None:
        """A boolean, or None where absent or null."""
        for name in names:
            value = self.get(name)
            if isinstance(value, bool):
                return value
        return None

    def string(self, *names: str) -> str | None:
        """A string, or None where absent."""
        for name in names:
            value = self.get(name)
            if isinstance(value, str):
                return value
        return None

    def strings(self, name: str) -> tuple[str, ...]:
        """The strings of a list; empty where it is absent or something else."""
        value = self.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    def token_ids(self, name: str) -> tuple[int, ...]:
        """`name` as ids: an integer or a list of them, the outer object first (it is what generation uses)."""
        for source in (self.root, self.keys):
            value = source.get(name)
            if value is None:
                continue
            items = value if isinstance(value, list) else [value]
            return tuple(self._checked(name, item, 0) for item in items if item is not None)
        return ()

    def _checked(self, name: str, value: Any, minimum: int) -> int:
        integral = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not integral or value < minimum:
            raise ConfigError(
                f"{name} is {value!r}, expected an integer of at least {minimum}",
                where=self.where,
                hint=f"correct {name} in the model's config.json",
            )
        return int(value)


def config_path(path: Path) -> Path:
    """The `config.json` meant by a folder or a file path. Raises ConfigError."""
    path = Path(path)
    if path.is_dir():
        found = path / "config.json"
        if not found.is_file():
            hint = "a model folder has a config.json beside its weights"
            if (path / "params.json").is_file():
                hint = "this is Mistral's own format (params.json); use the Hugging Face export of the same model"
            raise ConfigError("no config.json in this folder", where=str(path), hint=hint)
        return found
    return path


def load_view(path: Path) -> ConfigView:
    """Read the configuration at `path` (a folder or a bare file)."""
    file = config_path(path)
    return ConfigView(read_json_object(file), str(file))


def _flatten(root: JsonObject, where: str) -> JsonObject:
    keys = dict(root)
    inner = _inner(root, where)
    while inner is not None:
        keys = {
            **keys,
            **{name: value for name, value in inner.items() if value is not None or name not in keys},
        }
        inner = _inner(inner, where)
    return keys


def _inner(config: JsonObject, where: str) -> JsonObject | None:
    names = _NESTED if config.get("model_type") != "eagle" else (*_NESTED, "model")
    for name in names:
        value = config.get(name)
        if isinstance(value, dict) and value:
            return value
        if value is not None and not isinstance(value, dict) and name.endswith("_config"):
            raise ConfigError(f"{name} is {type(value).__name__}, expected an object", where=where)
    return None
