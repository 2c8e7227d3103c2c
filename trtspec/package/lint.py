"""Check a Triton model repository for what makes it load wrongly, or load and then answer wrongly.

Works on repositories trtspec wrote and on any other with the llmapi layout or a plain one. Each rule stands
for a fault that Triton reports late, misleadingly or not at all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import SetupError
from trtspec.package.settings import MODEL_YAML

_CONFIG = "config.pbtxt"
# The files that fill-in templates are made of.
_TEMPLATES = {".pbtxt", ".yaml", ".yml"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule: `where` is a file of the repository, with a line where there is one."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.rule}]"


def lint_repository(
    repository: Path, *, streaming: bool = True, interpreter: Path | None = None
) -> list[Finding]:
    """Every broken rule of every model in `repository`, in a stable order; empty means clean.

    streaming: clients will stream, so a model with a `streaming` input must be decoupled.
    interpreter: the Python that the models will run in; None is the running one.
    Raises SetupError when the repository or the interpreter cannot be read.
    """
    if not repository.is_dir():
        raise SetupError("there is no model repository here", where=str(repository))
    models = sorted(folder for folder in repository.iterdir() if folder.is_dir())
    if not any((model / _CONFIG).exists() for model in models):
        return [Finding("layout", str(repository), "no model: expected <model>/config.pbtxt")]
    findings: list[Finding] = []
    configs: dict[str, Any] = {}
    for model in models:
        findings += _unfilled(model, repository)
        config = _read_config(model, repository, findings)
        if config is not None:
            configs[model.name] = config
            findings += _check_model(model, config, repository, streaming)
    findings += _check_ensembles(configs)
    if any(config.backend == "python" for config in configs.values()):
        findings += _check_numpy(interpreter)
    return findings


def check_gpu_device_ids(text: str, instances: int, ranks: int) -> str | None:
    """Why `gpu_device_ids` is wrong, or None. ';' separates instances, ',' the GPUs of one.

    instances: of the model. ranks: GPUs one instance needs (tensor × pipeline parallel size).
    """
    groups = [[part.strip() for part in group.split(",")] for group in text.split(";")]
    flat = [gpu for group in groups for gpu in group]
    if not all(gpu.isdigit() for gpu in flat):
        return f"{text!r} is not a list of GPU numbers like '0,1;2,3'"
    if len(groups) != instances:
        return f"{text!r} names GPUs for {len(groups)} instance(s), instance_group has {instances}"
    if wrong := [group for group in groups if len(group) != ranks]:
        return f"{','.join(wrong[0])!r} names {len(wrong[0])} GPU(s) for one instance, which needs {ranks}"
    if len(set(flat)) != len(flat):
        shared = next(gpu for gpu in flat if flat.count(gpu) > 1)
        return f"GPU {shared} is named twice in {text!r}"
    return None


def _unfilled(model: Path, repository: Path) -> Iterator[Finding]:
    """Template values nobody filled in: Triton fails on them with "Expected integer, got: $"."""
    for path in sorted(model.rglob("*")):
        if path.suffix not in _TEMPLATES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if found := re.search(r"\$\{[^}]*\}?", line):
                where = f"{path.relative_to(repository)}:{number}"
                yield Finding("template", where, f"{found.group()} was never filled in")


def _read_config(model: Path, repository: Path, findings: list[Finding]) -> Any:
    """The parsed `config.pbtxt`, or None after adding the reason to `findings`."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    path = model / _CONFIG
    where = str(path.relative_to(repository))
    if not path.exists():
        findings.append(Finding("layout", where, "is missing"))
        return None
    try:
        return text_format.Parse(path.read_text("utf-8"), ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        findings.append(Finding("pbtxt", where, f"does not parse: {error}"))
        return None


def _check_model(model: Path, config: Any, repository: Path, streaming: bool) -> Iterator[Finding]:
    where = str((model / _CONFIG).relative_to(repository))
    if config.name and config.name != model.name:
        yield Finding("name", where, f"name is {config.name!r}, the folder {model.name!r}")
    versions = sorted(child for child in model.iterdir() if child.is_dir() and child.name.isdigit())
    if not versions:
        yield Finding("layout", where, "there is no version folder (1/)")
    decoupled = config.model_transaction_policy.decoupled
    ranks = 1
    for version in versions:
        if (
            config.backend == "python"
            and not (version / (config.default_model_filename or "model.py")).exists()
        ):
            yield Finding("layout", str(version.relative_to(repository)), "has no model.py")
        if (version / MODEL_YAML).exists():
            settings = yield from _check_model_yaml(version / MODEL_YAML, config, repository)
            decoupled = settings.get("decoupled", decoupled)
            ranks = settings.get("ranks", 1)
    inputs = {tensor.name for tensor in config.input}
    if streaming and inputs & {"streaming", "stream"} and not decoupled:
        yield Finding(
            "streaming", where, "takes a streaming input and is not decoupled: clients get one response"
        )
    if decoupled and config.response_cache.enable:
        yield Finding("cache", where, "response_cache is refused for decoupled models")
    yield from _check_instances(config, where, ranks)


def _check_model_yaml(path: Path, config: Any, repository: Path) -> Iterator[Finding]:
    """llmapi settings: `triton_config` in model.yaml holds the policy; config.pbtxt may not contradict it."""
    where = str(path.relative_to(repository))
    pbtxt = f"{path.parent.parent.name}/{_CONFIG}"
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        yield Finding("model.yaml", where, f"does not parse: {error}")
        return {}
    if not isinstance(content, Mapping):
        yield Finding("model.yaml", where, "is not a mapping of settings")
        return {}
    policy = content.get("triton_config")
    if not isinstance(policy, Mapping):
        policy = {}
    for key in ("max_batch_size", "decoupled"):
        if key not in policy:
            yield Finding("policy", where, f"triton_config.{key} is missing; the llmapi model reads it here")
    if "decoupled" in content:
        yield Finding("policy", where, "decoupled belongs under triton_config")
    if policy.get("max_batch_size", 0) != 0:
        yield Finding(
            "policy", where, f"triton_config.max_batch_size must be 0, not {policy['max_batch_size']}"
        )
    if config.max_batch_size != 0:
        yield Finding(
            "policy",
            pbtxt,
            f"max_batch_size {config.max_batch_size} belongs in {MODEL_YAML} (triton_config) and must be 0",
        )
    declared = config.HasField("model_transaction_policy")
    if (
        declared
        and "decoupled" in policy
        and config.model_transaction_policy.decoupled != policy["decoupled"]
    ):
        yield Finding(
            "policy",
            pbtxt,
            f"decoupled is {config.model_transaction_policy.decoupled} here and "
            f"{policy['decoupled']} in {MODEL_YAML}",
        )
    sizes = [content.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        yield Finding(
            "policy", where, "tensor_parallel_size and pipeline_parallel_size must be positive integers"
        )
        sizes = [1, 1]
    return {"decoupled": bool(policy.get("decoupled", False)), "ranks": sizes[0] * sizes[1]}


def _check_instances(config: Any, where: str, ranks: int) -> Iterator[Finding]:
    groups = list(config.instance_group)
    if config.backend == "python" and not groups:
        yield Finding("instances", where, "has no instance_group; a Python model needs one of kind KIND_CPU")
    for group in groups:
        kind = type(group).Kind.Name(group.kind)
        if config.backend == "python" and kind != "KIND_CPU":
            yield Finding("instances", where, f"instance_group kind is {kind}; a Python model needs KIND_CPU")
        if group.count < 1:
            yield Finding("instances", where, f"instance_group count is {group.count}")
    if "gpu_device_ids" in config.parameters:
        ids = config.parameters["gpu_device_ids"].string_value
        count = sum(group.count for group in groups)
        if ids and (problem := check_gpu_device_ids(ids, count, ranks)):
            yield Finding("gpus", where, f"gpu_device_ids: {problem}")


def _check_ensembles(configs: Mapping[str, Any]) -> Iterator[Finding]:
    """After a decoupled member, a member with several instances hands streamed tokens on out of order."""
    for name, config in sorted(configs.items()):
        streaming = False
        for step in config.ensemble_scheduling.step:
            member = configs.get(step.model_name)
            if member is None:
                yield Finding(
                    "ensemble", f"{name}/{_CONFIG}", f"step {step.model_name!r} is not in the repository"
                )
                continue
            count = sum(group.count for group in member.instance_group)
            if streaming and count > 1 and not member.dynamic_batching.preserve_ordering:
                yield Finding(
                    "ensemble",
                    f"{step.model_name}/{_CONFIG}",
                    f"{count} instances after a decoupled model reorder its tokens: "
                    "use count 1, or dynamic_batching { preserve_ordering: true }",
                )
            streaming = streaming or member.model_transaction_policy.decoupled


def _check_numpy(interpreter: Path | None) -> Iterator[Finding]:
    """The Python backend's bindings break with numpy 2, and only at the first request, after "ready"."""
    version = _numpy_version(interpreter)
    where = str(interpreter or sys.executable)
    if version is None:
        yield Finding("numpy", where, "numpy is not installed; the Python backend needs numpy < 2")
    elif int(version.partition(".")[0]) >= 2:
        yield Finding("numpy", where, f"numpy {version}: Triton's Python backend needs numpy < 2")


def _numpy_version(interpreter: Path | None) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    if interpreter is None or Path(interpreter) == Path(sys.executable):
        try:
            return version("numpy")
        except PackageNotFoundError:
            return None
    code = "import importlib.metadata as m; print(m.version('numpy'))"
    try:
        run = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise SetupError(f"cannot run this interpreter: {error}", where=str(interpreter)) from error
    return run.stdout.strip() or None
