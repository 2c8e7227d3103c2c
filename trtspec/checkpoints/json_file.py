"""Reading the JSON files of a model folder, with errors that name file, line and column.

Published files contain the bare tokens `Infinity` and `NaN` (for example `time_step_limit`), which strict
JSON refuses and every Hugging Face loader accepts: they are accepted here too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtspec.errors import ConfigError

JsonObject = dict[str, Any]


def read_json_object(path: Path) -> JsonObject:
    """The object in `path`. Raises ConfigError (missing file, broken JSON, not an object)."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as UTF-8 text: {error}", where=str(path)) from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON: {error.msg}",
            where=f"{path}:{error.lineno}:{error.colno}",
            hint="the file may be cut off or be a Git LFS pointer; download it again",
        ) from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"not usable JSON: {error}", where=str(path)) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"holds a JSON {type(value).__name__}, expected an object of configuration keys", where=str(path)
        )
    return value


def read_optional_json_object(path: Path) -> JsonObject | None:
    """As `read_json_object`, but None where the file does not exist."""
    return read_json_object(path) if path.is_file() else None
