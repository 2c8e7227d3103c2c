"""What a schema says about a path: which keys stand there, which values they take.

top: the model of the whole file, where it is another than a config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trtspec.config.references import quantization_formats
from trtspec.config.rules import Path
from trtspec.config.schema import Config
from trtspec.config.speculation import SPECULATION_MODELS


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """One field. `path`: dotted, items of a list as `[]`. `methods`: speculation methods that have it."""

    path: str
    info: FieldInfo
    methods: tuple[str, ...] = ()


def method_of(model: type[BaseModel]) -> str:
    """The `method` of a speculation model."""
    return get_args(model.model_fields["method"].annotation)[0]


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The config models a field's annotation holds, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in models_in(part))


def models_at(
    path: Path, method: str | None = None, *, top: type[BaseModel] = Config
) -> tuple[type[BaseModel], ...]:
    """Models of the mapping at `path`; `method` narrows `speculation` to its own model."""
    models: tuple[type[BaseModel], ...] = (top,)
    for step in path:
        if isinstance(step, int):
            continue
        infos = [model.model_fields[step] for model in models if step in model.model_fields]
        models = tuple(dict.fromkeys(found for info in infos for found in models_in(info.annotation)))
        if step == "speculation" and method is not None:
            models = tuple(model for model in models if method_of(model) == method) or models
    return models


def keys_at(path: Path, method: str | None = None, *, top: type[BaseModel] = Config) -> tuple[str, ...]:
    """Keys that may stand in the mapping at `path`."""
    return tuple(
        dict.fromkeys(key for model in models_at(path, method, top=top) for key in model.model_fields)
    )


def field_at(path: Path, *, top: type[BaseModel] = Config) -> FieldInfo | None:
    """The field a path ends in (list indices are skipped), None when there is none."""
    named = tuple(step for step in path if isinstance(step, str))
    if not named:
        return None
    for model in models_at(named[:-1], top=top):
        if named[-1] in model.model_fields:
            return model.model_fields[named[-1]]
    return None


def choices_at(path: Path) -> tuple[str, ...]:
    """The named values a field takes; empty when it takes any."""
    if path[-1] == "quantization":
        return quantization_formats()
    infos = [m.model_fields[path[-1]] for m in models_at(path[:-1]) if path[-1] in m.model_fields]
    return tuple(dict.fromkeys(choice for info in infos for choice in _choices_in(info.annotation)))


def default_at(path: Path) -> Any:
    """The default of the field at `path`, None where it has none."""
    info = field_at(path)
    return None if info is None or info.is_required() else info.get_default(call_default_factory=True)


def all_fields() -> Iterator[FieldFacts]:
    """Every leaf field in the order of the schema; those of `speculation` once, with their methods."""
    for name, info in Config.model_fields.items():
        if name != "speculation":
            yield from _leaves(name, info, ())
            continue
        by_path: dict[str, FieldFacts] = {}
        for model in SPECULATION_MODELS:
            for key, field in model.model_fields.items():
                for leaf in _leaves(f"speculation.{key}", field, (method_of(model),)):
                    known = by_path.get(leaf.path, leaf)
                    methods = tuple(dict.fromkeys((*known.methods, *leaf.methods)))
                    by_path[leaf.path] = FieldFacts(leaf.path, known.info, methods)
        yield from by_path.values()


def _leaves(path: str, info: FieldInfo, methods: tuple[str, ...]) -> Iterator[FieldFacts]:
    models = models_in(info.annotation)
    if not models:
        yield FieldFacts(path, info, methods)
        return
    item = f"{path}[]" if get_origin(info.annotation) is tuple else path
    for key, field in models[0].model_fields.items():
        yield from _leaves(f"{item}.{key}", field, methods)


def _choices_in(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices_in(part))
