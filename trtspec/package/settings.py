"""`model.yaml` of a served model: TensorRT-LLM's keys where it has them, trtspec's own under `trtspec`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import ConfigError, ConfigProblem

MODEL_YAML = "model.yaml"
# Where speculative_config names the draft's folder, by version.
DRAFT_KEYS = frozenset({"speculative_model", "speculative_model_dir"})

QueueSize = Annotated[int, Field(ge=0, description="requests that may wait; more are refused (HTTP 503)")]
StreamText = Annotated[
    Literal["increments", "accumulated"],
    Field(description="what a streamed chunk's text_output holds unless a request says otherwise"),
]


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
    max_queue_size: QueueSize = 64
    reuse_prefixes: bool = Field(True, description="start from prompt rows that earlier requests left")
    speculate: bool = Field(True, description="false serves the same engine without drafting")
    draft_length: int | None = Field(None, ge=1, description="null: the engine's own")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; null: its own choice")
    stream_text: StreamText = "increments"


class ModelSettings(_Strict):
    """The whole file of an engine of trtspec's own. `model` is the engine folder, relative to the file."""

    model: str
    backend: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    tensor_parallel_size: Literal[1] = 1
    pipeline_parallel_size: Literal[1] = 1
    triton_config: TritonConfig = TritonConfig()
    trtspec: ServedRuntime = ServedRuntime()


class ServedLLM(_Strict):
    """How trtspec's model serves a TensorRT-LLM `LLM`; how many run at once is its own max_batch_size."""

    version: str = Field(
        description="the TensorRT-LLM these settings were written for, and no other runs them"
    )
    max_queue_size: QueueSize = 64
    stream_text: StreamText = "increments"


class LLMSettings(BaseModel):
    """The whole file of a TensorRT-LLM deployment: `LLM()` keywords, the two sections that only Triton reads aside.

    Folders are relative to the file. Keywords that are not named here are kept as they are.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    backend: Literal["pytorch"]
    max_batch_size: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    stream_interval: Literal[1] = 1  # a chunk is one step: acceptance is counted from its tokens
    speculative_config: Mapping[str, Any] | None = None
    triton_config: TritonConfig = TritonConfig()
    trtspec: ServedLLM

    @property
    def draft_length(self) -> int:
        """Most tokens drafted per step, 0 without speculation."""
        speculative = self.speculative_config or {}
        return speculative.get("max_draft_len", speculative.get("num_nextn_predict_layers", 0))

    def arguments(self, folder: Path) -> dict[str, Any]:
        """The `LLM()` keywords. folder: where the file is; folders that lie beside it become absolute."""
        keywords = self.model_dump(exclude={"triton_config", "trtspec"}, exclude_none=True)
        keywords["model"] = str((folder / self.model).resolve())
        speculative = keywords.get("speculative_config", {})
        for key in DRAFT_KEYS & speculative.keys():
            speculative[key] = str((folder / speculative[key]).resolve())
        return keywords


Settings = ModelSettings | LLMSettings


def load_settings(path: Path) -> Settings:
    """Read a `model.yaml`; its `backend` says whose it is. Raises ConfigError with every problem by its dotted key."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        of_llm = isinstance(content, dict) and content.get("backend") == "pytorch"
        return (LLMSettings if of_llm else ModelSettings).model_validate(content)
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
