"""`load_config`: a file and its overrides to a valid `Config`, or every problem at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trtspec.config.layers import Layers
from trtspec.config.messages import explain
from trtspec.config.overrides import apply_overrides
from trtspec.config.reading import UNUSABLE, Node, Place, label
from trtspec.config.rules import Contradiction, Path
from trtspec.config.schema import Config
from trtspec.config.speculation import METHODS
from trtspec.config.tree import dotted, find
from trtspec.errors import ConfigError, ConfigProblem

# What stands in for a faulty required field while the rest of the config is checked.
_STAND_INS: dict[Path, Any] = {
    ("name",): "unnamed",
    ("target",): {"model": "unnamed"},
    ("target", "model"): "unnamed",
    ("speculation",): {"method": "none"},
}

Top = TypeVar("Top", bound=BaseModel)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """The config at `path` with everything it extends and with `--set` overrides (`a.b=value`) applied.

    Relative paths in a file are relative to that file, those in an override to the working directory; both
    come out absolute. Raises ConfigError holding every problem found, each at file:line:column.
    """
    layers = Layers()
    root = apply_overrides(_root(layers, path), overrides, layers.problems)
    return _checked(root, layers, Config)


def load_file(path: str | os.PathLike[str], top: type[Top]) -> Top:
    """Another kind of YAML file, held against its own model, with everything it extends. As `load_config`."""
    layers = Layers()
    return _checked(_root(layers, path), layers, top)


def _root(layers: Layers, path: str | os.PathLike[str]) -> Node:
    return layers.read(path) or Node(Place(label(path), 1, 1), {})


def _checked(root: Node, layers: Layers, top: type[Top]) -> Top:
    check = _Check(root, layers.incomplete, top)
    found = check.run()
    problems = layers.problems + check.problems
    if problems or found is None:
        raise ConfigError(problems=_in_file_order(problems))
    return found


class _Check:
    """Validates a merged tree. Faulty parts are reported, replaced by stand-ins, and the rest is checked
    again, so that one fault never hides another."""

    def __init__(self, root: Node, incomplete: bool, top: type[BaseModel]) -> None:
        self.problems: list[ConfigProblem] = []
        self._root = root
        self._incomplete = incomplete
        self._top = top
        self._faulty: list[Path] = list(_unusable(root, ()))
        self._data: dict[str, Any] = root.plain()

    def run(self) -> Any:
        """The valid model if there is no fault; None otherwise."""
        for path in self._faulty:
            self._mend(path)
        while True:
            try:
                valid = self._top.model_validate(self._data)
            except ValidationError as error:
                if not self._note(error):
                    return None
            else:
                return None if self._faulty else valid

    def _note(self, error: ValidationError) -> bool:
        """Reports what is new in `error` and mends the data; False when there is nothing left to mend."""
        mended = False
        for fault in error.errors(include_url=False):
            if fault["type"] == "contradictions":
                for contradiction in fault["ctx"]["found"]:
                    self._contradiction(contradiction)
                continue
            path = _path_of(fault)
            if not any(_within(path, known) or _within(known, path) for known in self._faulty):
                self._fault(path, fault)
                self._faulty.append(path)
            mended |= self._mend(path)
        return mended

    def _fault(self, path: Path, fault: dict[str, Any]) -> None:
        if fault["type"] in ("missing", "union_tag_not_found") and self._incomplete:
            return
        node = find(self._root, path)
        message, hint = explain(self._root, path, node, fault, self._top)
        self.problems.append(ConfigProblem(str(self._place(path, node, fault["type"])), message, hint))

    def _place(self, path: Path, node: Node | None, kind: str) -> Place:
        if node is None:
            above = find(self._root, path[:-1]) or self._root
            return above.key or above.place
        return node.key if kind == "extra_forbidden" and node.key else node.place

    def _contradiction(self, found: Contradiction) -> None:
        if any(_within(p, known) or _within(known, p) for p in found.paths for known in self._faulty):
            return
        written = [node for node in (find(self._root, path) for path in found.paths) if node is not None]
        if self._incomplete and len(written) < len(found.paths):
            return  # a default stands where the unread text may have said otherwise
        place = (written[0] if written else self._root).place
        problem = ConfigProblem(str(place), f"{dotted(found.paths[0])}: {found.message}", found.hint)
        if problem not in self.problems:
            self.problems.append(problem)

    def _mend(self, path: Path) -> bool:
        """Takes the value at `path` out, or puts a stand-in there; False when nothing changed."""
        while path:
            if path in _STAND_INS:
                return _put(self._data, path, deepcopy(_STAND_INS[path]))
            if not isinstance(path[-1], int) and _take(self._data, path):
                return True
            path = path[:-1]
        return False


def _path_of(fault: dict[str, Any]) -> Path:
    loc = fault["loc"]
    if fault["type"].startswith("union_tag"):
        return (*loc, "method")
    if len(loc) > 1 and loc[0] == "speculation" and loc[1] in METHODS:
        return (loc[0], *loc[2:])
    return loc


def _within(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer


def _unusable(node: Node, path: Path) -> Iterator[Path]:
    if node.value is UNUSABLE:
        yield path
    entries = node.value.items() if isinstance(node.value, dict) else ()
    items = enumerate(node.value) if isinstance(node.value, list) else ()
    for step, inner in (*entries, *items):
        yield from _unusable(inner, (*path, step))


def _put(data: dict[str, Any], path: Path, value: Any) -> bool:
    inside: Any = data
    for step in path[:-1]:
        inside = inside[step]
    changed = inside.get(path[-1]) != value
    inside[path[-1]] = value
    return changed


def _take(data: Any, path: Path) -> bool:
    for step in path[:-1]:
        inside = dict(enumerate(data)) if isinstance(data, list) else data
        if not isinstance(inside, dict) or step not in inside:
            return False
        data = inside[step]
    if not isinstance(data, dict) or path[-1] not in data:
        return False
    del data[path[-1]]
    return True


def _in_file_order(problems: list[ConfigProblem]) -> list[ConfigProblem]:
    sources: dict[str, int] = {}

    def position(problem: ConfigProblem) -> tuple[int, int, int]:
        source, line, column = problem.where.rsplit(":", 2)
        return sources.setdefault(source, len(sources)), int(line), int(column)

    return sorted(dict.fromkeys(problems), key=position)
