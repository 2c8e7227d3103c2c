"""The table of contract.yaml, as one TensorRT-LLM version sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from trtspec.errors import ConfigError

Version = tuple[int, int, int, int]
Level = Literal["error", "warning", "note"]

_FINAL = 1_000_000  # a release comes after all its candidates


@dataclass(frozen=True, slots=True)
class Field:
    """One key. kind: int, float, bool, text, list, any, schedule, or the name of a section.

    default: None where it has none. choices: empty for any value. excludes: values inside the limits that are refused.
    unconfirmed: what is not settled about it.
    """

    name: str
    kind: str
    default: Any = None
    required: bool = False
    lowest: float | None = None
    highest: float | None = None
    choices: tuple[str, ...] = ()
    excludes: tuple[int, ...] = ()
    unconfirmed: str | None = None


@dataclass(frozen=True, slots=True)
class Spelling:
    """A `decoding_type` a version takes. warns: why another one is better, None for the one to write."""

    name: str
    warns: str | None = None
    unconfirmed: str | None = None


@dataclass(frozen=True, slots=True)
class DecodingType:
    """A mechanism as this version has it. method: trtspec's name of it, None for those it does not plan.

    spellings: the one to write first. draft: whether it needs a model of its own. length: the key its draft length is
    written under. rows_per_draft: query rows of a step for each draft. overlap: whether the overlap scheduler runs.
    engine_only: of the removed engine backend. mla_min_sm: lowest GPU architecture for latent attention.
    """

    name: str
    method: str | None
    spellings: tuple[Spelling, ...]
    fields: Mapping[str, Field]
    draft: bool
    length: str
    rows_per_draft: int
    overlap: bool
    engine_only: bool
    mla_min_sm: int | None

    def rows(self, draft_length: int) -> int:
        """Query rows of a verify step of one sequence."""
        return draft_length * self.rows_per_draft + (self.rows_per_draft == 1)


@dataclass(frozen=True, slots=True)
class Rename:
    """An old or foreign key. new: what replaces it, None for nothing. remapped_for: types that still read it."""

    old: str
    new: str | None
    says: str | None
    remapped_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination. when: conditions on dotted keys (see contract.yaml); check: a function of checks.py instead."""

    id: str
    level: Level
    when: Mapping[str, Any]
    check: str | None
    says: str
    instead: str
    source: str | None
    unconfirmed: str | None


@dataclass(frozen=True, slots=True)
class Contract:
    """What one version takes. sections: settings of nested mappings by name."""

    version: str
    era: str
    types: Mapping[str, DecodingType]
    settings: Mapping[str, Field]
    sections: Mapping[str, Mapping[str, Field]]
    speculative_fields: Mapping[str, Field]
    renames: tuple[Rename, ...]
    rules: tuple[Rule, ...]
    draft_key: str
    schedule_bounds: Literal["lower", "upper"]

    def type_called(self, spelling: str) -> DecodingType | None:
        """The decoding type a file's spelling means, None when this version takes no such name."""
        return next((t for t in self.types.values() if any(s.name == spelling for s in t.spellings)), None)

    def type_of(self, method: str) -> DecodingType | None:
        """The decoding type that runs a method of trtspec's, None when this version has none."""
        return next((t for t in self.types.values() if t.method == method), None)

    def methods(self) -> tuple[str, ...]:
        """The methods of trtspec's that this version runs."""
        return tuple(t.method for t in self.types.values() if t.method)

    def has(self, feature: str) -> bool:
        """Whether this version has a feature of the table."""
        return _stands(_table()["features"][feature], parse_version(self.version))

    def features(self) -> tuple[tuple[str, bool, str], ...]:
        """(name, whether this version has it, what it is) of every feature of the table, doubts included."""
        entries = _table()["features"].items()
        return tuple((name, self.has(name), _said(entry)) for name, entry in entries)

    def fields_of(self, path: Sequence[str], decoding: DecodingType | None) -> Mapping[str, Field] | None:
        """The keys of the mapping at `path`; None where its inside is not looked into."""
        if not path:
            return self.settings
        if path[0] == "speculative_config":
            inside = {**self.speculative_fields, **(decoding.fields if decoding else {})}
            return inside if len(path) == 1 else self._inside(inside, path[1:])
        return self._inside(self.settings, path)

    def _inside(self, fields: Mapping[str, Field], path: Sequence[str]) -> Mapping[str, Field] | None:
        field = fields.get(path[0])
        return self.sections.get(field.kind) if field and len(path) == 1 else None


def parse_version(text: str) -> Version:
    """(major, minor, patch, candidate) of `1.3.0rc27`. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?", text.strip())
    if not found:
        raise ConfigError(f"{text!r} is not a TensorRT-LLM version", hint="for example 1.2.1 or 1.3.0rc27")
    major, minor, patch, candidate = (int(part) if part else None for part in found.groups())
    return major, minor, patch or 0, _FINAL if candidate is None else candidate


@cache
def contract_for(version: str) -> Contract:
    """The contract of one version. Raises ConfigError for a version the table does not cover."""
    at, table = parse_version(version), _table()
    era = next(
        (e for e in table["eras"] if parse_version(e["first"]) <= at <= parse_version(e["last"])), None
    )
    if era is None:
        spans = ", ".join(f"{e['first']} to {e['last']}" for e in table["eras"])
        raise ConfigError(
            f"nothing is known about the settings of TensorRT-LLM {version}",
            where="engine.version",
            hint=f"covered: {spans}",
        )
    return Contract(
        version=version,
        era=era["name"],
        types={
            name: _type(name, entry, at)
            for name, entry in table["decoding_types"].items()
            if _stands(entry, at) and _spellings(entry, at)
        },
        settings=_fields(table["settings"], at),
        sections={name: _fields(fields, at) for name, fields in table["sections"].items()},
        speculative_fields=_fields(table["speculative_fields"], at),
        renames=tuple(_renames(table["renames"])),
        rules=tuple(_rules(table["rules"], at)),
        draft_key=_current(table["draft_key"], at),
        schedule_bounds=_current(table["schedule_bounds"], at),
    )


def versions_with(name: str, *, field_of: str | None = None) -> str | None:
    """Where a key or (with `field_of` None) a decoding type stands in other versions: "from 1.3.0rc27 on", or None.

    field_of: "settings", "speculative_fields", a section, or a decoding type.
    """
    table = _table()
    if field_of is None:
        entries = [e for n, e in table["decoding_types"].items() if n == name]
        entries += [
            {**entry, **spelling}
            for entry in table["decoding_types"].values()
            for spelling in entry["names"]
            if spelling["name"] == name and "warns" not in spelling
        ]
    else:
        homes = {**table["sections"], **{n: t["fields"] for n, t in table["decoding_types"].items()}}
        homes |= {"settings": table["settings"], "speculative_fields": table["speculative_fields"]}
        entries = [
            e for n, found in homes.get(field_of, {}).items() if n == name for e in _alternatives(found)
        ]
    for entry in entries:
        since, until = entry.get("since"), entry.get("until")
        if since or until:
            words = (f"from {since} on" if since else "", f"before {until}" if until else "")
            doubt = f" (unconfirmed: {entry['unconfirmed']})" if entry.get("unconfirmed") else ""
            return " and ".join(word for word in words if word) + doubt
    return None


def format_support(algorithm: str, sm: int, version: str) -> str | None:
    """Why a checkpoint format does not run on compute capability `sm` (90 is Hopper), None when it does."""
    formats, at = _table()["checkpoint_formats"], parse_version(version)
    if algorithm not in formats:
        return f"its loader has no {algorithm}; it reads {', '.join(formats)}"
    if any(sm in entry["sm"] and _stands(entry, at) for entry in formats[algorithm]):
        return None
    later = [e["since"] for e in formats[algorithm] if sm in e["sm"] and "since" in e]
    if later:
        return f"{algorithm} on sm_{sm} came with {later[0]}"
    known = sorted({f"sm_{s}" for entry in formats[algorithm] for s in entry["sm"]})
    return f"{algorithm} has kernels for {', '.join(known)}, not for sm_{sm}"


def known_bad(decoding: str, sm: int, version: str) -> Iterator[str]:
    """Reports of wrong output with a decoding type on an architecture, in words."""
    at = parse_version(version)
    for entry in _table()["known_bad"]:
        if entry["decoding_type"] == decoding and entry["sm"] == sm and _stands(entry, at):
            yield f"{entry['says']} ({entry['source']}; unconfirmed: {entry['unconfirmed']})"


def triton_version(tag: str) -> str:
    """TensorRT-LLM's version in a Triton container, by its tag (`26.07-trtllm-python-py3`) or its release (`26.07`).

    A version of TensorRT-LLM, or a tag of its own container, stands for itself. Raises ConfigError for others.
    """
    releases = _table()["triton_images"]["releases"]
    name = tag.rsplit(":", 1)[-1]
    release = re.match(r"(\d\d\.\d\d)(?:-trtllm-python-py3)?$", name)
    if release and release[1] in releases:
        return str(releases[release[1]])
    if re.fullmatch(r"1\.\d+\.\d+(rc\d+)?", name):
        return name
    plain = re.match(r"\d\d\.\d\d-", name) and "trtllm" not in name
    raise ConfigError(
        f"the Triton image {tag!r} carries no TensorRT-LLM" if plain else f"no image {tag!r} is known",
        hint=f"known: {', '.join(f'{r}-trtllm-python-py3 ({v})' for r, v in releases.items())}, or a version",
    )


def triton_image(version: str) -> str | None:
    """The newest Triton image with a TensorRT-LLM version, None when none is known."""
    images = _table()["triton_images"]
    having = [release for release, carried in images["releases"].items() if str(carried) == version]
    return images["image"].format(release=max(having)) if having else None


def default_version(method: str) -> tuple[str, str]:
    """The version to take where none is named, and why: the newest stable one a Triton image carries, or, for a
    method of trtspec's that it does not run, the newest candidate known.
    """
    table = _table()
    carried = {str(version) for version in table["triton_images"]["releases"].values()}
    stable = max((v for v in carried if parse_version(v)[3] == _FINAL), key=parse_version)
    having = [entry for entry in table["decoding_types"].values() if entry.get("method") == method]
    if not having or contract_for(stable).type_of(method) is not None:
        return stable, f"the newest stable version that a Triton image carries ({triton_image(stable)})"
    return table["newest"], (
        f"the newest candidate known, because {method} came with {having[0]['since']} and no stable version runs it: "
        "a pre-release, in no Triton image"
    )


def supported_eras() -> tuple[tuple[str, str, str], ...]:
    """(era, first version, last version) of everything the table covers."""
    return tuple((e["name"], e["first"], e["last"]) for e in _table()["eras"])


@cache
def _table() -> Mapping[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "contract.yaml").read_text("utf-8"))


def _said(entry: Mapping[str, Any]) -> str:
    """A feature's note with its source and what is not settled about it."""
    origin = [entry["source"]] if "source" in entry else []
    doubt = [f"unconfirmed: {entry['unconfirmed']}"] if "unconfirmed" in entry else []
    return f"{entry['note']} ({'; '.join([*origin, *doubt])})" if origin or doubt else entry["note"]


def _stands(entry: Mapping[str, Any], at: Version) -> bool:
    since, until = entry.get("since"), entry.get("until")
    return (since is None or parse_version(since) <= at) and (until is None or at < parse_version(until))


def _alternatives(entry: Any) -> list[Mapping[str, Any]]:
    """A key's entry, or its entries where versions differ."""
    return entry if isinstance(entry, list) else [entry]


def _current(entries: Sequence[Mapping[str, Any]], at: Version) -> Any:
    return next(entry["field"] for entry in entries if _stands(entry, at))


def _fields(table: Mapping[str, Any], at: Version) -> dict[str, Field]:
    found = {
        name: next((e for e in _alternatives(entry) if _stands(e, at)), None) for name, entry in table.items()
    }
    return {
        name: Field(
            name=name,
            kind=entry["type"],
            default=entry.get("default"),
            required=entry.get("required", False),
            lowest=entry.get("min"),
            highest=entry.get("max"),
            choices=tuple(entry.get("choices", ())),
            excludes=tuple(entry.get("excludes", ())),
            unconfirmed=entry.get("unconfirmed"),
        )
        for name, entry in found.items()
        if entry is not None
    }


def _spellings(entry: Mapping[str, Any], at: Version) -> tuple[Spelling, ...]:
    names = [n for n in entry["names"] if _stands(n, at)]
    return tuple(Spelling(n["name"], n.get("warns"), n.get("unconfirmed")) for n in names)


def _type(name: str, entry: Mapping[str, Any], at: Version) -> DecodingType:
    return DecodingType(
        name=name,
        method=entry.get("method"),
        spellings=_spellings(entry, at),
        fields=_fields(entry["fields"], at),
        draft=entry.get("draft", False),
        length=_current(entry.get("length", [{"field": "max_draft_len"}]), at),
        rows_per_draft=entry.get("rows_per_draft", 1),
        overlap=entry.get("overlap", True),
        engine_only=entry.get("engine_only", False),
        mla_min_sm=entry.get("mla_min_sm"),
    )


def _renames(entries: Sequence[Mapping[str, Any]]) -> Iterator[Rename]:
    for entry in entries:
        yield Rename(entry["old"], entry["new"], entry.get("says"), tuple(entry.get("remapped_for", ())))


def _rules(entries: Sequence[Mapping[str, Any]], at: Version) -> Iterator[Rule]:
    for entry in entries:
        if _stands(entry, at):
            yield Rule(
                id=entry["id"],
                level=entry.get("level", "error"),
                when=entry.get("when", {}),
                check=entry.get("check"),
                says=entry.get("says", ""),
                instead=str(entry.get("instead", "")),
                source=entry.get("source"),
                unconfirmed=entry.get("unconfirmed"),
            )
