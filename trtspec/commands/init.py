"""Write a commented starter config."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError
from trtspec.files import setup_error

HELP = "a commented starter config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="where to write it; without it, printed on stdout")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.config import starter_config

    text, path = starter_config(), arguments.file
    if path is None:
        return Outcome({"config": text, "path": None}, text)
    try:
        with open(path, "w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError("the file exists", where=str(path), hint="--force replaces it") from None
    except OSError as error:
        hint = "name a file in a folder that exists and that you may write"
        raise setup_error(error, path.parent) or ConfigError(
            str(error), where=str(path), hint=hint
        ) from error
    return Outcome({"config": text, "path": str(path)}, f"{path} written; next: trtspec build {path}")
