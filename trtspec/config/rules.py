"""What well-typed fields may not say together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtspec.config.references import is_hub_id

if TYPE_CHECKING:
    from trtspec.config.schema import Config, Engine, Target
    from trtspec.train.head_modules import Method

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Fields that exclude each other. `paths`: those involved, the one to change first in front."""

    paths: tuple[Path, ...]
    message: str
    hint: str


def _paths(*dotted: str) -> tuple[Path, ...]:
    return tuple(tuple(path.split(".")) for path in dotted)


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Every contradiction in a config whose fields are each valid."""
    yield from _target(config.target)
    yield from _speculation(config)
    yield from _verification(config)
    yield from _engine(config.engine)
    yield from _capacity(config)
    yield from _serving(config)
    yield from _training(config)
    if config.lossless and config.engine.numerics == "fast":
        yield Contradiction(
            _paths("engine.numerics", "lossless"),
            "numerics: fast lets a row depend on its neighbours, which lossless: true rules out",
            "write numerics: exact, or lossless: false",
        )
    if config.target.kv_cache == "fp8" and config.engine.backend == "onnxruntime":
        yield Contradiction(
            _paths("target.kv_cache", "engine.backend"),
            "the onnxruntime backend has no fp8 KV cache",
            "write kv_cache: auto, or choose the tensorrt_llm backend",
        )
    if config.workload.acceptance is not None and config.workload.measured is not None:
        yield Contradiction(
            _paths("workload.acceptance", "workload.measured"),
            "acceptance is declared and also taken from a measured run",
            "keep one of acceptance and measured",
        )


def _target(target: Target) -> Iterator[Contradiction]:
    if target.revision is not None and not is_hub_id(target.model):
        yield Contradiction(
            _paths("target.revision", "target.model"),
            f"revision names a hub commit, and {target.model} is not on the hub",
            "remove revision",
        )
    if target.trust_remote_code is not None and target.trust_remote_code != target.model:
        yield Contradiction(
            _paths("target.trust_remote_code", "target.model"),
            f"trust_remote_code names {target.trust_remote_code}, the model is {target.model}",
            f"write trust_remote_code: {target.model} after reading its code, or remove it",
        )
    if target.quantization == "none":
        if target.quantize_lm_head:
            yield Contradiction(
                _paths("target.quantize_lm_head", "target.quantization"),
                "quantize_lm_head: true without a quantization format",
                "name a format in target.quantization, or remove quantize_lm_head",
            )
        if target.block_size is not None:
            yield Contradiction(
                _paths("target.block_size", "target.quantization"),
                "block_size without a quantization format",
                "name a format in target.quantization, or remove block_size",
            )


def _speculation(config: Config) -> Iterator[Contradiction]:
    speculation = config.speculation
    drafts = {
        ("speculation", "draft"): getattr(speculation, "draft", None),
        **{("speculation", "drafts", i): d for i, d in enumerate(getattr(speculation, "drafts", ()))},
    }
    for path, draft in drafts.items():
        if draft is not None and draft.revision is not None and not is_hub_id(draft.model):
            yield Contradiction(
                ((*path, "revision"), (*path, "model")),
                f"revision names a hub commit, and {draft.model} is not on the hub",
                "remove revision",
            )
    if speculation.method == "ngram" and speculation.min_ngram > speculation.max_ngram:
        yield Contradiction(
            _paths("speculation.min_ngram", "speculation.max_ngram"),
            f"min_ngram {speculation.min_ngram} is above max_ngram {speculation.max_ngram}: nothing matches",
            f"write min_ngram: {speculation.max_ngram} or less, or raise max_ngram",
        )
    yield from _pool(config)
    policy = getattr(speculation, "draft_length_policy", "auto")
    if policy == "adaptive" and config.engine.backend == "tensorrt_llm":
        yield Contradiction(
            _paths("speculation.draft_length_policy", "engine.backend"),
            "TensorRT-LLM follows a schedule of draft lengths and does not adapt them to acceptance",
            "write draft_length_policy: schedule, or auto",
        )
    draft_length = getattr(speculation, "draft_length", "auto")
    if draft_length == "auto":
        return
    shortest = getattr(speculation, "min_draft_length", 1)
    if shortest > draft_length:
        yield Contradiction(
            _paths("speculation.min_draft_length", "speculation.draft_length"),
            f"min_draft_length {shortest} is larger than draft_length {draft_length}: nothing is drafted",
            f"write min_draft_length: {draft_length} or less, or raise draft_length",
        )
    if speculation.method == "quantspec" and draft_length >= speculation.kv_group_size:
        yield Contradiction(
            _paths("speculation.draft_length", "speculation.kv_group_size"),
            f"draft_length {draft_length} is not below kv_group_size {speculation.kv_group_size}: a step takes no more "
            "rows than a group has",
            f"write draft_length: {speculation.kv_group_size - 1} or less, or raise kv_group_size",
        )
    if speculation.method == "lookahead":
        size, count = speculation.ngram_size, speculation.verification_set_size
        if draft_length > (most := count * (size - 1)):
            yield Contradiction(
                _paths("speculation.draft_length", "speculation.ngram_size"),
                f"{count} n-grams of {size} tokens propose at most {most}, draft_length is {draft_length}",
                f"write draft_length: {most}, or raise ngram_size or verification_set_size",
            )
    if speculation.method == "specinfer" and draft_length < (least := len(speculation.drafts)):
        yield Contradiction(
            _paths("speculation.draft_length", "speculation.drafts"),
            f"draft_length {draft_length} has no token for each of {least} drafts: the last ones never write",
            f"write draft_length: {least} or more, or name fewer drafts",
        )
    limit = config.engine.max_seq_len
    if limit is not None and draft_length >= limit:
        yield Contradiction(
            _paths("speculation.draft_length", "engine.max_seq_len"),
            f"draft_length {draft_length} does not fit in max_seq_len {limit}",
            "lower draft_length or raise max_seq_len",
        )


def _pool(config: Config) -> Iterator[Contradiction]:
    size = getattr(config.speculation, "pool_tokens", 0)
    if size and config.engine.backend == "tensorrt_llm":
        yield Contradiction(
            _paths("speculation.pool_tokens", "engine.backend"),
            "pool_tokens bounds the pool of trtspec's own decode loop, which the tensorrt_llm backend does not run",
            "remove pool_tokens, or choose another backend",
        )
    if not size and getattr(config.speculation, "pool_prompts", False):
        yield Contradiction(
            _paths("speculation.pool_prompts", "speculation.pool_tokens"),
            "pool_prompts without a pool: pool_tokens is 0",
            "name a pool_tokens, or remove pool_prompts",
        )
    if 0 < size < 1024:
        yield Contradiction(
            _paths("speculation.pool_tokens"),
            f"a pool of {size} tokens hardly holds one answer",
            "write pool_tokens: 1024 or more, or 0 for no pool",
        )


def _verification(config: Config) -> Iterator[Contradiction]:
    verification, rule = config.verification, config.verification.acceptance
    having = {"epsilon": ("typical",), "delta": ("typical", "relaxed"), "top_k": ("relaxed",)}
    for field, rules in having.items():
        if getattr(verification, field) is not None and rule not in rules:
            yield Contradiction(
                _paths(f"verification.{field}", "verification.acceptance"),
                f"{rule} acceptance has no {field}",
                f"remove {field}, or write acceptance: {' or '.join(rules)}",
            )
    if rule == "exact":
        return
    if config.lossless:
        yield Contradiction(
            _paths("verification.acceptance", "lossless"),
            f"{rule} acceptance changes the output, which lossless: true rules out",
            "write acceptance: exact, or lossless: false",
        )
    if config.speculation.method == "none":
        yield Contradiction(
            _paths("verification.acceptance", "speculation.method"),
            f"{rule} acceptance without speculation: there are no drafts to judge",
            "write acceptance: exact, or choose a method that drafts",
        )
    if config.engine.backend == "tensorrt_llm":
        yield Contradiction(
            _paths("verification.acceptance", "engine.backend"),
            f"{rule} acceptance is a rule of trtspec's own decode loop, which the tensorrt_llm backend does not run",
            "write acceptance: exact, or choose another backend",
        )


def _engine(engine: Engine) -> Iterator[Contradiction]:
    on_cpu = engine.device == "cpu"
    if engine.backend == "onnxruntime" and not on_cpu:
        yield Contradiction(
            _paths("engine.device", "engine.backend"),
            f"the onnxruntime backend runs on the CPU, device is {engine.device}",
            "write device: cpu, or choose the tensorrt or tensorrt_llm backend",
        )
    if engine.backend != "onnxruntime" and on_cpu:
        yield Contradiction(
            _paths("engine.device", "engine.backend"),
            f"the {engine.backend} backend needs an NVIDIA GPU, device is cpu",
            "name the GPU in engine.device, for example h100-sxm, or choose the onnxruntime backend",
        )
    if engine.backend != "tensorrt_llm":
        for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if getattr(engine, field) > 1:
                yield Contradiction(
                    _paths(f"engine.{field}", "engine.backend"),
                    f"the {engine.backend} backend runs on one device, {field} is {getattr(engine, field)}",
                    f"write {field}: 1, or choose the tensorrt_llm backend",
                )
        if engine.attention_dp == "always":
            yield Contradiction(
                _paths("engine.attention_dp", "engine.backend"),
                f"the {engine.backend} backend runs on one device, attention_dp is always",
                "write attention_dp: auto, or choose the tensorrt_llm backend",
            )
    if engine.threads is not None and engine.backend != "onnxruntime":
        yield Contradiction(
            _paths("engine.threads", "engine.backend"),
            f"threads is a setting of the onnxruntime backend, backend is {engine.backend}",
            "remove threads",
        )


def _capacity(config: Config) -> Iterator[Contradiction]:
    engine, workload, evaluation = config.engine, config.workload, config.evaluation
    if workload.batch_sizes[-1] > engine.max_batch_size:
        yield Contradiction(
            _paths("workload.batch_sizes", "engine.max_batch_size"),
            f"batch size {workload.batch_sizes[-1]} is above max_batch_size {engine.max_batch_size}",
            f"write max_batch_size: {workload.batch_sizes[-1]}, or remove the larger batch sizes",
        )
    if evaluation.rate_per_s is not None and evaluation.concurrency != 1:
        yield Contradiction(
            _paths("evaluation.rate_per_s", "evaluation.concurrency"),
            f"rate_per_s {evaluation.rate_per_s:g} sends whatever is in flight, and concurrency "
            f"{evaluation.concurrency} limits what is",
            "remove one of the two",
        )
    limit = engine.max_seq_len
    if limit is None:
        return
    if workload.context + workload.output_length > limit:
        yield Contradiction(
            _paths("workload.context", "workload.output_length", "engine.max_seq_len"),
            f"context {workload.context} + output_length {workload.output_length} exceed max_seq_len {limit}",
            f"write max_seq_len: {workload.context + workload.output_length}, or shorten the workload",
        )
    if evaluation.output_length >= limit:
        yield Contradiction(
            _paths("evaluation.output_length", "engine.max_seq_len"),
            f"output_length {evaluation.output_length} leaves no room for a prompt in max_seq_len {limit}",
            f"write output_length: {max(1, limit // 2)} or less, or raise max_seq_len",
        )


def _serving(config: Config) -> Iterator[Contradiction]:
    serving, slots = config.serving, config.engine.max_batch_size
    ports: dict[int, str] = {}
    for field in ("http_port", "grpc_port", "metrics_port", "openai_port"):
        port = getattr(serving, field)
        if port in ports:
            yield Contradiction(
                _paths(f"serving.{field}", f"serving.{ports[port]}"),
                f"{field} and {ports[port]} are both {port}",
                "give each its own port",
            )
        ports.setdefault(port, field)
    concurrency = serving.max_concurrency
    if concurrency is not None and concurrency > slots:
        yield Contradiction(
            _paths("serving.max_concurrency", "engine.max_batch_size"),
            f"max_concurrency {concurrency} is above max_batch_size {slots}, the sequences the engine holds",
            f"write max_concurrency: {slots} or less, or raise max_batch_size",
        )
    room = serving.instances * (min(concurrency or slots, slots) + serving.max_queue_size)
    if config.evaluation.concurrency > room:
        yield Contradiction(
            _paths("evaluation.concurrency", "serving.max_queue_size", "engine.max_batch_size"),
            f"concurrency {config.evaluation.concurrency} is more than the server takes: it refuses any past "
            f"{room} running or waiting",
            f"write concurrency: {room} or less, or raise serving.max_queue_size",
        )


def _training(config: Config) -> Iterator[Contradiction]:
    from trtspec.train.head_modules import METHODS

    training, name = config.training, config.speculation.method
    if "self" in training.data and training.tokens is None:
        yield Contradiction(
            _paths("training.data", "training.tokens"),
            "self makes up prompts without end, and tokens does not say when there are enough",
            "write tokens: 1000000, or remove self from data",
        )
    if set(training.data) == {"follow_up"}:
        yield Contradiction(
            _paths("training.data"),
            "follow_up alone has no answers to ask about",
            "write data: [packaged, follow_up]",
        )
    if config.evaluation.data in training.data:
        yield Contradiction(
            _paths("training.data", "evaluation.data"),
            f"the draft would be trained on {config.evaluation.data}, which it is evaluated on",
            "name other prompts in training.data",
        )
    limit, response = config.engine.max_seq_len, training.response_length
    if limit is not None and response is not None and response >= limit:
        yield Contradiction(
            _paths("training.response_length", "engine.max_seq_len"),
            f"response_length {response} leaves no room for a prompt in max_seq_len {limit}",
            f"write response_length: {max(1, limit // 2)} or less, or raise max_seq_len",
        )
    method = METHODS.get(name)
    for option, value in training.options:
        if value is not None and (method is None or option not in method.options):
            having = [other for other, found in METHODS.items() if option in found.options]
            yield Contradiction(
                _paths(f"training.options.{option}", "speculation.method"),
                f"training has no option {option} for {name}",
                f"remove {option}; it is one of {', '.join(having)}",
            )
    if method is None:
        return
    if training.draft_vocab_size is not None and not method.reduced_vocabulary:
        yield Contradiction(
            _paths("training.draft_vocab_size", "speculation.method"),
            f"{name} drafts from the target's whole vocabulary",
            "remove draft_vocab_size",
        )
    if training.start is not None:
        yield from _further_training(config, method)
    if training.captured_layers is not None and method.captures == "last":
        yield Contradiction(
            _paths("training.captured_layers", "speculation.method"),
            f"{name} reads no inner layers of the target",
            "remove captured_layers",
        )


def _further_training(config: Config, method: Method) -> Iterator[Contradiction]:
    """What a head that is trained further has settled already."""
    from trtspec.train.head_modules import SETTLED

    training = config.training
    if not method.goes_on:
        yield Contradiction(
            _paths("training.start", "speculation.method"),
            f"training a {config.speculation.method} head begins with the target's weights, not with another head",
            "remove start",
        )
        return
    settled = {name: getattr(training, name) for name in ("draft_vocab_size", "captured_layers")}
    settled |= {f"options.{name}": getattr(training.options, name) for name in SETTLED}
    for name, value in settled.items():
        if value is not None:
            yield Contradiction(
                _paths("training.start", f"training.{name}"),
                f"{name} is settled by the head that training goes on from",
                f"remove {name}, or write null where another file sets it",
            )
