"""Renders Grafana dashboards from their sources, configs/grafana/*.yaml.

A source has ``title``, ``uid``, ``description`` and ``rows`` of ``panels``. A panel has ``title``,
``description``, and ``lines``: legend to expression, where ``$which`` stands for the dashboard's
choice of model and server. Where they are not the default: ``show`` (``timeseries`` or ``stat``),
``unit`` (Grafana's name), ``stack``, ``max`` of the axis, and limits: from ``yellow`` and ``red``
on, or below ``red_below``, the panel has that colour.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import yaml

WHICH: Final = 'model_name=~"$model", instance=~"$instance"'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_HEIGHTS: Final = {"timeseries": 8, "stat": 4}
_MOST_BESIDE: Final = 4
_FROM: Final = "now-1h"


def render_dashboard(source: Path) -> str:
    """The JSON that Grafana imports.

    Args:
        source: one of configs/grafana/*.yaml.
    """
    said = yaml.safe_load(source.read_text())
    dashboard = {
        "uid": said["uid"],
        "title": said["title"],
        "description": said["description"],
        "tags": ["meridian", "vllm"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": _FROM, "to": "now"},
        "links": [
            {
                "title": "Meridian",
                "type": "dashboards",
                "tags": ["meridian"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "",
                "tooltip": "",
            }
        ],
        "templating": {"list": _variables()},
        "panels": list(_panels(said["rows"])),
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    chosen = [
        {
            "type": "query",
            "name": name,
            "label": label,
            "datasource": _SOURCE,
            "query": {"query": f"label_values({metric}, {of})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": "All", "value": "$__all"},
        }
        for name, label, metric, of in (
            ("model", "model", "vllm:num_requests_running", "model_name"),
            ("instance", "server", 'vllm:num_requests_running{model_name=~"$model"}', "instance"),
        )
    ]
    datasource = {
        "type": "datasource",
        "name": "datasource",
        "label": "data source",
        "query": "prometheus",
    }
    return [datasource, *chosen]


def _panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, up to four panels of a row beside each other."""
    ids, y = count(1), 0
    for row in rows:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        yield {
            "id": next(ids),
            "type": "row",
            "title": row["title"],
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        panels = row["panels"]
        height = max(_HEIGHTS[panel.get("show", "timeseries")] for panel in panels)
        # Four numbers fit beside each other; four curves would be too small to read.
        beside = 2 if len(panels) == _MOST_BESIDE and height > _HEIGHTS["stat"] else len(panels)
        width = _COLUMNS // beside
        for start in range(0, len(panels), beside):
            for column, panel in enumerate(panels[start : start + beside]):
                place = {"h": height, "w": width, "x": column * width, "y": y}
                yield {"id": next(ids), "gridPos": place, **_panel(panel)}
            y += height


def _panel(said: dict[str, Any]) -> dict[str, Any]:
    kind = said.get("show", "timeseries")
    defaults = {
        "unit": said.get("unit", "none"),
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": _limits(said)},
        "color": {"mode": "thresholds" if kind == "stat" else "palette-classic"},
    }
    if "max" in said:
        defaults["max"] = said["max"]
    if kind == "stat":
        options: dict[str, Any] = {
            "colorMode": "background",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value_and_name" if "{{" in "".join(said["lines"]) else "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        is_stacked = said.get("stack", False)
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if is_stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if len(_limits(said)) > 1 else "off"},
        }
        options = {
            "legend": {
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": True,
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": expression.replace("$which", WHICH),
            "legendFormat": legend,
        }
        for index, (legend, expression) in enumerate(said["lines"].items())
    ]
    return {
        "type": kind,
        "title": said["title"],
        "description": said["description"],
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _limits(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Grafana's thresholds; the first one has no value."""
    if "red_below" in said:
        return [{"color": "red", "value": None}, {"color": "green", "value": said["red_below"]}]
    colours = [name for name in ("yellow", "red") if name in said]
    steps = [{"color": name, "value": said[name]} for name in colours]
    return [{"color": "green", "value": None}, *steps]
