"""The field reference in build_configs/README.md, derived from the schema.

python tests/config/field_table.py    rewrites the table in the README
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from trtspec.config.export import to_yaml
from trtspec.config.fields import FieldFacts, all_fields, choices_at
from trtspec.config.speculation import METHODS

README = Path(__file__).resolve().parents[2] / "build_configs" / "README.md"
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"


def default_of(facts: FieldFacts) -> str:
    """The default as YAML, "required" where there is none."""
    if facts.info.is_required():
        return "**required**"
    text = to_yaml({"x": facts.info.get_default(call_default_factory=True)}).strip()
    return f"`{text.removeprefix('x: ')}`"


def row(facts: FieldFacts) -> str:
    """One line of the table."""
    meaning = facts.info.description or ""
    path = tuple(facts.path.replace("[]", "").split("."))
    choices = METHODS if path[-1] == "method" else choices_at(path)
    if len(choices) > 1:
        meaning += f" One of: {', '.join(f'`{choice}`' for choice in choices)}."
    drafting = tuple(method for method in METHODS if method != "none")
    if facts.methods and facts.methods not in (METHODS, drafting):
        meaning += f" Only for: {', '.join(f'`{method}`' for method in facts.methods)}."
    return f"| `{facts.path}` | {default_of(facts)} | {meaning} |"


def table() -> str:
    """The whole reference: a table for each section."""
    parts = []
    for section, fields in groupby(all_fields(), lambda facts: facts.path.split(".")[0]):
        rows = "\n".join(row(facts) for facts in fields)
        parts.append(f"### {section}\n\n| field | default | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def rewritten(readme: str) -> str:
    """`readme` with its table brought up to date."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
