"""The config: what a user writes, section by section. Everything but `name`, `target.model` and
`speculation.method` has a default. Units are part of the names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, StringConstraints, create_model, model_validator
from pydantic_core import PydanticCustomError

from trtspec.config.references import ModelReference, Quantization, Revision
from trtspec.config.rules import contradictions
from trtspec.config.speculation import MAX_DRAFT_LENGTH, Section, Speculation
from trtspec.train.head_modules import METHODS, OPTIONS

Backend = Literal["onnxruntime", "tensorrt", "tensorrt_llm"]
Device = Literal[
    "cpu",
    "l4",
    "l40s",
    "a100-40gb",
    "a100-80gb",
    "h100-sxm",
    "h100-pcie",
    "h200-sxm",
    "b200",
    "gb200",
    "gb300",
    "rtx-4090",
    "rtx-5090",
]

Item = TypeVar("Item", bound=Hashable)

MAX_TOKENS = 16_777_216
MAX_SEED = 2**63 - 1


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)):
        raise PydanticCustomError("ascending", "must be in ascending order, each value once")
    return values


def distinct(values: tuple[Item, ...]) -> tuple[Item, ...]:
    """Validator of a list: raises when a value is in it twice."""
    if len(set(values)) != len(values):
        raise PydanticCustomError("distinct", "must name each value once")
    return values


Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Port = Annotated[int, Field(ge=1, le=65535)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Milliseconds = Annotated[float, Field(gt=0, le=86_400_000)]
# YAML gives lists; a frozen config holds tuples. Only the container is converted, never its items.
BatchSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65536)], ...],
    Field(strict=False, min_length=1, max_length=64),
    AfterValidator(_ascending),
]
Rates = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(strict=False, min_length=1, max_length=64)
]
CapturedLayers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=100_000)], ...],
    Field(strict=False, min_length=1, max_length=64),
    AfterValidator(_ascending),
]
Names = Annotated[
    tuple[Text, ...], Field(strict=False, min_length=1, max_length=1024), AfterValidator(distinct)
]


class Calibration(Section):
    """The seeded text that quantization calibrates on."""

    samples: int = Field(32, ge=1, le=65536, description="Sequences run through the model.")
    tokens: int = Field(256, ge=1, le=131_072, description="Tokens of each sequence.")
    seed: Seed = Field(0, description="Seed that picks the sequences.")


class Target(Section):
    """The model that is served."""

    model: ModelReference = Field(
        description="Folder, hub id (org/name), package:NAME for a model shipped in an installed Python "
        "package, or the path of a bare config.json (plan only). safetensors only."
    )
    revision: Revision | None = Field(
        None, description="Hub commit; only for hub ids. null pins the newest one at build time."
    )
    trust_remote_code: Text | None = Field(
        None, description="Runs the model's own Python code when it repeats `model` exactly; null refuses it."
    )
    quantization: Quantization = Field(
        "none", description="ModelOpt post-training format of the weights, by name."
    )
    kv_cache: Literal["auto", "fp8"] = Field(
        "auto", description="KV cache dtype: auto keeps the engine's own, fp8 calibrates scales for it."
    )
    quantize_lm_head: bool = Field(
        False, description="Quantizes the output layer too; a tied one is untied first."
    )
    block_size: int | None = Field(
        None,
        ge=16,
        le=256,
        description="Weights per quantization scale, in block formats. null takes the format's own, "
        "replaced where it does not divide a layer's width.",
    )
    max_perplexity_increase: float = Field(
        0.05,
        ge=0,
        le=1000,
        description="Largest relative rise of perplexity on held-out text that a build accepts; 0.05 is 5 %.",
    )
    calibration: Calibration = Field(
        default_factory=Calibration, description="The seeded text that quantization calibrates on."
    )


class Verification(Section):
    """How drafts are judged."""

    acceptance: Literal["exact", "typical", "relaxed"] = Field(
        "exact",
        description="exact keeps the target's own output. Lossy, only with lossless: false: typical (Medusa's, for "
        "sampled output) and relaxed (TensorRT-LLM's, for greedy output).",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="typical: a draft more probable than this passes at any entropy; null takes 0.09.",
    )
    delta: float | None = Field(
        None,
        gt=0,
        le=1,
        description="typical: a draft more probable than this times exp(-entropy) passes; null takes 0.3. relaxed: "
        "how far below the likeliest token's probability a draft may lie; null takes 0.6.",
    )
    top_k: int | None = Field(
        None, ge=1, le=1024, description="relaxed: how many of the likeliest tokens pass; null takes 10."
    )


class Engine(Section):
    """What runs the model, where, and how large."""

    backend: Backend = Field(
        "onnxruntime",
        description="onnxruntime (any CPU), tensorrt (one NVIDIA GPU) or tensorrt_llm (many of them).",
    )
    version: Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+-]*$", max_length=64)] | None = (
        Field(
            None,
            description="Version of the backend to build for, quoted. null takes, on tensorrt_llm, the newest stable "
            "one that a Triton image carries, or the newest candidate where no stable one runs the method.",
        )
    )
    device: Device = Field("cpu", description="Hardware that is planned and built for.")
    tensor_parallel: Ranks = Field(1, description="Ranks each layer is split over.")
    pipeline_parallel: Ranks = Field(1, description="Stages the layers are split into.")
    expert_parallel: Ranks = Field(1, description="Ranks the experts of an MoE model are split over.")
    attention_dp: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether each rank keeps all attention heads and serves sequences of its own, on tensorrt_llm; "
        "auto where a step of the workload gets shorter and its cache fits.",
    )
    max_batch_size: int = Field(8, ge=1, le=65536, description="Sequences decoded at once.")
    max_seq_len: Tokens | None = Field(
        None, description="Longest sequence, prompt and output, in tokens; null takes the model's own limit."
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of the onnxruntime backend; null takes all cores."
    )
    numerics: Literal["exact", "fast"] = Field(
        "exact",
        description="exact: a row's result does not depend on other rows of the step; fast allows it to.",
    )


class Workload(Section):
    """The traffic that is planned for."""

    batch_sizes: BatchSizes = Field((1,), description="Concurrent sequences to plan for, ascending.")
    context: Tokens = Field(1024, description="Prompt tokens of a request.")
    output_length: Tokens = Field(256, description="Tokens generated per request.")
    temperature: Temperature = Field(0.0, description="Sampling temperature of the traffic; 0 is greedy.")
    max_itl_ms: Milliseconds | None = Field(
        None, description="Limit on the mean inter-token latency, in milliseconds; null sets none."
    )
    max_ttft_ms: Milliseconds | None = Field(
        None, description="Limit on the time to first token, in milliseconds; null sets none."
    )
    acceptance: Rates | None = Field(
        None,
        description="Declared conditional acceptance by draft position, each 0 to 1: P(i-th accepted given "
        "all before it). null takes a measured or published one.",
    )
    measured: Text | None = Field(
        None, description="Run folder of trtspec eval to take acceptance and step times from."
    )


class Serving(Section):
    """How Triton Inference Server offers the model."""

    model_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = (
        Field("tensorrt_llm", description="Name of the model in the Triton repository.")
    )
    address: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z:.-]+$", max_length=253)] = Field(
        "127.0.0.1", description="Address the server binds; 0.0.0.0 opens it to the network."
    )
    http_port: Port = Field(8000, description="HTTP port.")
    grpc_port: Port = Field(8001, description="gRPC port.")
    metrics_port: Port = Field(8002, description="Prometheus metrics port.")
    openai_port: Port = Field(
        9000, description="HTTP port of the OpenAI-compatible front (trtspec serve --openai)."
    )
    instances: int = Field(1, ge=1, le=64, description="Model instances; each holds its own KV cache.")
    max_concurrency: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Requests decoded at once per instance; null takes engine.max_batch_size.",
    )
    max_queue_size: int = Field(
        64, ge=0, le=1_000_000, description="Requests that may wait per instance; the next one is refused."
    )
    reuse_prefixes: bool = Field(
        True,
        description="Requests start from prompt rows that earlier ones left in the KV cache. Text stays the same, but "
        "who times answers can tell that a beginning was sent before: false where users must not learn that.",
    )


class Evaluation(Section):
    """What `trtspec eval` runs."""

    data: Text = Field(
        "builtin",
        description="Prompts: builtin, a path (parquet, JSONL or folder, SPEED-Bench or Spec-Bench schema), "
        "a hub dataset id, or random:TOKENS (random tokens; not acceptance data).",
    )
    output_length: Tokens = Field(256, description="Most tokens generated per turn.")
    concurrency: int = Field(1, ge=1, le=65536, description="Requests kept in flight.")
    rate_per_s: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="Conversations that begin per second, at random (Poisson), whatever is in flight; null keeps "
        "`concurrency` of them.",
    )
    time_limit_s: float | None = Field(
        None,
        gt=0,
        le=31_536_000,
        description="Seconds of serving per arm after which no more prompts are sent; null sends all.",
    )
    prompts: int | None = Field(None, ge=1, le=10_000_000, description="Prompts to run; null runs all.")
    categories: Names | None = Field(None, description="Categories to run; null runs all.")
    temperature: Temperature = Field(0.0, description="Sampling temperature; 0 is greedy.")
    seed: Seed = Field(0, description="Seed of prompt order and sampling.")


def _option(name: str) -> tuple[Any, Any]:
    """Type and field of an option of `training.options`, as the methods that have it declare it."""
    kinds = {type(method.options[name]) for method in METHODS.values() if name in method.options}
    if kinds == {bool}:
        return bool | None, Field(None, description=OPTIONS[name])
    if kinds == {float}:
        return float | None, Field(None, ge=0, le=1, description=OPTIONS[name])
    return int | None, Field(None, ge=0, le=1_000_000, description=OPTIONS[name])


TrainingOptions = create_model(
    "TrainingOptions",
    __base__=Section,
    __doc__="What only some methods have, besides what all training shares.",
    **{name: _option(name) for name in OPTIONS},
)


class Training(Section):
    """How `trtspec train` makes the draft that `speculation.draft.model` names, from the target's own responses."""

    data: Names = Field(
        ("packaged",),
        description="What the target is asked: packaged (prompts that come with trtspec), paths or hub data sets as "
        "in evaluation.data, self (chat models make up any number of prompts) and follow_up (tasks about the answers "
        "to the others: summaries, questions about passages, next turns).",
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=100_000_000_000,
        description="Response tokens to collect; null answers each prompt of `data` once. self needs a number.",
    )
    response_length: Tokens | None = Field(
        None,
        description="Most tokens of one response; null takes 128, or half of engine.max_seq_len if less.",
    )
    temperature: Temperature | None = Field(
        None, description="Temperature the responses are sampled at; null takes workload.temperature."
    )
    held_out_prompts: int = Field(
        64, ge=1, le=100_000, description="Prompts never trained on, to measure acceptance; a tenth at most."
    )
    epochs: int = Field(2, ge=1, le=10_000, description="Passes over the responses.")
    batch_tokens: int = Field(
        512, ge=1, le=16_777_216, description="Tokens of a training step, prompts and padding included."
    )
    start: ModelReference | None = Field(
        None,
        description="A trained head (path or hub id) to go on from: its sizes, captured layers and vocabulary stay; "
        "null begins with the target's own weights.",
    )
    learning_rate: float | None = Field(
        None, gt=0, lt=1, description="After the warm-up; falls along a cosine. null takes the method's own."
    )
    warm_up_steps: int = Field(20, ge=0, le=1_000_000, description="Steps until the full learning rate.")
    seed: Seed = Field(0, description="Seed of start values, order and noise.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Arithmetic of target and draft while training; trained weights are kept in float32.",
    )
    draft_length: int = Field(
        4, ge=1, le=MAX_DRAFT_LENGTH, description="Draft positions the draft is trained and measured for."
    )
    captured_layers: CapturedLayers | None = Field(
        None, description="0-based target layers whose output the draft reads; null takes the method's own."
    )
    draft_vocab_size: int | None = Field(
        None,
        ge=16,
        le=10_000_000,
        description="Most frequent tokens of the responses that the draft can propose; null takes all.",
    )
    evaluations: int = Field(
        10, ge=1, le=10_000, description="Measurements on the held-out prompts, evenly over the steps."
    )
    checkpoint_steps: int = Field(50, ge=1, le=1_000_000, description="Steps between two checkpoints.")
    processes: int = Field(
        1,
        ge=1,
        le=1024,
        description="Training processes on this machine, each with its own GPU if there are any.",
    )
    options: TrainingOptions = Field(
        default_factory=TrainingOptions,
        description="Settings of the method's own; null takes its default.",
    )


class Config(Section):
    """One speculative deployment, from model to evaluation.

    Raises pydantic's ValidationError when built from Python with wrong values or contradictions;
    `load_config` turns those into a ConfigError with file, line and column.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)] = Field(
        description="Name of the deployment: lower-case letters, digits, dot, underscore and dash."
    )
    target: Target = Field(description="The model that is served.")
    speculation: Speculation = Field(description="How tokens are drafted.")
    verification: Verification = Field(
        default_factory=Verification, description="How drafts are judged: exact, or lossy by name."
    )
    engine: Engine = Field(default_factory=Engine, description="What runs the model, where, and how large.")
    workload: Workload = Field(default_factory=Workload, description="The traffic that is planned for.")
    training: Training = Field(
        default_factory=Training, description="How `trtspec train` makes the draft, where there is none yet."
    )
    serving: Serving = Field(
        default_factory=Serving, description="How Triton Inference Server offers the model."
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="What trtspec eval runs.")
    lossless: bool = Field(
        True, description="Output must equal the target's own; refuses every option that could change it."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Config:
        found = tuple(contradictions(self))
        if found:
            text = "; ".join(contradiction.message for contradiction in found)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "found": found})
        return self
