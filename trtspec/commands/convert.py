"""Write a draft head of the EAGLE family in another published layout: for vLLM, SGLang, TensorRT-LLM or EAGLE itself.

Every weight keeps its bits. What the layouts number differently is said in both ways.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtspec.commands import Context, Outcome

HELP = "write an EAGLE head in another published layout"
_READERS = {
    "eagle": "the EAGLE authors' code",
    "specforge": "SGLang",
    "speculators": "vLLM",
    "modelopt": "TensorRT-LLM",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    readers = ", ".join(f"{layout} ({reader})" for layout, reader in _READERS.items())
    parser.add_argument("head", type=Path, help="folder of the head, in any of the layouts")
    parser.add_argument("--to", required=True, choices=list(_READERS), help=f"the layout: {readers}")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--target",
        help="the model it drafts for: folder, hub id or package:NAME; tells how many layers there are",
    )


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.checkpoints import heads
    from trtspec.checkpoints.facts import read_facts
    from trtspec.checkpoints.head_layouts import eagle
    from trtspec.checkpoints.pairing import check_head
    from trtspec.errors import ConfigError
    from trtspec.models import find_config
    from trtspec.store import default_root

    found = heads.read_head(arguments.head)
    if found.method not in (None, "eagle", *eagle.THREE):
        raise ConfigError(
            f"this is a head for {found.method}, which has one layout",
            where=str(arguments.head),
            hint="convert takes heads of eagle, eagle2, eagle3 and p_eagle",
        )
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        raise ConfigError(f"{arguments.out} is not empty", hint="name a new folder with --out")
    layers = None
    if arguments.target:
        with find_config(arguments.target, default_root()) as config:
            facts = read_facts(config)
        check_head(facts, found)
        layers = facts.layers
    head = eagle.read_head(arguments.head, layers)
    eagle.write_head(head, arguments.out, arguments.to, arguments.target)
    boundaries = [layer + 1 for layer in head.captured_layers]
    result = {
        "out": str(arguments.out),
        "layout": arguments.to,
        "method": head.method,
        "captured_after_blocks": boundaries,
        "captured_layers": list(head.captured_layers),
    }
    lines = [
        f"{arguments.out}: {head.method} head in the layout {arguments.to}, for {_READERS[arguments.to]}"
    ]
    if boundaries:
        lines.append(
            f"captured after blocks {boundaries}, as vLLM and SGLang count; TensorRT-LLM's "
            f"eagle3_layers_to_capture is {list(head.captured_layers)}"
        )
    return Outcome(result, "\n".join(lines))
