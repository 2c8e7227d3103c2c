"""`model.yaml` of a served model: TensorRT-LLM's keys where it has them, trtspec's own under `trtspec`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import ConfigError, ConfigProblem

MODEL_YAML = "model.yaml"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TritonConfig(_Strict):
    """What TensorRT-LLM's model reads in `auto_complete_config`; batching is the engine's, not Triton's."""

    max_batch_size: Literal[0] = Field(0, description="0: one prompt per Triton request")
    decoupled: Literal[True] = Field(True, description="true: a request may have many responses (streaming)")
    cancellation_check_period_ms: int = Field(50, ge=1, description="how often waiting requests are polled")


class ServedRuntime(_Strict):
    """How the runtime behind the model is opened."""

    max_concurrency: int | None = Field(None, ge=1, description="requests decoded at once; null: all slots")
    max_queue_size: int = Field(64, ge=0, description="requests that may wait; more are refused (HTTP 503)")
    reuse_prefixes: bool = Field(True, description="start from prompt rows that earlier requests left")
    speculate: bool = Field(True, description="false serves the same engine without drafting")
    draft_length: int | None = Field(None, ge=1, description="null: the engine's own")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; null: its own choice")
    stream_text: Literal["increments", "accumulated"] = Field(
        "increments", description="what a streamed chunk's text_output holds unless a request says otherwise"
    )


class ModelSettings(_Strict):
    """The whole file. `model` is the engine folder, relative to the file."""

    model: str
    backend: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    tensor_parallel_size: Literal[1] = 1
    pipeline_parallel_size: Literal[1] = 1
    triton_config: TritonConfig = TritonConfig()
    trtspec: ServedRuntime = ServedRuntime()


def load_settings(path: Path) -> ModelSettings:
    """Read a `model.yaml`. Raises ConfigError with every problem, each named by its dotted key."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        return ModelSettings.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from error
    except ValidationError as error:
        problems = [
            ConfigProblem(f"{path}: {'.'.join(map(str, item['loc'])) or 'top level'}", item["msg"])
            for item in error.errors()
        ]
        raise ConfigError(problems=problems) from error


def dump_settings(settings: ModelSettings) -> str:
    """The text of `model.yaml`, every key present, so that a reader sees what may be changed."""
    sections = settings.model_dump()
    body = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    return "# TensorRT-LLM's LLM() keys, then triton_config, then what only trtspec has.\n" + body
