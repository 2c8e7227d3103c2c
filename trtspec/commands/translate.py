"""Say a config's deployment in another server's flags, and what has no equivalent there.

The draft length and schedule are the plan's, made as `trtspec plan` makes it. What is printed is a command for a shell,
and comments below it; files that the command reads are written with --out, and shown otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome

if TYPE_CHECKING:
    from trtspec.translate import Translation

HELP = "the same deployment in the flags of vLLM, SGLang, trtllm-serve or llama.cpp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from trtspec.translate import SERVERS

    parser.add_argument("config", help="the YAML config")
    parser.add_argument("--to", required=True, choices=list(SERVERS), help="the server")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a field; repeatable"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files the command reads")


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.config import load_config
    from trtspec.files import write_atomic
    from trtspec.models import TARGET, find_configs
    from trtspec.pipeline import plan_config
    from trtspec.store import default_root
    from trtspec.translate import translate

    config = load_config(arguments.config, arguments.set)
    with find_configs(config, default_root()) as configs:
        plan = plan_config(config, configs).as_json()
        made = translate(config, plan, read_facts(configs[TARGET]), arguments.to)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            write_atomic(arguments.out / name, text)
    return Outcome({**asdict(made), "line": made.line}, "\n".join(_lines(made, arguments.out)))


def _lines(made: Translation, out: Path | None) -> Iterator[str]:
    yield made.line
    yield from (f"# no equivalent: {text}" for text in made.lost)
    yield from (f"# {text}" for text in made.notes)
    for name, text in made.files.items():
        if out is not None:
            yield f"# {out / name}: written"
        else:
            yield f"# --- {name}"
            yield from (f"# {line}" for line in text.splitlines())
