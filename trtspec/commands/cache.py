"""Show what the cache of built artifacts holds, and delete what no build has used for a while.

An artifact that is needed again is built again. Build directories keep their files.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome

if TYPE_CHECKING:
    from trtspec.store import Artifact, Store

_DAY_S = 86_400

HELP = "what the cache holds, and deleting what is no longer used"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prune", type=_days, metavar="DAYS", help="delete artifacts that no build took for so many days"
    )


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.store import Store

    store = Store()
    if arguments.prune is None:
        return _held(store)
    deleted, freed = store.prune(arguments.prune * _DAY_S)
    result = {
        "root": str(store.root),
        "deleted": [{"kind": one.kind, "key": one.key, "bytes": one.bytes} for one in deleted],
        "freed_bytes": freed,
    }
    unused = f"{sum(one.bytes for one in deleted) / 1e9:.2f} GB"
    return Outcome(result, f"{len(deleted)} artifacts of {unused} deleted, {freed / 1e9:.2f} GB became free")


def _held(store: Store) -> Outcome:
    kinds: dict[str, list[Artifact]] = defaultdict(list)
    for artifact in store.artifacts():
        kinds[artifact.kind].append(artifact)
    size = _disk_bytes(store.root)
    rows = [
        {
            "kind": kind,
            "artifacts": len(found),
            "bytes": sum(one.bytes for one in found),
            "last_use": time.strftime("%Y-%m-%d", time.localtime(max(map(store.last_use, found)))),
        }
        for kind, found in kinds.items()
    ]
    width = max((len(row["kind"]) for row in rows), default=0)
    lines = [
        f"{row['kind']:<{width}}  {row['artifacts']:>5}  {row['bytes'] / 1e9:>8.2f} GB  last used {row['last_use']}"
        for row in rows
    ]
    lines.append(f"{store.root}: {size / 1e9:.2f} GB on the disk, downloads and training included")
    return Outcome({"root": str(store.root), "bytes": size, "artifacts": rows}, "\n".join(lines))


def _disk_bytes(root: Path) -> int:
    """Of all files below, one that several names link to counted once."""
    from trtspec.files import files_below

    found = {}
    for path in files_below(root):
        try:
            stat = path.lstat()
        except FileNotFoundError:  # a build that runs has moved it on
            continue
        found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def _days(text: str) -> float:
    days = float(text)
    if not days >= 0:
        raise ValueError(text)
    return days
