"""Prompts to evaluate on, from SPEED-Bench, Spec-Bench, MT-Bench-like and users' own files.

A row is a JSON object or a parquet row. Its user turns come in one of three shapes:

    turns     ["first question", "follow-up", …]                 SPEED-Bench parquet, Spec-Bench, MT-Bench
    messages  [{"role": "user", "content": "…"}, …]              SPEED-Bench as prepared by NeMo-Skills
    prompt    "the only question"                                a user's own file

`question_id` and `category` are kept where given. In `messages` an optional leading system message is kept;
assistant messages are dropped, because every turn is answered by the model that is being measured.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import ConfigError, ConfigProblem, SetupError
from trtspec.files import sha256_file

BUILTIN_NAMES = ("builtin", "speed-bench-mini")
CATEGORIES = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag"),
    *("reasoning", "roleplay", "stem", "summarization", "writing"),
)
"""The eleven categories of SPEED-Bench's qualitative split."""

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""How a SPEED-Bench turn begins whose text may not be redistributed."""

_BUILTIN_FILE = Path(__file__).with_name("data") / "speed_bench_mini.jsonl"
_SUFFIXES = (".parquet", ".jsonl")
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+?)(?:/(?P<subset>[\w.-]+))?(?:@(?P<revision>[\w.-]+))?")
_PREPARE = "python prepare_data.py --dataset speed --config all --output_dir data/"
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to hold with the model: the user's turns, in order. `system` precedes them if given."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    sub_category: str | None = None
    source: str | None = None
    src_id: str | None = None
    difficulty: str | None = None
    multiturn: bool = False
    system: str | None = None


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file that was read: its name relative to the data set, and the hex sha256 of its bytes."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and where they came from. `revision`: the commit of a hub data set, else None. `caution`: why numbers
    measured on them do not hold for others, None where nothing is wrong with them."""

    name: str
    prompts: tuple[Prompt, ...]
    files: tuple[DataFile, ...]
    revision: str | None = None
    caution: str | None = None


def load_prompts(data: str, *, base: Path | None = None) -> PromptSet:
    """Read every prompt of a data set.

    data: "builtin" (prompts shipped with trtspec), a parquet or JSONL file, a folder of such files (searched
    recursively), or a hub data set `org/name[/subset][@revision]`, which is downloaded only here and only
    because it was named. base: the folder relative paths start from.

    Raises ConfigError (all malformed rows, each with file:row) and SetupError (placeholder rows, a package
    or the network missing).
    """
    if data in BUILTIN_NAMES:
        return _read_files("builtin", _BUILTIN_FILE.parent, [_BUILTIN_FILE])
    path = (base or Path()) / Path(data).expanduser()
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(
                f"cannot read prompts from a {path.suffix or 'suffixless'} file",
                where=str(path),
                hint="give a .parquet or .jsonl file, or a folder of them",
            )
        return _read_files(data, path.parent, [path])
    if path.is_dir():
        return _read_folder(data, path)
    hub = _HUB.fullmatch(data)
    if hub and not data.startswith(".") and Path(data).suffix not in _SUFFIXES:
        return _read_hub(data, hub["id"], hub["subset"], hub["revision"])
    raise ConfigError(
        f"no such prompt data: {data}",
        where=str(path),
        hint='use "builtin", a .parquet or .jsonl file, a folder of them, or a hub data set org/name',
    )


def select_prompts(
    prompts: Sequence[Prompt], *, count: int | None = None, categories: Sequence[str] | None = None
) -> tuple[Prompt, ...]:
    """The prompts of the named categories; with `count`, that many, taken in turn from each category.

    Deterministic: categories in the order of their first prompt, prompts in file order within each, so the
    first N of a larger selection are the smaller one. Raises ConfigError for a category that does not occur.
    """
    present: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        present.setdefault(prompt.category, []).append(prompt)
    if categories is not None:
        problems = [_unknown_category(name, present) for name in categories if name not in present]
        if problems:
            raise ConfigError(problems=problems)
        present = {name: rows for name, rows in present.items() if name in set(categories)}
    if count is None:
        return tuple(prompt for prompt in prompts if prompt.category in present)
    if count < 1:
        raise ConfigError(
            f"prompts: {count} selects nothing", where="evaluation.prompts", hint="use 1 or more"
        )
    depth = max((len(rows) for rows in present.values()), default=0)
    dealt = (rows[i] for i in range(depth) for rows in present.values() if i < len(rows))
    return tuple(prompt for _, prompt in zip(range(count), dealt))


def _unknown_category(name: str, present: Iterable[str]) -> ConfigProblem:
    near = difflib.get_close_matches(name, present, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the data has: {', '.join(present)}"
    return ConfigProblem("evaluation.categories", f"no prompt has the category {name!r}", hint)


def _read_folder(name: str, folder: Path) -> PromptSet:
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise ConfigError("no .parquet or .jsonl file below this folder", where=str(folder))
    return _read_files(name, folder, files)


def _read_hub(name: str, dataset: str, subset: str | None, revision: str | None) -> PromptSet:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError as error:
        raise SetupError(
            "reading a hub data set needs huggingface_hub", where=name, hint="pip install huggingface_hub"
        ) from error
    inside = f"{subset}/" if subset else ""
    try:
        folder = snapshot_download(
            dataset,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[f"{inside}*{suffix}" for suffix in _SUFFIXES],
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise SetupError(
            f"cannot download the data set {dataset}: {error}",
            where=name,
            hint="log in if it is gated, check its name, or give a local file or folder that exists",
        ) from error
    place = Path(folder)
    found = _read_folder(name, place / subset if subset else place)
    return PromptSet(found.name, found.prompts, found.files, revision=place.name)


def _read_files(name: str, folder: Path, files: Sequence[Path]) -> PromptSet:
    """Parse all files; refuse placeholders, malformed rows and repeated ids, up to `_MAX_PROBLEMS` of them at once."""
    prompts: list[Prompt] = []
    problems: list[ConfigProblem] = []
    placeholders: list[str] = []
    seen: dict[str, str] = {}
    for path in files:
        for place, row in _rows(path, problems):
            try:
                prompt = _parse(row, fallback_id=f"{path.stem}-{place.rpartition(':')[2]}")
            except ValueError as error:
                problems.append(ConfigProblem(place, str(error)))
                continue
            if any(turn.startswith(PLACEHOLDER) for turn in prompt.turns):
                placeholders.append(place)
                continue
            first = seen.setdefault(prompt.question_id, place)
            if first != place:
                problems.append(
                    ConfigProblem(
                        place,
                        f"question_id {prompt.question_id!r} was already used at {first}",
                        "a repeated prompt meets warm caches and inflates the result; keep one of the two",
                    )
                )
                continue
            prompts.append(prompt)
    if placeholders:
        raise SetupError(
            f"{len(placeholders)} of {len(placeholders) + len(prompts)} rows hold a placeholder instead of a prompt "
            f"(first: {', '.join(placeholders[:3])})",
            where=placeholders[0],
            hint=f"resolve the data once with specdec_bench ({_PREPARE}), then name the folder it wrote; it needs the "
            "network, and of its sources cais/hle is gated: accept its terms and log in first",
        )
    if problems:
        left_out = len(problems) - _MAX_PROBLEMS
        hint = f"and {left_out} more" if left_out > 0 else None
        raise ConfigError(problems=problems[:_MAX_PROBLEMS], hint=hint)
    if not prompts:
        raise ConfigError("no prompts in this data", where=str(files[0] if len(files) == 1 else folder))
    hashes = tuple(DataFile(path.relative_to(folder).as_posix(), sha256_file(path)) for path in files)
    return PromptSet(name, tuple(prompts), hashes)


def _rows(path: Path, problems: list[ConfigProblem]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with its place, `file:number` counted from 1; rows that are no JSON objects go to `problems`."""
    if path.suffix == ".parquet":
        yield from ((f"{path}:{number}", row) for number, row in enumerate(_parquet_rows(path), start=1))
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                problems.append(ConfigProblem(place, f"not JSON: {error}"))
                continue
            if isinstance(row, dict):
                yield place, row
            else:
                problems.append(ConfigProblem(place, f"a row is a JSON object, not a {type(row).__name__}"))


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise SetupError(
            f"reading parquet needs pyarrow: {error}", where=str(path), hint="pip install 'trtspec[cpu]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"not a readable parquet file: {error}", where=str(path)) from error


def _parse(row: Mapping[str, Any], *, fallback_id: str) -> Prompt:
    """One row as a Prompt; ValueError says what is wrong with it."""
    system, turns = _conversation(row)
    question_id = row.get("question_id")
    if question_id is not None and not isinstance(question_id, (str, int)):
        raise ValueError(f"question_id must be a string or an integer, not {question_id!r}")
    return Prompt(
        question_id=fallback_id if question_id is None else str(question_id),
        category=_optional_text(row, "category") or "uncategorized",
        turns=turns,
        sub_category=_optional_text(row, "sub_category"),
        source=_optional_text(row, "source"),
        src_id=_optional_text(row, "src_id"),
        difficulty=_optional_text(row, "difficulty"),
        multiturn=len(turns) > 1,
        system=system,
    )


def _conversation(row: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """(system message or None, user turns) of a row in any of the three shapes."""
    shapes = [key for key in ("turns", "messages", "prompt") if row.get(key) is not None]
    if len(shapes) != 1:
        found = " and ".join(shapes) or f"only {', '.join(sorted(row)) or 'nothing'}"
        raise ValueError(f"needs exactly one of turns, messages, prompt; it has {found}")
    value = row[shapes[0]]
    if shapes == ["messages"]:
        return _messages(value)
    turns = [value] if shapes == ["prompt"] else value
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns must be a list with at least one string")
    return None, tuple(_text(turn, f"{shapes[0]}[{i}]") for i, turn in enumerate(turns))


def _messages(messages: object) -> tuple[str | None, tuple[str, ...]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of {role, content} objects")
    system: str | None = None
    turns: list[str] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role == "user":
            turns.append(_text(message.get("content"), f"messages[{i}].content"))
        elif role == "system" and i == 0:
            system = _text(message.get("content"), "messages[0].content")
        elif role != "assistant":
            raise ValueError(
                f"messages[{i}] has the role {role!r}; user, assistant or a leading system is expected"
            )
    if not turns:
        raise ValueError("messages hold no user turn")
    return system, tuple(turns)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a string that is not empty, not {value!r:.40}")
    return value


def _optional_text(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, (str, int)):
        raise ValueError(f"{key} must be a string, not {value!r:.40}")
    return str(value)


def selection_identity(prompts: Sequence[Prompt]) -> str:
    """Hex sha256 over ids and texts of the selected prompts, in order: equal identities measured the same thing."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(
            json.dumps([prompt.question_id, prompt.system, prompt.turns], ensure_ascii=False).encode()
        )
    return digest.hexdigest()
