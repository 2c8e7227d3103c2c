"""A fault that pydantic found, in the reader's words: what is wrong, and what to write instead."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

from trtspec.config.fields import all_fields, choices_at, field_at, keys_at, method_of
from trtspec.config.reading import SCALAR_PATTERNS, Node, quoted
from trtspec.config.rules import Path
from trtspec.config.schema import Config
from trtspec.config.speculation import SPECULATION_MODELS
from trtspec.config.tree import dotted, say

# What other tools call our fields.
_OTHER_NAMES = {
    "tp": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "pp_size": "pipeline_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "ep_size": "expert_parallel",
    "moe_expert_parallel_size": "expert_parallel",
    "enable_attention_dp": "attention_dp",
    "num_speculative_tokens": "draft_length",
    "speculative_num_steps": "draft_length",
    "max_draft_len": "draft_length",
    "num_nextn_predict_layers": "draft_length",
    "decoding_type": "method",
    "speculative_model": "draft",
    "speculative_model_dir": "draft",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "max_matching_ngram_size": "max_ngram",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "kv_cache_dtype": "kv_cache",
    "qformat": "quantization",
}
_BOOLEAN_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_NUMBER = SCALAR_PATTERNS["float"]  # a number that arrives as text was quoted
_WHAT = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}


def explain(
    root: Node, path: Path, node: Node | None, fault: dict[str, Any], top: type[BaseModel]
) -> tuple[str, str | None]:
    """Message and hint for one pydantic error at `path`; `node` is what is written there, if anything.

    top: the model the whole file was held against.
    """
    name, kind, context = dotted(path), fault["type"], fault.get("ctx", {})
    about = _description(path, top)
    if kind == "extra_forbidden":
        return _unknown_key(root, path, top)
    if kind == "missing" or node is None:
        return f"{name} is missing", f"add `{path[-1]}:`" + (f" ({about.rstrip('.')})" if about else "")
    if kind in ("literal_error", "quantization", "union_tag_invalid"):
        return _not_a_choice(name, path, node)
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        return f"{name} must be {words} {_number(context[key])}, this is {say(node)}", about
    if kind == "finite_number":
        return f"{name} must be a finite number, this is {node.text}", about
    if kind == "too_short":
        return f"{name} must hold at least {context['min_length']} item(s)", about
    if kind == "too_long":
        return f"{name} must hold at most {context['max_length']} items, this holds {len(node.value)}", None
    if kind == "string_too_short":
        return f"{name} is empty", about
    if kind == "string_too_long":
        return f"{name} is longer than {context['max_length']} characters", None
    if kind == "string_pattern_mismatch":
        return (
            f"{name} has characters it may not have: {say(node)} does not match {context['pattern']}",
            about,
        )
    if kind in _WHAT:
        return f"{name} must be {_WHAT[kind]}, this is {say(node)}", _type_hint(kind, path, node) or about
    if kind == "reference":
        return f"{name}: {quoted(str(node.value))} {fault['msg']}", about
    return f"{name} {fault['msg']}, this is {say(node)}", about


def _unknown_key(root: Node, path: Path, top: type[BaseModel]) -> tuple[str, str | None]:
    key, inside = str(path[-1]), path[:-1]
    message = f"unknown key {quoted(key)} {f'in {dotted(inside)}' if inside else 'at the top level'}"
    if key == "extends":
        return message, "extends stands at the top level of a file"
    method = None
    if inside[:1] == ("speculation",):
        written = (root.mapping or {}).get("speculation")
        method_node = (written.mapping or {}).get("method") if written else None
        method = str(method_node.value) if method_node else None
        if inside == ("speculation",) and key in keys_at(inside):
            having = [method_of(model) for model in SPECULATION_MODELS if key in model.model_fields]
            return f"method {method} has no {key}", f"these have it: {', '.join(having)}"
    known = keys_at(inside, method, top=top)
    near = _nearest(key, known)
    if near:
        return message, f"did you mean {near}?"
    renamed = _OTHER_NAMES.get(key.lower().replace("-", "_"))
    if renamed in known:
        return message, f"it is called {renamed} here"
    fields = all_fields() if top is Config else ()
    homes = [f.path for f in fields if f.path.rpartition(".")[2] in (key, renamed)]
    if homes:
        return message, f"did you mean {' or '.join(homes[:3])}?"
    return message, f"known keys: {', '.join(known)}" if known else None


def _not_a_choice(name: str, path: Path, node: Node) -> tuple[str, str | None]:
    choices = choices_at(path)
    near = _nearest(node.value, choices, cutoff=0.6) if isinstance(node.value, str) else None
    listed = ", ".join(choices)
    if near:
        return f"{name} has no value {quoted(str(node.value))}", f"did you mean {near}? (known: {listed})"
    return f"{name} must be one of the named values, this is {say(node)}", f"write one of: {listed}"


def _type_hint(kind: str, path: Path, node: Node) -> str | None:
    value = node.value
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _BOOLEAN_WORDS:
        return f"write {_BOOLEAN_WORDS[value.lower()]}; in YAML 1.2 `{value}` is text"
    if kind == "string_type" and isinstance(value, int | float):
        return (
            f'quote it: {path[-1]}: "{node.text}"'
            if isinstance(path[-1], str)
            else f'quote it: "{node.text}"'
        )
    if kind in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return "remove the quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "tuple_type" and value is not None and not isinstance(value, dict):
        return f"write a list: [{node.text}]"
    if kind in ("model_type", "model_attributes_type", "dict_type") and value is None:
        return "delete the line, or indent its fields beneath it"
    return None


def _description(path: Path, top: type[BaseModel]) -> str | None:
    info = field_at(path, top=top)
    return info.description if info else None


def _nearest(word: str, known: tuple[str, ...], cutoff: float = 0.7) -> str | None:
    plain = word.lower().replace("-", "_").replace(" ", "_")
    spelled = {choice.lower().replace("-", "_"): choice for choice in known}
    near = difflib.get_close_matches(plain[:100], list(spelled), n=1, cutoff=cutoff)
    return spelled[near[0]] if near else None


def _number(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
