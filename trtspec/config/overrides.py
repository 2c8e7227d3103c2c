"""`--set a.b[0]=value`: parsed into a place-bearing value and laid over a tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

from trtspec.config.fields import default_at
from trtspec.config.reading import MAX_DEPTH, UNUSABLE, Node, Place, Reader, label
from trtspec.config.rules import Path
from trtspec.config.tree import absolute_paths, dotted, merge
from trtspec.errors import ConfigProblem

_STEP = re.compile(r"(?P<dot>\.?)(?P<key>[A-Za-z0-9_-]+)|\[(?P<index>[0-9]{1,6})\]", re.ASCII)
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set`. `steps`: keys and list indices, each with its place in the text."""

    steps: tuple[tuple[str | int, Place], ...]
    value: Node

    @property
    def path(self) -> Path:
        """The steps without their places."""
        return tuple(step for step, _ in self.steps)


def apply_overrides(root: Node, texts: Sequence[str], problems: list[ConfigProblem]) -> Node:
    """`root` with every override laid over it in order; faults are appended to `problems`.

    Relative paths in a value are relative to the working directory. An override of `speculation.method`
    goes first: it replaces the section, and must not sweep away what the others put there.
    """
    overrides = [override for text in texts if (override := _parse(text, problems)) is not None]
    for override in sorted(overrides, key=lambda o: o.path != ("speculation", "method")):
        value = absolute_paths(override.value, FilePath.cwd(), override.path)
        layer = _layer(root, override.steps, value, (), problems)
        if layer is not None:
            root = merge(root, layer, keep_places=True)
    return root


def _parse(text: str, problems: list[ConfigProblem]) -> Override | None:
    source = f"--set {label(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…')}"
    name, equals, value_text = text.partition("=")
    steps: list[tuple[str | int, Place]] = []
    end = 0
    while match := _STEP.match(name, end):
        if match["index"] is not None:
            steps.append((int(match["index"]), Place(source, 1, match.start("index") + 1)))
        elif bool(match["dot"]) == bool(steps):
            steps.append((match["key"], Place(source, 1, match.start("key") + 1)))
        else:
            break
        end = match.end()
    fault = None
    if end != len(name) or not equals or not steps or isinstance(steps[0][0], int):
        fault = "--set takes path=value", "for example --set workload.context=4096"
    elif len(steps) > MAX_DEPTH:
        fault = "no field lies that deep", None
    elif steps[0][0] == "extends":
        fault = "extends belongs in a file", "set single fields with --set"
    if fault:
        problems.append(ConfigProblem(str(Place(source, 1, end + 1)), *fault))
        return None
    found = len(problems)
    value = Reader(source, problems, column=len(name) + 1).read(value_text)
    if value is None:  # nothing behind the equals sign is YAML's null
        value = Node(Place(source, 1, len(name) + 2), None if len(problems) == found else UNUSABLE)
    return Override(tuple(steps), value)


def _layer(
    existing: Node | None,
    steps: tuple[tuple[str | int, Place], ...],
    value: Node,
    path: Path,
    problems: list[ConfigProblem],
) -> Node | None:
    """What to lay over `existing` so that `value` stands at `steps`; None, and a problem, if it cannot."""
    if not steps:
        return value
    (step, place), rest = steps[0], steps[1:]
    if isinstance(step, str):
        inside = existing.mapping if existing else None
        inner = _layer((inside or {}).get(step), rest, value, (*path, step), problems)
        return None if inner is None else Node(place, {step: replace(inner, key=place)})
    items = existing.value if existing else _default_items(path, place)
    if not isinstance(items, list) or step >= len(items):
        count = f"has {len(items)} items, the first is [0]" if isinstance(items, list) else "is not a list"
        hint = f"set the whole list: --set {dotted(path)}=[…]"
        problems.append(ConfigProblem(str(place), f"{dotted(path)} {count}", hint))
        return None
    inner = _layer(items[step], rest, value, (*path, step), problems)
    if inner is None:
        return None
    return Node(place, [*items[:step], merge(items[step], inner), *items[step + 1 :]])


def _default_items(path: Path, place: Place) -> list[Node] | None:
    default = default_at(path)
    return [Node(place, item) for item in default] if isinstance(default, tuple) else None
