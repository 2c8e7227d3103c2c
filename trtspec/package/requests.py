"""From the tensors of one Triton request to what the runtime takes; every value is checked here.

Triton itself checks little: a missing input arrives as None, an unknown JSON key becomes a request parameter
nobody reads, and an INT32 that does not fit wraps around. Each of those is an error of that request alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from trtspec.package.contract import INPUT_BY_NAME, INPUTS
from trtspec.values import SamplingParams

Inputs = Mapping[str, npt.NDArray]  # by tensor name; absent inputs are absent


class BadRequest(ValueError):
    """This request cannot be served; the text goes to the client as INVALID_ARG (HTTP 400)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take: prompt plus generated tokens, and token ids below `vocab_size`."""

    max_seq_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One checked request. Exactly one of text, messages and input_ids is set.

    echo_prompt: the prompt's text comes first in the output. accumulate: None means the server's default.
    """

    sampling: SamplingParams
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    input_ids: tuple[int, ...] | None = None
    streaming: bool = False
    accumulate: bool | None = None
    echo_prompt: bool = False
    perf_metrics: bool = False
    finish_reason: bool = False
    stop_reason: bool = False


def check_parameters(parameters: str) -> str:
    """The request's id where it is given as a parameter ("" where not); every other parameter is refused.

    `/generate` makes a parameter of every JSON key that is not an input, a misspelt one too; it is also the
    only way for its clients to name a request. parameters: the JSON object Triton hands to the model; names
    that begin with `triton_` are the server's own.
    """
    given = {
        name: value
        for name, value in json.loads(parameters or "{}").items()
        if not name.startswith("triton_")
    }
    identity = given.pop("id", "")
    if not isinstance(identity, str):
        raise BadRequest(f"id must be a string, got {identity!r}")
    advice = []
    for name in given:
        nearest = _nearest_input(name)
        advice.append(f"{name!r}" + (f" (did you mean {nearest!r}?)" if nearest else ""))
    if advice:
        raise BadRequest(f"unknown request parameter {', '.join(advice)}")
    return identity


def is_stop(inputs: Inputs) -> bool:
    """Whether the request is the `stop` of another request: it ends the running one with the same id."""
    return bool(_scalar(inputs, "stop") or False)


def parse_request(inputs: Inputs, limits: Limits) -> ModelRequest:
    """Check every input of a generation request. Raises BadRequest naming the input and what it may be."""
    refused = [name for name in inputs if name.startswith("lora_")]
    if refused:
        raise BadRequest(f"{refused[0]} is not supported: this server has no LoRA adapters")
    if (best_of := _scalar(inputs, "sampling_param_best_of")) not in (None, 1):
        raise BadRequest(f"sampling_param_best_of must be 1 (one sequence per request), got {best_of}")
    return ModelRequest(
        sampling=_sampling(inputs, limits),
        **_prompt(inputs, limits),
        streaming=_flag(inputs, "streaming"),
        accumulate=_scalar(inputs, "accumulate_text"),
        echo_prompt=not _flag(inputs, "sampling_param_exclude_input_from_output", default=True),
        perf_metrics=_flag(inputs, "sampling_param_return_perf_metrics"),
        finish_reason=_flag(inputs, "return_finish_reason"),
        stop_reason=_flag(inputs, "return_stop_reason"),
    )


def check_prompt_length(prompt_tokens: int, limits: Limits) -> None:
    """A prompt needs at least one token and room for one more within the context."""
    if prompt_tokens == 0:
        raise BadRequest("the prompt is empty: it has no tokens")
    if prompt_tokens >= limits.max_seq_len:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens; prompt and generated tokens together "
            f"may be at most {limits.max_seq_len}"
        )


def _sampling(inputs: Inputs, limits: Limits) -> SamplingParams:
    def number(name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        value = _scalar(inputs, f"sampling_param_{name}")
        if value is None:
            return default
        # NaN fails every comparison, infinities the upper or lower bound.
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            bounds = f"{'(' if above else '['}{low:g}, {f'{high:g}]' if math.isfinite(high) else 'inf)'}"
            raise BadRequest(f"sampling_param_{name} must be a number in {bounds}, got {value}")
        return value

    def count(name: str, low: int, high: int, meaning: str) -> int | None:
        value = _scalar(inputs, f"sampling_param_{name}")
        if value is not None and not low <= value <= high:
            raise BadRequest(f"sampling_param_{name} must be in {low}..{high} ({meaning}), got {value}")
        return value

    return SamplingParams(
        max_tokens=count("max_tokens", 1, limits.max_seq_len, "the context length"),
        temperature=number("temperature", 0.0, 0.0, math.inf),
        top_k=count("top_k", 0, limits.vocab_size, "the vocabulary; 0 is off") or 0,
        top_p=number("top_p", 1.0, 0.0, 1.0, above=True),
        seed=_scalar(inputs, "sampling_param_seed"),
        presence_penalty=number("presence_penalty", 0.0, -math.inf, math.inf),
        frequency_penalty=number("frequency_penalty", 0.0, -math.inf, math.inf),
        repetition_penalty=number("repetition_penalty", 1.0, 0.0, math.inf, above=True),
        stop=_stop_strings(inputs),
        ignore_eos=_flag(inputs, "sampling_param_ignore_eos"),
        logprobs=_flag(inputs, "return_cumulative_logprob"),
    )


def _stop_strings(inputs: Inputs) -> tuple[str, ...]:
    if "sampling_param_stop" not in inputs:
        return ()
    stops = tuple(_text(item, "sampling_param_stop") for item in inputs["sampling_param_stop"].ravel())
    if "" in stops:
        raise BadRequest("sampling_param_stop must not hold an empty string")
    return stops


def _prompt(inputs: Inputs, limits: Limits) -> dict[str, object]:
    given = [name for name in ("text_input", "messages", "input_ids") if name in inputs]
    if not given:
        raise BadRequest("text_input is missing (messages or input_ids may take its place)")
    if len(given) > 1:
        raise BadRequest(f"give one prompt: {' and '.join(given)} are both set")
    if given == ["messages"]:
        return {"messages": _messages(_scalar(inputs, "messages"))}
    values = inputs[given[0]].ravel()
    if given == ["text_input"]:
        if values.size != 1:
            raise BadRequest(
                f"text_input takes one prompt per request, got {values.size}; send them in parallel"
            )
        return {"text": _text(values[0], "text_input")}
    ids = tuple(int(token) for token in values)
    if wrong := [token for token in ids if not 0 <= token < limits.vocab_size]:
        raise BadRequest(f"input_ids must be in 0..{limits.vocab_size - 1}, got {wrong[0]}")
    return {"input_ids": ids}


def _messages(text: str) -> tuple[Mapping[str, str], ...]:
    try:
        messages = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"messages is not JSON: {error}") from error
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a JSON list of {role, content} objects, with at least one")
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise BadRequest(f"messages[{index}] must be an object with the strings role and content")
    return tuple(messages)


def _flag(inputs: Inputs, name: str, *, default: bool = False) -> bool:
    value = _scalar(inputs, name)
    return default if value is None else bool(value)


def _scalar(inputs: Inputs, name: str):
    """The one element of an input as a Python value, or None when the input is absent."""
    if name not in inputs:
        return None
    values = inputs[name]
    if values.size != 1:
        raise BadRequest(f"{name} takes exactly one value, got {values.size}")
    value = values.item()
    return _text(value, name) if INPUT_BY_NAME[name].data_type == "TYPE_STRING" else value


def _text(value: object, name: str) -> str:
    if isinstance(value, bytes | np.bytes_):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from error
    return str(value)


def _nearest_input(name: str) -> str | None:
    """The input that a misspelt or half-remembered name most likely means: `max_tokns`, `temprature`."""
    by_tail = {tensor.name.removeprefix("sampling_param_"): tensor.name for tensor in INPUTS}
    candidates = {**by_tail, **{tensor.name: tensor.name for tensor in INPUTS}}
    match = get_close_matches(name, candidates, n=1, cutoff=0.6)
    return candidates[match[0]] if match else None
