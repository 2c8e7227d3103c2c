"""run.json: everything one evaluation saw, raw, so that every reported number can be recounted.

A *request* is one generation call: one turn of one prompt on one *arm*. The speculative arm is the deployment
under test; the baseline arm is the same engine without speculation. Requests run in *blocks*: a block is a few
prompts that both arms serve one after the other, in alternating order, so that a machine that drifts drifts
under both. `start_s` runs on the arm's own clock, which stands still while the other arm is served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtspec.errors import ConfigError
from trtspec.evaluate import summary
from trtspec.evaluate.data import DataFile
from trtspec.evaluate.environment import Environment
from trtspec.evaluate.lossless import Difference, LosslessReport
from trtspec.files import write_atomic
from trtspec.values import FinishReason, StepRecord

SCHEMA = "trtspec.run/1"
RUN_FILE = "run.json"

Arm = Literal["speculative", "baseline"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request. Times in seconds; `start_s` on the arm's clock, the others since the request's submit.

    prompt_sha256: of the prompt's token ids, None where the target does not reveal them. A request with equal
    text and another hash was rendered by another chat template. cached_tokens: prompt tokens that were in the target's
    cache already, None where it does not say. quoted: what the next turn quotes, where `text` holds a reasoning
    model's thoughts besides; None is all of `text`. late_s: in an open loop `start_s` is the scheduled arrival, and the
    request was sent so much later; None where no arrival was scheduled.
    """

    arm: Arm
    question_id: str
    category: str
    turn: int
    block: int
    prompt_tokens: int
    prompt_sha256: str | None
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    start_s: float
    ttft_s: float
    total_s: float
    steps: tuple[StepRecord, ...]
    cached_tokens: int | None = None
    quoted: str | None = None
    late_s: float | None = None


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One A/B block: seconds each arm was busy with it, and which arm went first.

    whole: it was served in one go on both arms, and no request of it failed.
    """

    index: int
    first: Arm
    whole: bool
    speculative_s: float
    speculative_tokens: int
    baseline_s: float | None = None
    baseline_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that did not finish, and the target's own words."""

    arm: Arm
    question_id: str
    category: str
    turn: int
    message: str


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What was measured. transport: "in process", "triton grpc", "triton http", "openai http". exact: rows do not
    influence each other.

    logits_dtype: the precision near ties are judged in. seed_identical: a sampled request with the same seed gives
    the same tokens with and without speculation (the draft is deterministic, so the target's own draw decides).
    tree_depth: the longest path of its draft trees; None for chains, whose draft length is that.
    acceptance_source: where steps come from, e.g. "step records". acceptance: the rule drafts are judged by; any but
    "exact" is lossy. token_ids: "from text" where the target sends text and a tokenizer made the ids, which may split
    it otherwise than the model emitted it.
    """

    transport: str
    model: str
    method: str
    draft_length: int | None
    backend: str = "unknown"
    device: str = "unknown"
    weights: str = "unknown"
    exact: bool = False
    logits_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    seed_identical: bool = False
    tree_depth: int | None = None
    acceptance_source: str = "step records"
    acceptance: str = "exact"
    location: str | None = None
    token_ids: Literal["emitted", "from text"] = "emitted"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How requests were sampled and sent. output_length: most tokens of a turn. warmup: unrecorded requests per arm.

    concurrency: conversations in flight. rate_per_s: conversations that arrive per second (open loop), whatever is in
    flight; None keeps `concurrency` of them. time_limit_s: of serving per arm, after which none begins; None has no
    limit. chat_template_args: what the chat template was given besides the messages, such as enable_thinking.
    """

    output_length: int
    concurrency: int = 1
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    warmup: int = 1
    rate_per_s: float | None = None
    time_limit_s: float | None = None
    chat_template_args: Mapping[str, Any] | None = None

    @property
    def load(self) -> str:
        """How requests were sent, in words."""
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g} conversations per second, Poisson arrivals"
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class DataFacts:
    """The prompts that were sent. selection_sha256: over their ids and texts, in order. caution: see `PromptSet`."""

    name: str
    prompts: int
    selection_sha256: str
    revision: str | None = None
    files: tuple[DataFile, ...] = ()
    caution: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One evaluation. `command` reproduces it; `config` (YAML) and `plan` are the build's, where there is one.

    complete: False where it was interrupted: `requests` are those that had finished. unsent_prompts: those for which
    the time limit left no time.
    """

    name: str
    created_at: str
    settings: RunSettings
    data: DataFacts
    speculative: TargetFacts
    baseline: TargetFacts | None
    environment: Environment
    requests: tuple[RequestRecord, ...]
    blocks: tuple[BlockRecord, ...]
    lossless: LosslessReport
    failures: tuple[Failure, ...] = ()
    command: str | None = None
    config: str | None = None
    plan: Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    complete: bool = True
    unsent_prompts: int = 0
    schema: str = SCHEMA

    def of(self, arm: Arm) -> tuple[RequestRecord, ...]:
        """The finished requests of one arm, in the order they finished."""
        return tuple(request for request in self.requests if request.arm == arm)

    def summary(self) -> dict[str, Any]:
        """The `result` object of `trtspec eval --json`; units are in the names, None where nothing was measured."""
        return summary.summarize(self)

    def measured(self) -> dict[str, Any]:
        """What the planner may use instead of its own prediction: see `summary.measured_profile`."""
        return summary.measured_profile(self)

    def write(self, folder: Path) -> Path:
        """Write `folder`/run.json in one step and give its path. `measured` and `summary` are included for readers."""
        top = {"schema": self.schema, **asdict(replace(self, requests=()))}
        del top["requests"]
        top |= {"summary": self.summary(), "measured": self.measured()}
        body = json.dumps(top, indent=1, ensure_ascii=False, allow_nan=False)
        rows = ",\n".join("  " + json.dumps(pack_request(r), ensure_ascii=False) for r in self.requests)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RUN_FILE
        # One request a line: the record stays readable, and two runs can be compared with diff.
        write_atomic(path, f'{body[:-2]},\n "requests": [\n{rows}\n ]\n}}\n')
        return path

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read run.json, or the folder that holds it. Raises ConfigError when it is missing or not such a record."""
        path = path / RUN_FILE if path.is_dir() else path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("schema") != SCHEMA:
                raise ConfigError(
                    f"not a run record this version reads: schema {content.get('schema')!r}, expected {SCHEMA!r}",
                    where=str(path),
                    hint="run the evaluation again with this version of trtspec",
                )
            return _unpack(content)
        except FileNotFoundError as error:
            raise ConfigError(
                "no run record here", where=str(path), hint="name a folder that `trtspec eval` wrote"
            ) from error
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"not a run record: {error!r}", where=str(path)) from error


def pack_request(request: RequestRecord) -> dict[str, Any]:
    """A request as JSON, times to a tenth of a microsecond."""
    packed = asdict(request)
    for row in (packed, *packed["steps"]):
        row |= {name: round(value, 7) for name, value in row.items() if isinstance(value, float)}
    return packed


def unpack_request(row: Mapping[str, Any]) -> RequestRecord:
    """The inverse of `pack_request`."""
    steps = tuple(StepRecord(**step) for step in row["steps"])
    return RequestRecord(**{**row, "token_ids": tuple(row["token_ids"]), "steps": steps})


def _unpack(content: Mapping[str, Any]) -> RunRecord:
    def many(kind: type, rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        return tuple(kind(**row) for row in rows)

    lossless = content["lossless"]
    return RunRecord(
        name=content["name"],
        created_at=content["created_at"],
        settings=RunSettings(**content["settings"]),
        data=DataFacts(**{**content["data"], "files": many(DataFile, content["data"]["files"])}),
        speculative=TargetFacts(**content["speculative"]),
        baseline=TargetFacts(**content["baseline"]) if content["baseline"] else None,
        environment=Environment(**content["environment"]),
        requests=tuple(unpack_request(row) for row in content["requests"]),
        blocks=many(BlockRecord, content["blocks"]),
        lossless=LosslessReport(**{**lossless, "differences": many(Difference, lossless["differences"])}),
        failures=many(Failure, content["failures"]),
        command=content["command"],
        config=content["config"],
        plan=content["plan"],
        tensor_parallel=content["tensor_parallel"],
        complete=content.get("complete", True),
        unsent_prompts=content.get("unsent_prompts", 0),
    )
