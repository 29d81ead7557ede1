"""The series of a metrics endpoint, by name."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def series_of(text: str) -> dict[str, list[set[str]]]:
    """Sample name → the label names of its series; a family without series counts under all its names."""
    found: dict[str, list[set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            if not family.samples:
                found.setdefault(family.name + suffix, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(set(sample.labels))
    return found
