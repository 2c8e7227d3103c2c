"""Show what is installed, what each engine backend lacks, and the command that fixes it.

Exit code 0 when the chosen backend works on this machine, 3 when it does not. With --target-container it looks at no
machine: it tells which TensorRT-LLM a container carries and what that version runs.
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
    parser.add_argument(
        "--target-container", metavar="TAG", help="a Triton image's tag, or a version of TensorRT-LLM"
    )


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.doctor import BACKENDS, examine, lacks
    from trtspec.store import Store

    if arguments.target_container is not None:
        return _container(arguments.target_container)
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


def _container(tag: str) -> Outcome:
    """What the TensorRT-LLM of a container runs, by the table of its versions. Raises ConfigError for unknown tags."""
    from trtspec.trtllm.contract import contract_for, triton_image, triton_version

    contract = contract_for(triton_version(tag))
    methods = {kind.method: kind.spellings[0].name for kind in contract.types.values() if kind.method}
    result = {
        "container": tag,
        "tensorrt_llm": contract.version,
        "era": contract.era,
        "triton_image": triton_image(contract.version),
        "decoding_types": [t.spellings[0].name for t in contract.types.values() if not t.engine_only],
        "methods": methods,
        "draft_key": contract.draft_key,
        "schedule_keys": f"{contract.schedule_bounds} bounds",
        "features": {name: {"has": has, "note": note} for name, has, note in contract.features()},
    }
    lines = [
        f"{tag}: TensorRT-LLM {contract.version}, settings of era {contract.era}",
        f"Triton's image   {result['triton_image'] or 'none known with this version'}",
        f"methods          {', '.join(f'{mine} ({theirs})' for mine, theirs in methods.items())}",
        f"decoding types   {', '.join(result['decoding_types'])}",
        f"draft's folder   speculative_config.{contract.draft_key}",
        f"schedule keys    {result['schedule_keys']} of the batch size",
        *(f"{'has ' if has else 'lacks'} {name:<24} {note}" for name, has, note in contract.features()),
    ]
    return Outcome(result, "\n".join(lines))
