"""Explain a TensorRT-LLM settings file, or a draft folder: what is wrong for a version, and what to write instead.

FILE is a model.yaml, a `trtllm-serve --config` file or a bare speculative_config (YAML or JSON). Models it names that
are folders here are read too, and so are --target and --draft. A folder as FILE is a draft, judged against --target.
Exit code 0 when nothing is wrong, 2 when something is; warnings and notes do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError

if TYPE_CHECKING:
    from trtspec.checkpoints.facts import ArchitectureFacts
    from trtspec.checkpoints.heads import HeadFacts
    from trtspec.trtllm.check import Finding

HELP = "explain a TensorRT-LLM settings file or a draft folder: what is wrong, what to write"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="settings file, or the folder of a draft model or head")
    parser.add_argument(
        "--version", metavar="VERSION", help="of TensorRT-LLM, for example 1.2.1 or 1.3.0rc27"
    )
    parser.add_argument("--container", metavar="TAG", help="instead of --version: a Triton image's tag")
    parser.add_argument("--target", help="the target: folder, config.json, hub id or package:NAME")
    parser.add_argument(
        "--draft", type=Path, help="folder of the draft, where the file names none that is here"
    )


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    if arguments.file.is_dir():
        if arguments.target is None:
            raise ConfigError(
                "a draft is judged against a target", where="command line", hint="add --target MODEL"
            )
        version, findings = None, _of_pair(arguments.target, arguments.file)
    else:
        version = _version(arguments)
        findings = _of_file(arguments, version)
    errors = sum(finding.level == "error" for finding in findings)
    result = {
        "file": str(arguments.file),
        "version": version,
        "valid": not errors,
        "findings": [asdict(finding) for finding in findings],
    }
    return Outcome(result, "\n".join(_lines(result, findings)), ConfigError.exit_code if errors else 0)


def _version(arguments: argparse.Namespace) -> str:
    from trtspec.trtllm.contract import triton_version

    if (arguments.version is None) == (arguments.container is None):
        raise ConfigError(
            "a settings file is right or wrong for one version of TensorRT-LLM",
            where="command line",
            hint="add --version 1.2.1, or --container 26.07-trtllm-python-py3",
        )
    return arguments.version or triton_version(arguments.container)


def _of_file(arguments: argparse.Namespace, version: str) -> Sequence[Finding]:
    from trtspec.trtllm.check import check_file, read_settings
    from trtspec.trtllm.pair import check_models, check_pair

    found = list(check_file(arguments.file, version))
    values = read_settings(arguments.file).plain()
    settings = {"speculative_config": values} if "decoding_type" in values else values
    speculative = settings.get("speculative_config")
    inside = speculative if isinstance(speculative, Mapping) else {}
    target = _model(arguments.target or _folder(settings.get("model")))
    draft = _model(
        arguments.draft or _folder(inside.get("speculative_model", inside.get("speculative_model_dir")))
    )
    if target is not None and draft is not None:
        found += check_pair(target, draft)
    return [*found, *check_models(settings, version, target, draft)]


def _of_pair(target: str, draft: Path) -> Sequence[Finding]:
    from trtspec.trtllm.check import Finding
    from trtspec.trtllm.pair import check_pair

    try:
        found = _model(draft)
    except ConfigError as error:  # the folder contradicts itself: that is the answer
        return [Finding("draft", "error", "", error.where or str(draft), error.message, error.hint)]
    return check_pair(_model(target), found)


def _folder(value: Any) -> str | None:
    """A model of the file, where it is a folder on this machine."""
    return value if isinstance(value, str) and Path(value).is_dir() else None


def _model(reference: str | Path | None) -> ArchitectureFacts | HeadFacts | None:
    from trtspec.checkpoints.heads import inspect_model
    from trtspec.models import find_config
    from trtspec.store import default_root

    if reference is None:
        return None
    with find_config(str(reference), default_root()) as config:
        return inspect_model(config)


def _lines(result: Mapping[str, Any], findings: Sequence[Finding]) -> Iterator[str]:
    yield from map(str, findings)
    counts = [(level, sum(f.level == level for f in findings)) for level in ("error", "warning", "note")]
    said = (
        ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts if count)
        or "nothing to say"
    )
    version = f" for TensorRT-LLM {result['version']}" if result["version"] else ""
    yield f"{result['file']}: {'valid' if result['valid'] else 'not valid'}{version} ({said})"
