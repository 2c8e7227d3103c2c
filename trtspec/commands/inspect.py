"""Show the architecture facts of a model folder, a draft-head folder, a hub model or a bare config.json.

Reads JSON and safetensors headers only; no weights are loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.commands import Context, Outcome

HELP = "architecture facts of a model or draft-head folder, or a bare config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder, config.json, hub id (org/name) or package:NAME")
    parser.add_argument("--revision", help="commit of a hub model")


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.checkpoints.heads import inspect_model
    from trtspec.models import find_config
    from trtspec.store import default_root

    with find_config(arguments.model, default_root(), arguments.revision) as config:
        result = inspect_model(config).as_json()
    return Outcome(result, "\n".join(_lines(result)))


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield _row("model type", facts["model_type"])
    yield _row("layers", facts["layers"])
    yield _row("hidden size", facts["hidden_size"])
    yield _row("vocabulary", facts["vocab_size"])
    yield _row("parameters", facts["parameters"] and f"{facts['parameters']:,}")
    yield _row("quantization", facts["quantization"] or "none")
    yield _row("context", facts["max_position_embeddings"])
    cache = facts["kv_bytes_per_token"]
    yield _row("KV cache", cache and f"{cache:,} bytes per token ({facts['kv_dtype']})")
    for group in facts["attention"]:
        yield _row("attention", f"{group['layers']} × {group['kind']}{_shape(group)}")
    if facts["attention"]:
        fills = [f"{d} (M = {tile})" for tile, d in facts["tile_draft_length"].items() if d is not None]
        yield _row("one-tile D", ", ".join(fills) or "none: the group is larger than the tile")
        ranks = [f"TP {size}: {g or 'does not divide'}" for size, g in facts["tensor_parallel"].items()]
        yield _row("G on one rank", ", ".join(ranks))
    yield _row("MTP layers", facts["mtp_layers"])
    for name, value in facts.get("head", {}).items():
        if value is not None:
            yield _row(f"head {name.replace('_', ' ')}", value)
    yield from (f"warning: {text}" for text in facts["warnings"])


def _row(name: str, value: object) -> str:
    return f"{name:<24}{'not stated' if value is None else value}"


def _shape(group: Mapping[str, Any]) -> str:
    if not group["heads"]:
        return ""
    window = f", window {group['window']}" if group["window"] else ""
    heads = f"{group['heads']} heads, {group['kv_heads']} KV heads of {group['head_dim']}"
    return f": {heads}, G = {group['group']}{window}"
