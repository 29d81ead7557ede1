"""From panels to the JSON of Grafana's dashboard model.

python -m vllm_deepinfer.cluster.dashboard.build   # writes deepinfer.json anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .model import Panel, Row
from .rows import ROWS

FILE = Path(__file__).with_name("deepinfer.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39  # Grafana 10.4 and later read it; older versions are migrated by Grafana itself
COLUMNS, WIDTH, HEIGHT = 24, 6, 7


def dashboard() -> dict[str, Any]:
    """The whole model, as `Import dashboard` takes it."""
    return {
        "title": "vLLM-DeepInfer",
        "uid": "vllm-deepinfer",
        "description": "Gateways, prefill and decode pools, and engines of one application.",
        "tags": ["vllm", "deepinfer"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    chosen = {"selected": True, "text": ["All"], "value": ["$__all"]}
    values = [
        ("pool", "label_values(deepinfer_pool_replicas, pool)"),
        ("gateway", "label_values(deepinfer_gateway_active_requests, gateway)"),
    ]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return [
        source,
        *(
            {
                "name": name,
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": chosen,
                "refresh": 2,
                "sort": 1,
            }
            for name, query in values
        ),
    ]


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        found.append(_row(row, y, len(found) + 1))
        y += 1
        for position, panel in enumerate(row.panels):
            x = position * WIDTH % COLUMNS
            place = {"x": x, "y": y + position * WIDTH // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            found.append(_panel(panel, place, len(found) + 1))
        y += -(-len(row.panels) * WIDTH // COLUMNS) * HEIGHT
    return found


def _row(row: Row, y: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {
        "type": "row",
        "id": number,
        "title": row.title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    drawn: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 20 if panel.stacked else 5}
    drawn["stacking"] = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": drawn}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for position, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
