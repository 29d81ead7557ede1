"""A dashboard as data: rows of panels, panels of queries."""

from __future__ import annotations

from dataclasses import dataclass

from .queries import total

POOL = 'pool=~"$pool"'
GATEWAY = 'gateway=~"$gateway"'
"""What the viewer chose."""


@dataclass(frozen=True)
class Query:
    """Attributes:
    expression: PromQL. legend: of its series, with {{label}} for labels.
    """

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Attributes:
    title, text: what it shows, and how to read it. unit: Grafana's name of it.
    stacked: whether its series add up. most: of the axis; None: as the data say.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """Attributes:
    title: of the row. panels: from left to right. engines: its metrics are those of vLLM engines alone.
    """

    title: str
    panels: tuple[Panel, ...]
    engines: bool = False


def per_replica(metric: str) -> tuple[Query, ...]:
    """A gauge of each replica of the chosen pools."""
    return (Query(total(metric, "pool, replica", POOL), "{{pool}} {{replica}}"),)
