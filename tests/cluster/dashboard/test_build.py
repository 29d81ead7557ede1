"""The dashboard's file: what the panels say, readable for Grafana, every query in Prometheus' grammar."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import promql_parser as promql
import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.cluster.dashboard.queries_of import grouped, plain, queries, selectors
from vllm_deepinfer.cluster.dashboard.build import COLUMNS, FILE, dashboard, text
from vllm_deepinfer.cluster.dashboard.model import Query
from vllm_deepinfer.cluster.dashboard.rows import ROWS

MODEL = dashboard()
PANELS: list[dict[str, Any]] = MODEL["panels"]
ALL = queries(engines=False) + queries(engines=True)


def test_the_file_is_what_the_panels_say() -> None:
    """Else: python -m vllm_deepinfer.cluster.dashboard.build"""
    assert FILE.read_text(encoding="utf-8") == text()


def test_grafana_s_own_model_reads_it_and_loses_nothing() -> None:
    read: Any = Dashboard.from_json(json.loads(text()))
    assert (read.title, read.uid, read.refresh) == ("vLLM-DeepInfer", "vllm-deepinfer", "10s")
    assert [panel.title for panel in read.panels] == [panel["title"] for panel in PANELS]
    for panel, written in zip(read.panels, PANELS, strict=True):
        if written["type"] == "row":
            continue
        assert panel.type_val == "timeseries"
        assert panel.field_config.defaults.unit == written["fieldConfig"]["defaults"]["unit"]
        assert len(panel.targets) == len(written["targets"])
    assert [variable.name for variable in read.templating.list_val] == ["datasource", "pool", "gateway"]


def test_every_panel_is_there_once_with_a_title_and_a_text() -> None:
    shown = [panel for panel in PANELS if panel["type"] != "row"]
    assert [panel["title"] for panel in shown] == [panel.title for row in ROWS for panel in row.panels]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in shown}) == len(shown)
    assert all(panel["description"].endswith(".") and panel["targets"] for panel in shown)


def test_panels_fill_the_grid_without_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS
        across = range(place["x"], place["x"] + place["w"])
        own = {(x, y) for x in across for y in range(place["y"], place["y"] + place["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    tops = [panel["gridPos"]["y"] for panel in PANELS]
    assert all(above <= below for above, below in pairwise(tops))
    assert {y for _, y in cells} == set(range(max(tops) + PANELS[-1]["gridPos"]["h"]))


@pytest.mark.parametrize("query", ALL, ids=lambda query: query.legend)
def test_every_query_is_promql_over_our_metrics(query: Query) -> None:
    promql.parse(plain(query))
    found = selectors(query)
    assert found
    assert all(name.startswith(("deepinfer_", "vllm:")) for name, _ in found)


@pytest.mark.parametrize("query", ALL, ids=lambda query: query.legend)
def test_legends_name_labels_that_the_series_have(query: Query) -> None:
    wanted = {part.split("}}")[0] for part in query.legend.split("{{")[1:]}
    assert wanted == grouped(query)


def test_what_the_viewer_chooses_narrows_every_panel() -> None:
    for query in ALL:
        if "scrape_failures" not in query.expression:
            assert '=~"$pool"' in query.expression or '=~"$gateway"' in query.expression, query.expression


def test_counters_are_looked_at_by_their_rate() -> None:
    for query in ALL:
        for name, _ in selectors(query):
            if name.endswith(("_total", "_bucket")) and "fallbacks" not in name:
                assert f"rate({name}" in query.expression or f"increase({name}" in query.expression
