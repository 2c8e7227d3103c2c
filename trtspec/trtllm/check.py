"""A TensorRT-LLM settings file against the contract of a version: what is wrong, where, and what to write instead."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.config.reading import Node, Reader, label, quoted, read_bytes
from trtspec.errors import ConfigError, ConfigProblem
from trtspec.trtllm.checks import CHECKS, Written
from trtspec.trtllm.contract import (
    Contract,
    DecodingType,
    Field,
    Level,
    Rename,
    Rule,
    contract_for,
    versions_with,
)

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "text": ((str,), "text"),
    "list": ((list,), "a list"),
    "schedule": ((dict,), "a mapping of batch sizes to draft lengths"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. path: dotted key, "" for the file. where: file:line:column, or the path without a file.

    instead: what to write, None where nothing fits.
    """

    rule: str
    level: Level
    path: str
    where: str
    message: str
    instead: str | None = None

    def __str__(self) -> str:
        hint = f"\n  write: {self.instead}" if self.instead else ""
        return f"{self.where}: {self.level}: {self.message} [{self.rule}]{hint}"


def check_settings(settings: Mapping[str, Any], version: str) -> tuple[Finding, ...]:
    """Check settings that are already a mapping (`LLM()` keywords); places are dotted keys."""
    contract = contract_for(version)
    return tuple(_findings(contract, settings, lambda path, _key: path or "top level"))


def check_file(path: Path, version: str) -> tuple[Finding, ...]:
    """Check a model.yaml, a `--config` file or a bare speculative_config (YAML or JSON), most serious first.

    Raises ConfigError for a version the table does not cover, or a file that is no mapping.
    """
    contract = contract_for(version)
    root = read_settings(path)
    bare = "decoding_type" in (root.mapping or {})
    tree = {"speculative_config": root.plain()} if bare else root.plain()

    def place(dotted: str, key: bool) -> str:
        steps = dotted.split(".") if dotted else []
        node, steps = root, steps[1:] if bare else steps
        for step in steps:
            inner = (node.mapping or {}).get(step)
            if inner is None:
                break
            node = inner
        return str(node.key if key and node.key else node.place)

    return tuple(_findings(contract, tree, place))


def read_settings(path: Path) -> Node:
    """The tree of a settings file. Raises ConfigError with every problem of its YAML."""
    content = read_bytes(path)
    if isinstance(content, str):
        raise ConfigError(f"{label(os.fspath(path))} {content}", where=label(os.fspath(path)))
    problems: list[ConfigProblem] = []
    root = Reader(label(os.fspath(path)), problems, numbered_keys=True).read(content)
    if problems:
        raise ConfigError(problems=problems)
    if root is None or root.mapping is None:
        raise ConfigError("the file is no mapping of settings", where=label(os.fspath(path)))
    return root


def _findings(contract: Contract, tree: Mapping[str, Any], place: Any) -> list[Finding]:
    speculative = tree.get("speculative_config")
    decoding = None
    if isinstance(speculative, Mapping):
        decoding = contract.type_called(str(speculative.get("decoding_type")))
    found = [*_keys(contract, tree, (), decoding)]
    if isinstance(speculative, Mapping):
        found += _type_faults(contract, speculative, decoding)
    written = Written(contract, tree, decoding)
    for rule in contract.rules:
        found += _broken(rule, written)
    placed = [
        Finding(
            f.rule,
            f.level,
            f.path,
            place(f.path, f.rule in ("unknown-key", "renamed-key")),
            f.message,
            f.instead,
        )
        for f in found
    ]
    order = ("error", "warning", "note")
    return sorted(dict.fromkeys(placed), key=lambda finding: order.index(finding.level))


def _keys(
    contract: Contract, tree: Mapping[str, Any], path: tuple[str, ...], decoding: DecodingType | None
) -> Iterator[Finding]:
    """Unknown keys and wrong values of the mapping at `path`, and of what is inside it."""
    fields = contract.fields_of(path, decoding)
    if fields is None:
        return
    unknown_type = path[:1] == ("speculative_config",) and decoding is None
    for key, value in tree.items():
        dotted = ".".join((*path, key))
        if key not in fields:
            if not unknown_type or _rename(contract, dotted):
                yield _unknown(contract, fields, path, key, decoding)
            continue
        field = fields[key]
        if (
            isinstance(value, Mapping)
            and (inside := (*path, key))
            and contract.fields_of(inside, decoding) is not None
        ):
            yield from _keys(contract, value, inside, decoding)
        elif value is not None and (fault := _value_fault(contract, field, value)):
            yield _finding("value", dotted, f"{dotted}: {fault}", _suggestion(field), field.unconfirmed)
    for name, field in fields.items():
        if field.required and name not in tree and name != "decoding_type":
            yield _finding(
                "missing-key", ".".join(path), f"{'.'.join((*path, name))} is missing", f"{name}: …"
            )


def _unknown(
    contract: Contract,
    fields: Mapping[str, Field],
    path: tuple[str, ...],
    key: str,
    decoding: DecodingType | None,
) -> Finding:
    dotted, version = ".".join((*path, key)), contract.version
    inside = f"{decoding.name} of TensorRT-LLM {version}" if decoding and path else f"TensorRT-LLM {version}"
    if rename := _rename(contract, dotted):
        message = f"{inside} calls {key} something else" if rename.new else f"{inside} has no {key}"
        message += f": {rename.says}" if rename.says else ""
        level: Level = "warning" if decoding and decoding.name in rename.remapped_for else "error"
        return Finding("renamed-key", level, dotted, "", message, rename.new)
    home = path[-1] if path and path[-1] != "speculative_config" else "settings"
    if path[:1] == ("speculative_config",) and len(path) == 1:
        homes = ["speculative_fields", *([decoding.name] if decoding else [])]
    else:
        homes = [home]
    for named in homes:
        if versions := versions_with(key, field_of=named):
            return Finding(
                "unknown-key",
                "error",
                dotted,
                "",
                f"{inside} has no {key}; it exists {versions}",
                "remove it",
            )
    owners = [t.spellings[0].name for t in contract.types.values() if key in t.fields]
    if path == ("speculative_config",) and owners:
        message = f"{inside} has no {key}, which is a key of {' and '.join(owners)}"
        return Finding("unknown-key", "error", dotted, "", message, "remove it")
    near = difflib.get_close_matches(key, fields, 1, 0.6)
    elsewhere = [
        name for name, section in contract.sections.items() if key in section and name in contract.settings
    ]
    hint = near[0] if near else f"{elsewhere[0]}.{key}" if elsewhere else None
    if hint is None and not path and key in contract.speculative_fields:
        hint = f"speculative_config.{key}"
    return Finding("unknown-key", "error", dotted, "", f"{inside} has no key {quoted(key)}", hint)


def _rename(contract: Contract, dotted: str) -> Rename | None:
    return next((rename for rename in contract.renames if rename.old == dotted), None)


def _value_fault(contract: Contract, field: Field, value: Any) -> str | None:
    if field.kind not in _KINDS:
        is_section = field.kind in contract.sections or field.kind == "speculative_config"
        return "must be a mapping" if is_section else None
    types, name = _KINDS[field.kind]
    if not isinstance(value, types) or (isinstance(value, bool) and field.kind in ("int", "float")):
        return f"must be {name}, this is {quoted(str(value))}"
    if field.choices and value not in field.choices:
        return f"{quoted(str(value))} is no value of it; it takes {', '.join(field.choices)}"
    if field.lowest is not None and value < field.lowest:
        return f"must be at least {field.lowest}, this is {value}"
    if field.highest is not None and value > field.highest:
        return f"must be at most {field.highest}, this is {value}"
    if value in field.excludes if field.excludes else False:
        return f"must not be {value}"
    return None


def _suggestion(field: Field) -> str | None:
    return f"{field.name}: {_spelled(field.default)}" if field.default is not None else None


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_faults(
    contract: Contract, speculative: Mapping[str, Any], decoding: DecodingType | None
) -> Iterator[Finding]:
    path, name = "speculative_config.decoding_type", speculative.get("decoding_type")
    runs = ", ".join(t.spellings[0].name for t in contract.types.values() if not t.engine_only)
    if name is None:
        yield _finding("decoding-type", path, "speculative_config has no decoding_type", f"one of {runs}")
        return
    if decoding is None:
        near = _nearest_type(contract, str(name))
        versions = versions_with(str(name))
        message = f"TensorRT-LLM {contract.version} has no decoding_type {quoted(str(name))}"
        message += f"; it exists {versions}" if versions and not near else ""
        yield _finding("decoding-type", path, message, near or f"one of {runs}")
        return
    if decoding.engine_only:
        message = f"{name} ran on TensorRT-LLM's engines alone; the PyTorch backend refuses it"
        yield _finding("decoding-type", path, message, f"one of {runs}")
        return
    spelling = next(s for s in decoding.spellings if s.name == name)
    if spelling.warns:
        preferred = f"decoding_type: {decoding.spellings[0].name}"
        message = f"{name}: {spelling.warns}"
        yield _finding("decoding-type", path, message, preferred, spelling.unconfirmed, "warning")


def _nearest_type(contract: Contract, name: str) -> str | None:
    plain = {
        spelling.name.lower().replace("_", ""): decoding.spellings[0].name
        for decoding in contract.types.values()
        for spelling in decoding.spellings
    }
    near = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1, 0.75)
    return f"decoding_type: {plain[near[0]]}" if near else None


def _broken(rule: Rule, written: Written) -> Iterator[Finding]:
    if rule.check is not None:
        for path, message, instead in CHECKS[rule.check](written):
            yield _finding(rule.id, path, _sourced(message, rule), instead, rule.unconfirmed, rule.level)
    elif all(_holds(written, key, condition) for key, condition in rule.when.items()):
        path = next((key for key in rule.when if key not in ("type", "speculates")), "speculative_config")
        keys = [key for key in rule.when if key not in ("type", "speculates")]
        path = next((key for key in reversed(keys) if _is_written(written.tree, key)), path)
        yield _finding(rule.id, path, _sourced(rule.says, rule), rule.instead, rule.unconfirmed, rule.level)


def _sourced(message: str, rule: Rule) -> str:
    return f"{message} ({rule.source})" if rule.source else message


def _is_written(tree: Any, path: str) -> bool:
    for step in path.split("."):
        if not isinstance(tree, Mapping) or step not in tree:
            return False
        tree = tree[step]
    return True


def _holds(written: Written, key: str, condition: Any) -> bool:
    if key == "speculates":
        return (written.tree.get("speculative_config") is not None) == condition
    if key == "type":
        return written.decoding is not None and written.decoding.name in condition
    value = written.get(key)
    if not isinstance(condition, Mapping):
        return value == condition
    if "set" in condition:
        return (value is not None) == condition["set"]
    if "not" in condition:
        return value != condition["not"]
    return isinstance(value, int | float) and value > condition["above"]


def _finding(
    rule: str,
    path: str,
    message: str,
    instead: str | None,
    unconfirmed: str | None = None,
    level: Level = "error",
) -> Finding:
    doubt = f" (unconfirmed: {unconfirmed})" if unconfirmed else ""
    return Finding(rule, level, path, "", message + doubt, instead)
