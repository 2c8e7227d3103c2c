"""The tensors of a served model, in one table: TensorRT-LLM's llmapi contract and what trtspec adds to it.

`config.pbtxt` is written from this table, the model reads requests and writes responses by it, and the
client types its requests with it, so that no name, type or shape is spelled twice.

Names, dtypes and dims of rows marked `LLMAPI` are those of TensorRT-LLM's Triton model
(triton_backend/all_models/llmapi); a client written for it works unchanged. Where this model deliberately
does something else, the row's note says so. The differences that a client can see:

- Streamed `text_output` carries the new text only. The stock model repeats the whole text in every chunk;
  `accumulate_text` true (or `stream_text: accumulated` in model.yaml) asks for that.
- Acceptance outputs are numbers of their declared type. The stock model sends them as strings.
- Nothing is ignored: an input or request parameter that cannot be honoured is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

# Triton's name of a type in config.pbtxt → its name on the wire (KServe v2).
WIRE_TYPES = {
    "TYPE_BOOL": "BOOL",
    "TYPE_INT32": "INT32",
    "TYPE_INT64": "INT64",
    "TYPE_UINT64": "UINT64",
    "TYPE_FP32": "FP32",
    "TYPE_STRING": "BYTES",
}

# How the error of a request that found the queue full begins: the only UNAVAILABLE worth sending again soon.
QUEUE_FULL = "the server is full"

# What an error's text ends with, by gRPC's names. Triton streams an error as a text without a status; with its header
# `triton_grpc_error` there is one, and the server dies of requests that are refused in quick succession.
STATUSES = ("INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL")

LLMAPI = "llmapi"
TRTSPEC = "trtspec"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output. dims: 1 is exactly one element, -1 any number. origin: `LLMAPI` or `TRTSPEC`."""

    name: str
    data_type: str
    dims: int
    note: str
    origin: str = LLMAPI


def _inputs() -> tuple[Tensor, ...]:
    boolean, int32, fp32, string = "TYPE_BOOL", "TYPE_INT32", "TYPE_FP32", "TYPE_STRING"
    param = "sampling_param_"
    return (
        Tensor(
            "text_input", string, -1, "one raw prompt; tokenized with the tokenizer's own BOS, no template"
        ),
        Tensor(
            "messages", string, 1, "JSON list of {role, content}; the chat template is applied here", TRTSPEC
        ),
        Tensor("input_ids", int32, -1, "the prompt as token ids, used as they are", TRTSPEC),
        Tensor("streaming", boolean, 1, "one response per engine step instead of one in all"),
        Tensor("accumulate_text", boolean, 1, "streamed chunks repeat the text so far", TRTSPEC),
        Tensor(f"{param}best_of", int32, 1, "1 only: one sequence per request"),
        Tensor(f"{param}temperature", fp32, 1, "0 (the default) is greedy"),
        Tensor(f"{param}top_k", int32, 1, "0 (the default) is off"),
        Tensor(f"{param}top_p", fp32, 1, "in (0, 1]; 1 (the default) is off"),
        Tensor(f"{param}frequency_penalty", fp32, 1, "over generated tokens; 0 is off"),
        Tensor(f"{param}presence_penalty", fp32, 1, "over generated tokens; 0 is off"),
        Tensor(f"{param}repetition_penalty", fp32, 1, "over prompt and generated tokens; 1 is off", TRTSPEC),
        Tensor(f"{param}max_tokens", int32, 1, "absent: up to the context limit (the stock default is 32)"),
        Tensor(f"{param}stop", string, -1, "stop strings, matched on decoded text and left out of it"),
        Tensor(f"{param}seed", "TYPE_UINT64", 1, "same seed, same text; absent: a fresh one"),
        Tensor(f"{param}ignore_eos", boolean, 1, "do not end at the model's own stop ids", TRTSPEC),
        Tensor(f"{param}exclude_input_from_output", boolean, 1, "absent: true; false puts the prompt first"),
        Tensor(f"{param}return_perf_metrics", boolean, 1, "adds the *_time_ns outputs to the last response"),
        Tensor("return_finish_reason", boolean, 1, "adds finish_reason to the last response"),
        Tensor("return_stop_reason", boolean, 1, "adds stop_reason to the last response"),
        Tensor("return_cumulative_logprob", boolean, 1, "adds cumulative_logprob to the last response"),
        Tensor("stop", boolean, 1, "ends the running request that has this request's id"),
        Tensor("lora_id", "TYPE_UINT64", 1, "refused: no adapters"),
        Tensor("lora_name", string, 1, "refused: no adapters"),
        Tensor("lora_path", string, 1, "refused: no adapters"),
        Tensor("lora_ckpt_source", string, 1, "refused: no adapters"),
    )


def _outputs() -> tuple[Tensor, ...]:
    int32, int64, fp32, string = "TYPE_INT32", "TYPE_INT64", "TYPE_FP32", "TYPE_STRING"
    blocks = "never sent: trtspec's engines keep one contiguous cache per sequence, TensorRT-LLM has metrics of its own"
    clock = "last response, with return_perf_metrics; nanoseconds of the host's monotonic clock"
    return (
        Tensor("text_output", string, -1, "new text (see the module docstring); may be empty"),
        Tensor("finish_reason", string, -1, "stop, length or cancelled"),
        Tensor("stop_reason", string, -1, "the stop string or stop id, else None"),
        Tensor("cumulative_logprob", fp32, -1, "sum of the target's log probabilities of the emitted tokens"),
        Tensor("kv_cache_reused_block", int32, -1, blocks),
        Tensor("kv_cache_missed_block", int32, -1, blocks),
        Tensor("kv_cache_alloc_new_blocks", int32, -1, blocks),
        Tensor("kv_cache_alloc_total_blocks", int32, -1, blocks),
        Tensor("kv_cache_hit_rate", fp32, -1, blocks),
        Tensor("arrival_time_ns", int64, 1, clock),
        Tensor("first_scheduled_time_ns", int64, 1, "never sent: the engine does not report it"),
        Tensor("first_token_time_ns", int64, 1, clock),
        Tensor("last_token_time_ns", int64, 1, clock),
        Tensor(
            "acceptance_rate", fp32, 1, "last response: accepted / drafted tokens; 0 when none were drafted"
        ),
        Tensor("total_accepted_draft_tokens", int32, 1, "last response"),
        Tensor("total_draft_tokens", int32, 1, "last response"),
        Tensor(
            "acceptance_length",
            fp32,
            1,
            "last response: tokens per verify step; absent without a step",
            TRTSPEC,
        ),
        Tensor("num_steps", int32, 1, "last response: verify steps, the prefill not among them", TRTSPEC),
        Tensor("prompt_tokens", int32, 1, "last response", TRTSPEC),
        Tensor(
            "completion_tokens", int32, 1, "last response; includes the stop id that ended the text", TRTSPEC
        ),
        Tensor("token_ids", int32, -1, "every response: the tokens behind it; absent when none", TRTSPEC),
        Tensor(
            "token_logprobs",
            fp32,
            -1,
            "with return_cumulative_logprob, every response: the target's log probability of each of token_ids",
            TRTSPEC,
        ),
        Tensor(
            "drafted_per_step",
            int32,
            -1,
            "every response: drafted tokens of its verify steps; with TensorRT-LLM the planned draft length",
            TRTSPEC,
        ),
        Tensor(
            "accepted_per_step", int32, -1, "every response: accepted tokens of its verify steps", TRTSPEC
        ),
    )


INPUTS = _inputs()
OUTPUTS = _outputs()


def with_status(text: str, status: str) -> str:
    """The text of an error that ends a request. status: one of STATUSES."""
    return f"{text} ({status})"


def split_status(text: str) -> tuple[str, str | None]:
    """The inverse of `with_status`; None for an error that is not the model's own."""
    head, _, tail = text.rpartition(" (")
    return (head, tail[:-1]) if tail.endswith(")") and tail[:-1] in STATUSES else (text, None)


INPUT_BY_NAME = {tensor.name: tensor for tensor in INPUTS}
OUTPUT_BY_NAME = {tensor.name: tensor for tensor in OUTPUTS}


def render_config(model_name: str, instances: int, gpu_device_ids: str | None = None) -> str:
    """The text of `config.pbtxt`: every tensor of the table, decoupled, on CPU instances.

    gpu_device_ids: "0,1;2,3", the GPUs of each instance, for a model that hands them to processes of its own.

    Every input is optional to Triton because any one of text_input, messages and input_ids makes a prompt;
    the model itself refuses a request with none. The transaction policy is explicit, so the file is complete
    under `--disable-auto-complete-config`; model.yaml repeats it where TensorRT-LLM's tools look for it.
    """
    inputs = ",\n".join(
        f'  {{ name: "{t.name}" data_type: {t.data_type} dims: [ {t.dims} ] optional: true }}' for t in INPUTS
    )
    outputs = ",\n".join(
        f'  {{ name: "{t.name}" data_type: {t.data_type} dims: [ {t.dims} ] }}' for t in OUTPUTS
    )
    return (
        f'name: "{model_name}"\n'
        'backend: "python"\n'
        "max_batch_size: 0\n"
        "model_transaction_policy { decoupled: true }\n"
        f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
        f"{gpu_parameter(gpu_device_ids)}"
        f"input [\n{inputs}\n]\n"
        f"output [\n{outputs}\n]\n"
    )


def gpu_parameter(gpu_device_ids: str | None) -> str:
    """The line of `config.pbtxt` that gives each instance its GPUs; empty where there is nothing to say."""
    if gpu_device_ids is None:
        return ""
    return f'parameters {{ key: "gpu_device_ids" value {{ string_value: "{gpu_device_ids}" }} }}\n'
