"""Chat templates as transformers renders them: the same sandbox, extensions, filters and globals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template


class ChatTemplates:
    """A model's chat templates by name; most have one, "default"."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)

    @classmethod
    def of_folder(cls, folder: Path, configured: str | Sequence[Mapping[str, str]] | None) -> ChatTemplates:
        """chat_template.jinja and additional_chat_templates/, else tokenizer_config.json's `chat_template`:
        one template, or a list of named ones."""
        sources: dict[str, str] = {}
        if (file := folder / "chat_template.jinja").is_file():
            sources["default"] = file.read_text(encoding="utf-8")
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[file.stem] = file.read_text(encoding="utf-8")
        if not sources and isinstance(configured, str):
            sources["default"] = configured
        elif not sources and configured is not None:
            sources = {entry["name"]: entry["template"] for entry in configured}
        return cls(sources)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as text. Raises ValueError where there is no template or it refuses."""
        from jinja2 import TemplateError

        tools = variables.setdefault("tools", None)
        variables.setdefault("documents", None)
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = f" (it has {', '.join(self.sources)})" if self.sources else ""
            raise ValueError(
                f"this model has no default chat template{known}: send text or token ids instead"
            )
        try:
            return _compiled(self.sources[name]).render(messages=messages, **variables)
        except (
            TemplateError,
            TypeError,
        ) as cause:  # TypeError: a message whose content is not what it expects
            raise ValueError(f"the chat template refuses these messages: {cause}") from cause


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from datetime import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's tokens for training; rendering passes it through."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes for HTML
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
