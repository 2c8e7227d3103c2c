"""YAML text to a tree of values that know where they were written.

Scalars follow the YAML 1.2 core schema: `no`, `1:30` and `2024-01-01` are text, `1e3` is a number,
`010` is ten. Refused: duplicate keys, merge keys, tags other than the core ones, several documents,
control characters, and whatever is larger than the limits below.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import ConfigProblem

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_INT = 2**63 - 1

TAG_PREFIX = "tag:yaml.org,2002:"
SCALAR_PATTERNS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        re.ASCII,
    ),
}
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a config: `source` is a file or a `--set` text; line and column count from 1."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


class _Unusable:
    """Stands for a value that could not be read; a problem has been reported at its place."""


UNUSABLE = _Unusable()


@dataclass(frozen=True, slots=True)
class Node:
    """One value. `key`: where its key stands, None without one. `text`: a scalar as written."""

    place: Place
    value: Any
    key: Place | None = None
    text: str = ""

    @property
    def mapping(self) -> dict[str, Node] | None:
        """The entries, if this is a mapping."""
        return self.value if isinstance(self.value, dict) else None

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class _Oversize(yaml.MarkedYAMLError):
    """Well-formed YAML past the limits of this module."""


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and composer with YAML 1.2's idea of plain scalars, and with limits.

    The limits are kept while events arrive, before the recursive composer goes any deeper.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0

    def get_event(self) -> yaml.Event:
        event = super().get_event()
        self._depth += isinstance(event, yaml.CollectionStartEvent)
        self._depth -= isinstance(event, yaml.CollectionEndEvent)
        self._values += isinstance(event, yaml.NodeEvent)
        if self._depth > MAX_DEPTH:
            raise _Oversize(problem=f"nested deeper than {MAX_DEPTH}", problem_mark=event.start_mark)
        if self._values > MAX_VALUES:
            raise _Oversize(problem=f"more than {MAX_VALUES:,} values", problem_mark=event.start_mark)
        return event


def add_resolvers(user: type[yaml.resolver.BaseResolver]) -> None:
    """Teaches a PyYAML loader or dumper which plain scalars YAML 1.2's core schema does not read as text."""
    for name, pattern in SCALAR_PATTERNS.items():
        whole = re.compile(rf"(?:{pattern.pattern})\Z", re.ASCII)
        user.add_implicit_resolver(TAG_PREFIX + name, whole, None)


add_resolvers(_Loader)


def label(text: str | os.PathLike[str]) -> str:
    """A source name that prints on one line whatever bytes it holds."""
    shown = os.fspath(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", re.sub(r"\s", " ", shown))


def read_bytes(path: Path) -> bytes | str:
    """A file's content, or the reason why it cannot be read."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "is a folder, not a config file"
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


class Reader:
    """Reads one YAML text; faults are appended to `problems` and reading goes on where it can.

    source: the name in every place. column: what is added to columns of the first line (a `--set` value
    starts behind its path). numbered_keys: whether keys may be whole numbers; they come out as their text.
    """

    def __init__(
        self, source: str, problems: list[ConfigProblem], column: int = 0, *, numbered_keys: bool = False
    ) -> None:
        self._source = source
        self._problems = problems
        self._column = column
        self._key_tags = {TAG_PREFIX + "str", *([TAG_PREFIX + "int"] if numbered_keys else [])}
        self._values = 0

    def read(self, content: bytes | str) -> Node | None:
        """The tree of one document; None when it is empty or cannot be parsed (then a problem says why)."""
        text = self._decode(content) if isinstance(content, bytes) else content
        if text is None or self._has_control_characters(text):
            return None
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return None if root is None else self._node(root, None, ())
        except yaml.MarkedYAMLError as error:
            self._syntax(error)
        except (yaml.YAMLError, ValueError, OverflowError):
            # PyYAML lets Python's own error through for an escape or a directive number out of range.
            self._report(
                self._at(loader.line, loader.column), "not valid YAML: an escape or number out of range", None
            )
        finally:
            loader.dispose()
        return None

    def _decode(self, content: bytes) -> str | None:
        if len(content) > MAX_BYTES:
            self._report(
                self._at(0, 0),
                f"larger than {MAX_BYTES:,} bytes",
                "is this the config? large data belongs in files",
            )
            return None
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            good = content[: error.start].decode("utf-8-sig")
            self._report(
                self._place_of(good, len(good)),
                f"byte 0x{content[error.start]:02x} is not valid UTF-8",
                "save the file as UTF-8",
            )
            return None

    def _has_control_characters(self, text: str) -> bool:
        found = _CONTROL.search(text)
        if found:
            self._report(
                self._place_of(text, found.start()),
                f"control character U+{ord(found.group()):04X}",
                "delete it; in text, write it as an escape inside double quotes",
            )
        return found is not None

    def _node(self, node: yaml.Node, key: Place | None, above: tuple[yaml.Node, ...]) -> Node:
        place = self._mark(node.start_mark)
        self._values += 1
        if node in above or len(above) > MAX_DEPTH or self._values > MAX_VALUES:
            if self._values <= MAX_VALUES + 1:
                self._report(place, "aliases expand without end", "write the values out, or use extends")
            self._values = max(self._values, MAX_VALUES + 1)
            return Node(place, UNUSABLE, key)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place, key)
        expected = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != TAG_PREFIX + expected:
            self._unknown_tag(node, place)
            return Node(place, UNUSABLE, key)
        above = (*above, node)
        if isinstance(node, yaml.SequenceNode):
            return Node(place, [self._node(item, None, above) for item in node.value], key)
        return Node(place, dict(self._entries(node, above)), key)

    def _entries(self, node: yaml.MappingNode, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, Node]]:
        seen: dict[str, Place] = {}
        for key_node, value_node in node.value:
            place = self._mark(key_node.start_mark)
            scalar = isinstance(key_node, yaml.ScalarNode) and key_node.tag in self._key_tags
            if not scalar or _CONTROL.search(key_node.value):
                self._report(place, "keys are text", "write a field name in front of the colon")
                continue
            name = key_node.value
            if name == "<<":
                self._report(place, "merge keys are not part of YAML 1.2", "use extends: other.yaml")
                continue
            if name in seen:
                self._report(
                    place, f"{quoted(name)} is already given at line {seen[name].line}", "keep one of them"
                )
            seen[name] = place
            yield name, self._node(value_node, place, above)

    def _scalar(self, node: yaml.ScalarNode, place: Place, key: Place | None) -> Node:
        kind, text = node.tag.removeprefix(TAG_PREFIX), node.value
        if kind == "str":
            if not _CONTROL.search(text):
                return Node(place, text, key, text)
            self._report(place, "control character in text", "remove the escape")
        elif kind not in SCALAR_PATTERNS:
            self._unknown_tag(node, place)
        elif not SCALAR_PATTERNS[kind].fullmatch(text):
            self._report(place, f"{quoted(text)} does not fit its tag !!{kind}", "remove the tag")
        else:
            value = _value_of(kind, text)
            if value is not None or kind == "null":
                return Node(place, value, key, text)
            self._report(place, "a number of more than 64 bits", "no field takes a number that large")
        return Node(place, UNUSABLE, key, text)

    def _unknown_tag(self, node: yaml.Node, place: Place) -> None:
        tag = node.tag.replace(TAG_PREFIX, "!!")
        self._report(place, f"tag {quoted(tag)} is not allowed", "write plain values; a config runs no code")

    def _syntax(self, error: yaml.MarkedYAMLError) -> None:
        what, mark = error.problem or "cannot be parsed", error.problem_mark
        if "end of stream" in what or "stream end" in what or mark is None:
            mark = error.context_mark or mark  # where the open quote or bracket stands
        place = self._mark(mark) if mark else self._at(0, 0)
        if isinstance(error, _Oversize):
            self._report(place, what, "no config needs that: is this the right file?")
            return
        if what.startswith("but found another document"):
            what = "a second document begins here"
        hint = next((advice for sign, advice in _SYNTAX_HINTS.items() if sign in what), None)
        context = f" ({error.context})" if error.context and not hint else ""
        self._report(place, f"not valid YAML: {what}{context}", hint)

    def _report(self, place: Place, message: str, hint: str | None) -> None:
        self._problems.append(ConfigProblem(str(place), message, hint))

    def _mark(self, mark: yaml.Mark) -> Place:
        return self._at(mark.line, mark.column)

    def _at(self, line: int, column: int) -> Place:
        return Place(self._source, line + 1, column + 1 + (self._column if line == 0 else 0))

    def _place_of(self, text: str, index: int) -> Place:
        lines = re.split(r"\r\n|\r|\n", text[:index])
        return self._at(len(lines) - 1, len(lines[-1]))


_SYNTAX_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "check the indentation and the line above, or quote the value",
    "expected <block end>": "keys of one mapping start in the same column",
    "could not find expected ':'": "write `key: value`, with a space behind the colon",
    "another document": "one file holds one config: remove the --- line",
    "undefined alias": "quote a value that begins with *",
    "'%'": "quote a value that begins with %",
    "'@'": "quote a value that begins with @",
    "'`'": "quote a value that begins with a backtick",
}


def quoted(text: str, limit: int = 60) -> str:
    """Text in quotes for a message: one line, shortened, printable."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return f"'{label(shown)}'"


def _value_of(kind: str, text: str) -> Any:
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        if len(text) > 24:
            return None
        number = int(text, 0) if text.startswith(("0o", "0x")) else int(text)
        return number if abs(number) <= MAX_INT else None
    if kind == "float":
        special = text.lower().lstrip("+-")
        if special in (".inf", ".nan"):
            return math.nan if special == ".nan" else math.copysign(math.inf, -1 if text[0] == "-" else 1)
        return float(text)
    return None
