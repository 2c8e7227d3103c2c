"""Print the JSON Schema of a config, for editors (`trtspec schema > trtspec.schema.json`)."""

from __future__ import annotations

import argparse

from trtspec.commands import Context, Outcome
from trtspec.files import pretty_json

HELP = "JSON Schema of a config, for editors"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(_arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.config import config_schema

    schema = config_schema()
    return Outcome(schema, pretty_json(schema))
