"""From a config file and all it `extends` to one tree.

Layers are merged mapping by mapping, the later one wins, lists are replaced whole. A `speculation` that
names another `method` replaces the one beneath it: options of one mechanism mean nothing to the next.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from trtspec.config.reading import UNUSABLE, Node, Place, Reader, label, read_bytes
from trtspec.config.tree import absolute_paths, merge, say
from trtspec.errors import ConfigError, ConfigProblem

MAX_PARENTS = 16
_STARTER_HINT = "`trtspec init` writes a commented starter config"


class Layers:
    """Reads a config file with everything it extends.

    problems: the faults of all files so far. incomplete: some text could not be read, so that a missing key
    may merely not have been seen.
    """

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.incomplete = False
        self._done: dict[str, Node | None] = {}

    def read(self, path: str | os.PathLike[str]) -> Node | None:
        """The merged tree, None when the file cannot be parsed. ConfigError when it cannot be opened."""
        content = read_bytes(Path(path))
        if isinstance(content, str):
            hint = _similar_file(Path(path)) or _STARTER_HINT
            raise ConfigError(f"the config file {content}", where=label(path), hint=hint)
        return self._file(Path(path), content, ())

    def _file(self, path: Path, content: bytes, chain: tuple[Path, ...]) -> Node | None:
        top = Place(label(path), 1, 1)
        found = len(self.problems)
        root = Reader(top.source, self.problems).read(content)
        if root is None or root.mapping is None:
            self.incomplete = True
            if root is None and len(self.problems) == found:
                self._report(top, "the file is empty", _STARTER_HINT)
            elif root is not None and root.value is not UNUSABLE:
                self._report(
                    root.place, f"a config is a mapping of sections, this is {say(root)}", _STARTER_HINT
                )
            return None
        entries = dict(root.mapping)
        parents = entries.pop("extends", None)
        own = absolute_paths(Node(root.place, entries), Path(os.path.abspath(path.parent)))
        if parents is None:
            return own
        base = Node(top, {})
        for reference in self._references(parents):
            parent = self._parent(reference, path, (*chain, path))
            if parent is None:
                self.incomplete = True
            else:
                base = merge(base, parent)
        return merge(base, own)

    def _references(self, node: Node) -> list[Node]:
        """The file names of an `extends`; faulty ones are reported and left out."""
        references = node.value if isinstance(node.value, list) else [node]
        if not 1 <= len(references) <= MAX_PARENTS:
            self._report(node.place, f"extends names {len(references)} files", f"name 1 to {MAX_PARENTS}")
            references = []
        names = [
            reference for reference in references if isinstance(reference.value, str) and reference.value
        ]
        for reference in references:
            if reference not in names and reference.value is not UNUSABLE:
                message = f"extends takes file names, this is {say(reference)}"
                self._report(reference.place, message, "write extends: other.yaml")
        self.incomplete |= not names or len(names) < len(references)
        return names

    def _parent(self, reference: Node, child: Path, chain: tuple[Path, ...]) -> Node | None:
        path = Path(os.path.normpath(child.parent / reference.value))
        real = os.path.realpath(path) if "\0" not in str(path) else str(path)
        names = [os.path.realpath(link) for link in chain]
        if real in names:
            cycle = " -> ".join(label(link) for link in (*chain[names.index(real) :], path))
            self._report(
                reference.place, f"extends goes round in a circle: {cycle}", "remove one of these extends"
            )
            return None
        if len(chain) > MAX_PARENTS:
            self._report(
                reference.place, f"extends is nested deeper than {MAX_PARENTS} files", "flatten the chain"
            )
            return None
        if real not in self._done:
            content = read_bytes(path)
            if isinstance(content, str):
                self._report(reference.place, f"{label(path)} {content}", _similar_file(path))
                return None
            self._done[real] = self._file(path, content, chain)
        return self._done[real]

    def _report(self, place: Place, message: str, hint: str | None) -> None:
        self.problems.append(ConfigProblem(str(place), message, hint))


def _similar_file(path: Path) -> str | None:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {label(near[0])}?" if near else None
