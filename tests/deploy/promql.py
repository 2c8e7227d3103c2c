"""As much of PromQL as it takes to find the metrics and labels of an expression."""

from __future__ import annotations

import re

_KEYWORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"}
_KEYWORDS |= {"and", "or", "unless", "inf", "nan"}
_AGGREGATIONS = {"sum", "avg", "min", "max", "count", "topk"}
_FUNCTIONS = {"rate", "increase", "deriv", "avg_over_time", "histogram_quantile", "label_values"}
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])
      | (?P<duration>\d+[smhd]\b)
      | (?P<number>\d+(?:\.\d+)?)
      | (?P<string>"[^"]*")
      | (?P<operator>=~|!~|!=|==|>=|<=|[-+*/<>=,(){}])
    )""",
    re.VERBOSE,
)


def read(expression: str) -> tuple[set[str], set[str]]:
    """(metric names, label names) of an expression. Raises ValueError where it is no PromQL, or not of this kind."""
    tokens, at, text = [], 0, expression.strip()
    while at < len(text):
        if (found := _TOKEN.match(text, at)) is None:
            raise ValueError(f"cannot read {text[at:]!r}")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        at = found.end()
    metrics, labels, open_brackets = set(), set(), []
    for index, (kind, token) in enumerate(tokens):
        before = tokens[index - 1][1] if index else ""
        after = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        if token in ("(", "{"):
            open_brackets.append("by" if before in ("by", "without", "on", "ignoring") else token)
        elif token in (")", "}"):
            if not open_brackets or (open_brackets.pop() == "{") != (token == "}"):
                raise ValueError(f"{token} closes nothing in {expression!r}")
        elif kind == "name" and token not in _KEYWORDS:
            if open_brackets and open_brackets[-1] in ("by", "{"):
                labels.add(token)
            elif token in _AGGREGATIONS | _FUNCTIONS:
                if after not in ("(", "by", "without"):
                    raise ValueError(f"{token} is a function and is not called in {expression!r}")
            elif after == "(":
                raise ValueError(f"{token} is no known function in {expression!r}")
            else:
                metrics.add(token)
    if open_brackets:
        raise ValueError(f"a bracket stays open in {expression!r}")
    return metrics, labels
