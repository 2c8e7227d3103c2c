"""The Triton repository of a TensorRT-LLM build around trtspec's own model, for containers that have both.

<into>/<model_name>/config.pbtxt     tensors, decoupled, the GPUs of each instance
<into>/<model_name>/1/model.py       imports the model from the installed trtspec
<into>/<model_name>/1/model.yaml     `LLM()` keywords with their reasons, and how trtspec serves them

It is the model that serves trtspec's own engines, so clients get the same from it: deltas, the chat template, each
request's acceptance. Folders in model.yaml are relative to it: the build folder may lie anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import StageFailed
from trtspec.package.contract import render_config
from trtspec.package.lint import lint_repository
from trtspec.package.settings import DRAFT_KEYS, MODEL_YAML, ServedLLM, TritonConfig
from trtspec.package.triton import MODEL_PY
from trtspec.trtllm.derive import MOUNT, Settings, settings_text
from trtspec.trtllm.package import gpu_device_ids

# From a model.yaml in BUILD/trtllm/repository/NAME/1 to the build folder.
_UP = "../../../.."


def write_own_repository(
    settings: Settings, model_name: str, instances: int, max_queue_size: int, into: Path
) -> None:
    """Write `into/<model_name>` and lint it. Raises StageFailed when what was written breaks a rule."""
    model = into / model_name
    (model / "1").mkdir(parents=True)
    ranks = settings.values["tensor_parallel_size"] * settings.values["pipeline_parallel_size"]
    config = render_config(model_name, instances, gpu_device_ids(instances, ranks))
    (model / "config.pbtxt").write_text(config, "utf-8")
    (model / "1" / "model.py").write_text(MODEL_PY, "utf-8")
    served = ServedLLM(version=settings.version, max_queue_size=max_queue_size)
    sections = {"triton_config": TritonConfig().model_dump(), "trtspec": served.model_dump()}
    extra = "# Read by trtspec's model; LLM() gets everything above.\n" + yaml.safe_dump(
        sections, sort_keys=False
    )
    (model / "1" / MODEL_YAML).write_text(settings_text(_relocated(settings), extra=extra), "utf-8")
    if findings := lint_repository(into):
        raise StageFailed(
            "the packaged repository breaks its own rules:\n  " + "\n  ".join(map(str, findings)),
            where=str(model),
        )


def _relocated(settings: Settings) -> Settings:
    """The settings with the build's folders named from model.yaml instead of where a container mounts them."""
    values: dict[str, Any] = {**settings.values, "model": _from_here(settings.values["model"])}
    if speculative := values.get("speculative_config"):
        values["speculative_config"] = {
            key: _from_here(value) if key in DRAFT_KEYS else value for key, value in speculative.items()
        }
    return replace(settings, values=values, reasons={**settings.reasons, "model": "the target's checkpoint"})


def _from_here(folder: str) -> str:
    return _UP + folder.removeprefix(MOUNT) if folder.startswith(f"{MOUNT}/") else folder
