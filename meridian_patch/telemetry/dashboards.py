"""Renders Grafana dashboards from their sources, configs/grafana/*.yaml.

A source has ``title``, ``uid``, ``description`` and ``rows`` of ``panels``. A panel has ``title``,
``description``, and ``lines``: legend to expression, where ``$which`` stands for the dashboard's
choice of model and server. Where they are not the default: ``show`` (``timeseries`` or ``stat``),
``unit`` (Grafana's name, or what is counted), ``columns`` of the page's 24, ``stack``,
``max`` of the axis, ``reach`` (what the axis shows at least), limits (from ``yellow`` and ``red``
on, or below ``red_below``, the panel has that colour), and ``without`` (the words in place of
curves where no value is a number, as of a share of nothing).
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from meridian_patch.config.yaml_file import parse_value, read_text
from meridian_patch.telemetry.metrics import METRICS

WHICH: Final = 'model_name=~"$model", instance=~"$instance"'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_HEIGHTS: Final = {"timeseries": 8, "stat": 4}
# Beside each other: more would be too small to read.
_MOST_CURVES: Final = 3
_FROM: Final = "now-1h"
_GRAFANAS_UNITS: Final = ("percentunit", "s")
_WHOLE: Final = ("requests", "tokens")
# What the axis shows at least, so that a curve at 0 lies on a sensible one.
_REACH: Final = {"percentunit": 0.02, "s": 0.01, "requests": 4, "tokens": 4}
_REACH_OF_RATES: Final = 0.1
_WITHOUT: Final = "No data: no patched server is scraped, or the recording rules are not loaded"
# One colour for one thing, on every panel.
_COLOURS: Final = {
    "answer": "green",
    "think": "blue",
    "prefill": "yellow",
    "prompts": "yellow",
    "ttot": "purple",
    "output_critical": "green",
    "think_active": "blue",
    "think_complete": "purple",
    "in_use": "orange",
    "enforce": "green",
    "observe": "purple",
    "natural": "blue",
    "eat": "green",
    "rpdi": "orange",
    "end_probability": "yellow",
    "loop": "purple",
    "pattern": "super-light-blue",
    "budget": "light-red",
    "hard_cap": "red",
    "answer_reserve": "dark-orange",
    "unanswered": "dark-red",
}
_GREY: Final = "#808080"


def render_dashboard(source: Path) -> str:
    """The JSON that Grafana imports.

    Args:
        source: one of configs/grafana/*.yaml.
    """
    said = parse_value(read_text(source), f"file {source}")
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
    """Rows from top to bottom, up to three curves of a row beside each other."""
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
        beside = len(panels)
        if height > _HEIGHTS["stat"] and beside > _MOST_CURVES:
            beside = 2 if beside % 2 == 0 else _MOST_CURVES
        for start in range(0, len(panels), beside):
            x, line = 0, panels[start : start + beside]
            for panel in line:
                width = panel.get("columns", _COLUMNS // len(line))
                place = {"h": height, "w": width, "x": x, "y": y}
                yield {"id": next(ids), "gridPos": place, **_panel(panel)}
                x += width
            y += height


def _panel(said: dict[str, Any]) -> dict[str, Any]:
    is_stat = said.get("show") == "stat"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": _expression(said, expression),
            "legendFormat": legend,
            # A number is that of now: an engine that is gone is not counted any more.
            "instant": is_stat,
            "range": not is_stat,
        }
        for index, (legend, expression) in enumerate(said["lines"].items())
    ]
    return {
        "type": "stat" if is_stat else "timeseries",
        "title": said["title"],
        "description": said["description"],
        "datasource": _SOURCE,
        **(_number(said) if is_stat else _curves(said)),
        "targets": targets,
    }


def _expression(said: dict[str, Any], expression: str) -> str:
    asked = expression.replace("$which", WHICH)
    # A comparison leaves out what is not a number, and Grafana then shows the panel's words.
    return f"({asked}) >= 0" if "without" in said else asked


def _number(said: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "unit": said.get("unit", "none"),
        "min": 0,
        "decimals": 0,
        "thresholds": {"mode": "absolute", "steps": _limits(said, "green")},
        "color": {"mode": "thresholds"},
    }
    options = {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value_and_name" if "{{" in "".join(said["lines"]) else "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def _curves(said: dict[str, Any]) -> dict[str, Any]:
    is_stacked = said.get("stack", False)
    limits = _limits(said, "transparent")
    defaults = {
        "min": 0,
        "noValue": said.get("without", _WITHOUT),
        "thresholds": {"mode": "absolute", "steps": limits},
        "color": {"mode": "palette-classic"},
        "custom": {
            "drawStyle": "line",
            "lineWidth": 1 if is_stacked else 2,
            "fillOpacity": 40 if is_stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed+area" if len(limits) > 1 else "off"},
        },
    }
    unit = said["unit"]
    if unit in _GRAFANAS_UNITS:
        defaults["unit"] = unit
    else:
        defaults["unit"] = "short"
        defaults["custom"]["axisLabel"] = unit
    if unit in _WHOLE:
        defaults["decimals"] = 0
    if "max" in said:
        defaults["max"] = said["max"]
    else:
        reach = _REACH.get(unit, _REACH_OF_RATES)
        defaults["custom"]["axisSoftMax"] = said.get("reach", reach)
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    overrides = [*_colours(said["lines"]), *_left_out(said)]
    return {"fieldConfig": {"defaults": defaults, "overrides": overrides}, "options": options}


def _colours(lines: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Of what a panel shows by phase, tier, mode or reason, or by these names."""
    values = {
        value
        for legend, expression in lines.items()
        for metric in METRICS
        if metric.name in expression and f"{{{{{metric.label}}}}}" in legend
        for value in metric.values
    }
    for name in sorted({*values, *lines} & _COLOURS.keys()):
        colour = {"mode": "fixed", "fixedColor": _COLOURS[name]}
        yield {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": colour}],
        }


def _left_out(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Grafana overrides for curves that are all 0 or all null: grey, not in legend or tooltip.

    In a stacked panel they are not drawn either. In other panels they stay in legend and tooltip if
    the panel has ``red_below``, or if none of its legends is a template (``{{label}}``).
    """
    is_stacked = said.get("stack", False)
    is_told = not is_stacked and ("red_below" in said or "{{" not in "".join(said["lines"]))
    hidden = {"legend": not is_told, "tooltip": not is_told, "viz": is_stacked}
    grey = {"mode": "fixed", "fixedColor": _GREY}
    for reducer in ("allIsZero", "allIsNull"):
        yield {
            "matcher": {"id": "byValue", "options": {"reducer": reducer}},
            "properties": [
                {"id": "custom.hideFrom", "value": hidden},
                {"id": "color", "value": grey},
            ],
        }


def _limits(said: dict[str, Any], well: str) -> list[dict[str, Any]]:
    """Grafana's thresholds; the first one has no value."""
    if "red_below" in said:
        return [{"color": "red", "value": None}, {"color": well, "value": said["red_below"]}]
    colours = [name for name in ("yellow", "red") if name in said]
    steps = [{"color": name, "value": said[name]} for name in colours]
    return [{"color": well, "value": None}, *steps]
