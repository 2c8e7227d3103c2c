"""From the JSON of /v1/chat/completions and /v1/completions to what the served model takes.

Every field is honoured or refused. A field that this server cannot honour is accepted only with the value that
asks for nothing (`NEUTRAL`), because clients send their defaults. Beyond OpenAI's own, `top_k`,
`repetition_penalty` and `ignore_eos` are understood, as vLLM names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from trtspec.serve.openai.errors import ApiError
from trtspec.values import SamplingParams

MAX_CHOICES = 128
_INT32 = 2**31 - 1
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has none
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields of OpenAI's API (and common extensions) that ask for nothing with these values, and are refused with others.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says how tools are called, and there are none
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
}
# Who asks, for the operator of a public API; nothing that an answer could depend on.
_LABELS = ("user", "safety_identifier", "prompt_cache_key")
_COMMON = (
    *("model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "logprobs", "top_k", "repetition_penalty", "ignore_eos"),
)
_CHAT_FIELDS = (*_COMMON, "messages", "max_completion_tokens")
_COMPLETION_FIELDS = (*_COMMON, "prompt")


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked API request.

    prompts: each is the Triton inputs that make a prompt. samplings: of the choices of every prompt, in order.
    """

    model: str
    prompts: tuple[Mapping[str, Any], ...]
    samplings: tuple[SamplingParams, ...]
    stream: bool
    include_usage: bool

    @property
    def logprobs(self) -> bool:
        return self.samplings[0].logprobs


# A model's name → the temperature of a request that names none.
DefaultTemperature = Callable[[str], float]


def openais_temperature(_model: str) -> float:
    """OpenAI's default, whatever the model."""
    return 1.0


def parse_chat(body: bytes, default_temperature: DefaultTemperature = openais_temperature) -> Ask:
    """A /v1/chat/completions request. Raises ApiError naming the field and what it may be."""
    fields = _Fields(body, _CHAT_FIELDS)
    messages = _messages(fields.content.get("messages"))
    limit = fields.integer("max_tokens", 1, _INT32)
    newer = fields.integer("max_completion_tokens", 1, _INT32)
    if limit is not None and newer is not None and limit != newer:
        _refuse("max_tokens", f"and max_completion_tokens contradict each other ({limit} and {newer})")
    prompt = {"messages": json.dumps(messages)}
    return _ask(
        fields,
        (prompt,),
        max_tokens=newer if limit is None else limit,
        logprobs=fields.flag("logprobs"),
        default_temperature=default_temperature,
    )


def parse_completion(body: bytes, default_temperature: DefaultTemperature = openais_temperature) -> Ask:
    """A /v1/completions request. Raises ApiError naming the field and what it may be."""
    fields = _Fields(body, _COMPLETION_FIELDS)
    prompts = _prompts(fields.content.get("prompt"))
    logprobs = fields.integer("logprobs", 0, _INT32)
    if logprobs:
        _refuse("logprobs", "must be 0 (the chosen tokens): alternatives are not available")
    limit = fields.integer("max_tokens", 1, _INT32) or COMPLETION_TOKENS
    return _ask(
        fields,
        prompts,
        max_tokens=limit,
        logprobs=logprobs is not None,
        default_temperature=default_temperature,
    )


def _ask(
    fields: _Fields,
    prompts: tuple[Mapping[str, Any], ...],
    *,
    max_tokens: int | None,
    logprobs: bool,
    default_temperature: DefaultTemperature,
) -> Ask:
    model = fields.content.get("model")
    if not isinstance(model, str):
        _refuse("model", "is required: the name of a served model, see /v1/models")
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    if n * len(prompts) > MAX_CHOICES:
        _refuse("n", f"times the number of prompts may be at most {MAX_CHOICES}")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", default_temperature(model), 0, 2),
        top_k=_top_k(fields),
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        seed=fields.integer("seed", -(2**63), 2**64 - 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 100, above=True),
        stop=_stop(fields.content.get("stop")),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
    )
    stream = fields.flag("stream")
    return Ask(
        model=model,
        prompts=prompts,
        samplings=tuple(_of_choice(sampling, index) for index in range(n)),
        stream=stream,
        include_usage=_include_usage(fields.content.get("stream_options"), stream),
    )


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choices of one seeded request differ from each other and repeat: each has the next seed."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**64)


def _top_k(fields: _Fields) -> int:
    top_k = fields.integer("top_k", -1, _INT32)
    return 0 if top_k in (None, -1) else top_k  # vLLM's older way of switching it off


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        _refuse("stream_options", "is only allowed with stream: true")
    if not isinstance(options, dict):
        _refuse("stream_options", "must be an object")
    for name, value in options.items():
        if name != "include_usage" and value not in (False, None):
            _refuse(f"stream_options.{name}", "is not supported")
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        _refuse("stream_options.include_usage", "must be true or false")
    return bool(include)


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        _refuse("stop", "must be a string or a list of strings, none of them empty")
    return tuple(stops)


def _prompts(prompt: Any) -> tuple[Mapping[str, Any], ...]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = prompt
    else:
        prompts = [prompt]
    found: list[Mapping[str, Any]] = []
    for one in prompts:
        if isinstance(one, str):
            found.append({"text_input": one})
        elif isinstance(one, list) and one and all(type(id) is int and 0 <= id < 2**31 for id in one):
            found.append({"input_ids": tuple(one)})
        else:
            _refuse("prompt", "must be a text, a list of token ids, or a list of texts or of token ids")
    return tuple(found)


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        _refuse("messages", "must be a list of {role, content} objects, with at least one")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        _refuse(where, "must be an object with role and content")
    # Clients send an earlier answer back as they got it, with fields that are empty.
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], {}):
            _refuse(f"{where}.{name}", "is not supported")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A text, or a list of text parts, which are put on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _refuse(where, "must be a text or a list of text parts")
    parts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            _refuse(f"{where}[{index}]", 'must be {"type": "text", "text": …}: this model takes text only')
        parts.append(text)
    return "\n".join(parts)


class _Fields:
    """The JSON object of a request. Raises ApiError for anything that is not one, or has unknown fields."""

    def __init__(self, body: bytes, known: tuple[str, ...]) -> None:
        try:
            text = body.decode("utf-8")
            content = json.loads(text, parse_constant=_not_json)
            json.dumps(content, ensure_ascii=False).encode("utf-8")  # lone surrogates are no text
        except (ValueError, RecursionError) as error:  # of which JSON's and Unicode's errors are kinds
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(content, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        self.content: dict[str, Any] = content
        for name, value in content.items():
            self._check_known(name, value, known)

    def _check_known(self, name: str, value: Any, known: tuple[str, ...]) -> None:
        if name in known or value is None:
            return
        if name in _LABELS:
            if not isinstance(value, str):
                _refuse(name, "must be a string")
        elif name not in NEUTRAL:
            nearest = get_close_matches(name, known, n=1)
            _refuse(name, "is unknown" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
        elif not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            allowed = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            _refuse(name, "is not supported" + (f" (only {allowed})" if allowed else ""))

    def flag(self, name: str) -> bool:
        return bool(self._checked(name, lambda value: isinstance(value, bool), "true or false"))

    def integer(self, name: str, low: int, high: int) -> int | None:
        words = f"a whole number from {low} to {high}"
        return self._checked(name, lambda value: type(value) is int and low <= value <= high, words)

    def number(self, name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        def fits(value: Any) -> bool:
            inside = type(value) in (int, float) and low <= value <= high
            return inside and (value > low or not above)

        value = self._checked(name, fits, f"a number {'above' if above else 'from'} {low} to {high}")
        return default if value is None else float(value)

    def _checked(self, name: str, fits: Callable[[Any], bool], words: str) -> Any:
        value = self.content.get(name)
        if value is not None and not fits(value):
            _refuse(name, f"must be {words}")
        return value


def _refuse(param: str, problem: str) -> NoReturn:
    raise ApiError(400, f"{param} {problem}", param=param, code="unsupported_or_invalid")


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON has it: there, 1 is not true."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
