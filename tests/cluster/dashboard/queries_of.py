"""What a query names, by Prometheus' own grammar."""

from __future__ import annotations

from typing import Any

import promql_parser as promql

from vllm_deepinfer.cluster.dashboard.model import Query
from vllm_deepinfer.cluster.dashboard.rows import ROWS


def queries(*, engines: bool) -> list[Query]:
    """Of the rows for vLLM engines, or of the others."""
    return [
        query for row in ROWS if row.engines == engines for panel in row.panels for query in panel.queries
    ]


def plain(query: Query) -> str:
    """As Grafana sends it when everything is chosen."""
    return (
        query.expression.replace("$__rate_interval", "20s").replace("$pool", ".*").replace("$gateway", ".*")
    )


def selectors(query: Query) -> list[tuple[str, set[str]]]:
    """Metric name and the labels that it is matched by, for each selector."""
    found: list[tuple[str, set[str]]] = []
    _walk(promql.parse(plain(query)), found)
    return found


def grouped(query: Query) -> set[str]:
    """Labels that series are summed by, less `le`."""
    names: set[str] = set()
    _groups(promql.parse(plain(query)), names)
    return names - {"le"}


def _children(node: Any) -> list[Any]:
    kinds = ("expr", "lhs", "rhs", "param", "vector_selector")
    found = [getattr(node, kind) for kind in kinds if getattr(node, kind, None) is not None]
    return [*found, *(getattr(node, "args", None) or [])]


def _walk(node: Any, found: list[tuple[str, set[str]]]) -> None:
    if isinstance(node, promql.VectorSelector):
        matchers = {matcher.name for matcher in node.matchers.matchers}
        found.append((str(node.name), matchers - {"__name__"}))
    for child in _children(node):
        _walk(child, found)


def _groups(node: Any, names: set[str]) -> None:
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        names.update(node.modifier.labels)
    for child in _children(node):
        _groups(child, names)
