"""PromQL for the kinds of question that panels ask."""

from __future__ import annotations

RATE = "$__rate_interval"
"""Grafana's: four scrapes at least."""


def rate(metric: str, by: str = "", matching: str = "") -> str:
    """Per second, summed over all processes but for the labels `by`."""
    return f"{_sum(by)}(rate({metric}{_braces(matching)}[{RATE}]))"


def increase(metric: str, by: str, matching: str = "") -> str:
    """How many in a minute."""
    return f"{_sum(by)}(increase({metric}{_braces(matching)}[1m]))"


def quantile(q: float, histogram: str, by: str = "", matching: str = "") -> str:
    """Of a histogram, over all processes but for the labels `by`."""
    labels = f"le, {by}" if by else "le"
    inner = f"sum by ({labels}) (rate({histogram}_bucket{_braces(matching)}[{RATE}]))"
    return f"histogram_quantile({q:g}, {inner})"


def total(gauge: str, by: str = "", matching: str = "") -> str:
    """A gauge, summed."""
    return f"{_sum(by)}({gauge}{_braces(matching)})"


def share(part: str, whole: str) -> str:
    """A quotient that is nothing rather than NaN while there is no traffic."""
    return f"{part} / ({whole} > 0)"


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"


def _braces(matching: str) -> str:
    return f"{{{matching}}}" if matching else ""
