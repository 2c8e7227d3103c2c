"""Show what is installed, what each engine backend lacks, and the command that fixes it.

Exit code 0 when the chosen backend works on this machine, 3 when it does not.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from trtspec.commands import Context, Outcome
from trtspec.errors import SetupError

HELP = "what is installed, what is missing for each backend, the command that fixes it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from trtspec.doctor import BACKENDS

    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="default: %(default)s")


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.doctor import BACKENDS, examine, lacks
    from trtspec.store import Store

    checks = examine(Store())
    missing = {backend: lacks(checks, backend) for backend in BACKENDS}
    result = {
        "backend": arguments.backend,
        "works": not missing[arguments.backend],
        "backends": {
            name: {"works": not found, "lacks": [c.name for c in found]} for name, found in missing.items()
        },
        "checks": [asdict(check) for check in checks],
    }
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        optional = check.status == "missing" and arguments.backend not in check.backends
        sign = {"ok": "ok  ", "warning": "warn", "missing": "-   " if optional else "MISS"}[check.status]
        lines.append(f"{sign}  {check.name:<{width}}  {check.found}")
        if check.fix and not optional:
            lines.append(f"{'':6}{'':{width}}  fix: {check.fix}")
    lines.append("")
    for name, found in missing.items():
        lines.append(f"{name}: " + (f"lacks {', '.join(c.name for c in found)}" if found else "works"))
    return Outcome(result, "\n".join(lines), 0 if result["works"] else SetupError.exit_code)
