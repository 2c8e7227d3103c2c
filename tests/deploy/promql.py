"""The metrics and labels of a PromQL expression, by a parser of Prometheus' own grammar and types."""

from __future__ import annotations

import promql_parser as promql


def read(expression: str) -> tuple[set[str], set[str]]:
    """(metric names, label names that select, group or match). Raises ValueError where it is no PromQL."""
    metrics: set[str] = set()
    labels: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            metrics.add(node.name)
            labels.update(matcher.name for matcher in node.matchers.matchers)
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching:
            labels.update(node.modifier.matching.labels)

    # Grafana puts a duration there.
    promql.walk(promql.parse(expression.replace("$__rate_interval", "5m")), visit)
    return metrics, labels
