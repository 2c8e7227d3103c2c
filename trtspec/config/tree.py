"""Operations on a tree of nodes: laying one over another, finding, making paths absolute, saying values."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path as FilePath

from trtspec.config.reading import Node, quoted
from trtspec.config.references import PACKAGE_PREFIX, is_path
from trtspec.config.rules import Path

# Fields that may hold a path, relative to the file they are written in ("*": every item of a list).
_PATH_FIELDS: tuple[tuple[str, ...], ...] = (
    ("target", "model"),
    ("target", "trust_remote_code"),
    ("speculation", "draft", "model"),
    ("speculation", "drafts", "*", "model"),
    ("evaluation", "data"),
    ("data", "*"),
    ("training", "data", "*"),
    ("training", "start"),
)
_ALWAYS_PATHS: tuple[tuple[str, ...], ...] = (
    ("speculation", "datastore"),
    ("workload", "measured"),
    *(("targets", "*", field) for field in ("build", "config", "tokenizer")),  # of a sweep, as is "data"
)
_PATH_SUFFIXES = (".json", ".jsonl", ".parquet", ".yaml", ".yml")
_RESERVED = ("builtin", "stdlib", "packaged", "self", "follow_up")


def merge(base: Node, top: Node, path: Path = (), *, keep_places: bool = False) -> Node:
    """`top` laid over `base`, mapping by mapping; values keep the places they were written at.

    A merged mapping stands where `top` has it, with `keep_places` where `base` has it.
    """
    if base.mapping is None or top.mapping is None or (path == ("speculation",) and _other_method(base, top)):
        return top
    merged = dict(base.mapping)
    for key, node in top.mapping.items():
        inside = merged.get(key)
        merged[key] = node if inside is None else merge(inside, node, (*path, key), keep_places=keep_places)
    return replace(base if keep_places else top, value=merged)


def _other_method(base: Node, top: Node) -> bool:
    methods = [(node.mapping or {}).get("method") for node in (base, top)]
    return None not in methods and methods[0].value != methods[1].value


def find(root: Node, path: Path) -> Node | None:
    """The node at `path`, None when it is not written."""
    node: Node | None = root
    for step in path:
        inside = node.value
        if isinstance(step, str) and isinstance(inside, dict):
            node = inside.get(step)
        elif isinstance(step, int) and isinstance(inside, list) and step < len(inside):
            node = inside[step]
        else:
            return None
        if node is None:
            return None
    return node


def absolute_paths(node: Node, folder: FilePath, path: Path = ()) -> Node:
    """The tree with every path field made absolute against `folder`; hub ids and packages stay."""
    if isinstance(node.value, dict):
        entries = {key: absolute_paths(item, folder, (*path, key)) for key, item in node.value.items()}
        return replace(node, value=entries)
    if isinstance(node.value, list):
        return replace(node, value=[absolute_paths(n, folder, (*path, i)) for i, n in enumerate(node.value)])
    pattern = tuple("*" if isinstance(step, int) else step for step in path)
    if isinstance(node.value, str) and node.value and (pattern in _PATH_FIELDS or pattern in _ALWAYS_PATHS):
        return replace(node, value=_absolute(node.value, folder, pattern in _ALWAYS_PATHS))
    return node


def _absolute(text: str, folder: FilePath, always: bool) -> str:
    if text in _RESERVED or text.startswith(PACKAGE_PREFIX):
        return text
    candidate = os.path.normpath(folder / os.path.expanduser(text))
    written_as_path = always or is_path(text) or text.endswith(_PATH_SUFFIXES)
    return candidate if written_as_path or os.path.exists(candidate) else text


def dotted(path: Path) -> str:
    """A path as `--set` takes it: target.model, workload.batch_sizes[0]."""
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return steps.removeprefix(".")


def say(node: Node) -> str:
    """A value in words, for messages."""
    value = node.value
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if isinstance(value, int | float):
        return f"the number {quoted(node.text or str(value))[1:-1]}"
    return "a mapping" if isinstance(value, dict) else "a list"
