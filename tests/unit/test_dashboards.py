"""Dashboards, rules and runbooks: whole, of one form, and about metrics that exist."""

import json
import re

import pytest
import yaml
from alerting import (
    ALERTS,
    DASHBOARDS,
    ROOT,
    RULES,
    RUNBOOKS,
    all_expressions,
    names_in,
    panels_of,
    program,
    promtool,
    rules_of,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from meridian_patch.telemetry.metric import Kind
from meridian_patch.telemetry.metrics import METRICS

PARTS = ("Symptom", "Cause", "Verify", "Mitigate", "Fix")
OF_HISTOGRAMS = ("_bucket", "_count", "_sum")
SAMPLES = {
    f"{metric.exported_name}{suffix}": metric
    for metric in METRICS
    for suffix in (OF_HISTOGRAMS if metric.kind is Kind.HISTOGRAM else ("",))
}
# vLLM's own, as tests/engine/test_observability.py finds them on a server.
OF_VLLM = {
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
}
EXPRESSIONS = all_expressions()


def dashboards():
    return pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def test_all_four_are_there():
    assert [path.stem for path in DASHBOARDS] == ["cache", "exits", "overview", "phases"]
    told = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({each["uid"] for each in told}) == len({each["title"] for each in told}) == 4


@dashboards()
def test_grafana_knows_every_field(path):
    """Its own SDK reads and writes the dashboard, and loses nothing on the way."""
    register_default_plugins()
    told = json.loads(path.read_text())
    written = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(told)))
    assert list(lost(told, written)) == []


def lost(told, written, place=""):
    """Places of what is in ``told`` and not in ``written``."""
    if isinstance(told, dict) and isinstance(written, dict):
        for name, value in told.items():
            if name in written:
                yield from lost(value, written[name], f"{place}.{name}")
            elif value is not None:
                yield f"{place}.{name}"
    elif isinstance(told, list) and isinstance(written, list) and len(told) == len(written):
        for index, (one, other) in enumerate(zip(told, written, strict=True)):
            yield from lost(one, other, f"{place}[{index}]")
    elif told != written:
        yield place


@dashboards()
def test_panels_fit_beside_each_other(path):
    """Ids are unique, no two panels overlap, none leaves the page, and no curve is squeezed."""
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        assert panel["type"] != "timeseries" or at["w"] >= 8, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


@dashboards()
def test_a_stranger_can_read_every_panel(path):
    """Each says what it shows and in which unit, and asks the data source that was chosen."""
    (source, *chosen) = json.loads(path.read_text())["templating"]["list"]
    assert (source["type"], source["name"]) == ("datasource", "datasource")
    assert [each["name"] for each in chosen] == ["model", "instance"]
    for panel in panels_of(path):
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {each["uid"] for each in sources} == {"${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


@dashboards()
def test_one_thing_has_one_colour_and_a_curve_of_zeros_no_name(path):
    """On every panel of curves, so that a phase is known again on the next one."""
    for panel in panels_of(path):
        if panel["type"] != "timeseries":
            continue
        rules = panel["fieldConfig"]["overrides"]
        colours = {
            rule["matcher"]["options"]: rule["properties"][0]["value"]["fixedColor"]
            for rule in rules
            if rule["matcher"]["id"] == "byName"
        }
        expected = {"think": "blue", "answer": "green", "prefill": "yellow"}
        assert {name: colours[name] for name in expected.keys() & colours.keys()} == {
            name: expected[name] for name in expected.keys() & colours.keys()
        }
        grey = [rule for rule in rules if rule["matcher"]["id"] == "byValue"]
        assert {rule["matcher"]["options"]["reducer"] for rule in grey} == {
            "allIsZero",
            "allIsNull",
        }
        assert panel["fieldConfig"]["defaults"]["noValue"]


def test_every_expression_can_be_parsed(tmp_path):
    """By Prometheus, those of panels and runbooks too."""
    rules = [
        {"record": f"expression:{index}", "expr": expression}
        for index, expression in enumerate(EXPRESSIONS.values())
    ]
    file = tmp_path / "all.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", file)


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_every_name_exists(place):
    """An expression uses our metrics, known ones of vLLM, and recording rules; right labels too."""
    expression = EXPRESSIONS[place]
    assert names_in(expression) <= {*SAMPLES, *OF_VLLM, *rules_of(RULES)}
    for name, selector in re.findall(r"\b(meridian_\w+)\{([^}]*)\}", expression):
        metric = SAMPLES[name]
        for label, how, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
            if label == metric.label:
                assert set(value.split("|")) <= set(metric.values)
            elif label == "le":
                assert float(value) in metric.buckets
            else:
                assert label in ("model_name", "instance"), (label, how)


def test_every_metric_is_shown():
    """In a panel, by itself or by a recording rule."""
    shown = set().union(*(names_in(expression) for expression in EXPRESSIONS.values()))
    assert {metric.exported_name for metric in METRICS} <= {
        SAMPLES[name].exported_name for name in shown if name in SAMPLES
    }


def test_every_recording_rule_is_shared():
    """By an alert and a panel at least; what one place needs is written there."""
    for name in rules_of(RULES):
        users = [place for place, expression in EXPRESSIONS.items() if name in expression]
        assert len(users) >= 2, name


@pytest.mark.parametrize("name", rules_of(ALERTS))
def test_every_alert_has_a_runbook_of_one_form(name):
    alert = rules_of(ALERTS)[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    page = ROOT / alert["annotations"]["runbook_url"]
    title, *rest = page.read_text().splitlines()
    assert title == f"# {name}"
    assert [line[3:] for line in rest if line.startswith("## ")] == list(PARTS)
    # It begins with how grave and how old the trouble is.
    said = re.match(r"(critical|warning), (?:at once|after (\d+) minutes)\.", rest[1])
    assert said[1] == alert["labels"]["severity"]
    assert alert.get("for", "0m") == f"{said[2] or 0}m"


def test_every_runbook_has_an_alert():
    urls = {alert["annotations"]["runbook_url"] for alert in rules_of(ALERTS).values()}
    assert urls == {str(page.relative_to(ROOT)) for page in RUNBOOKS.glob("*.md")}


def test_operators_find_every_alert():
    """docs/operate.md lists them with their severity and their runbook."""
    page = (ROOT / "docs" / "operate.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\((runbooks/[\w-]+\.md)\) \| (\w+) \|", page, re.MULTILINE)
    assert {name: (f"docs/{url}", severity) for name, url, severity in rows} == {
        name: (alert["annotations"]["runbook_url"], alert["labels"]["severity"])
        for name, alert in rules_of(ALERTS).items()
    }


def test_runbooks_name_panels_that_exist():
    """Names in italics are titles of dashboards and of panels."""
    titles = {json.loads(path.read_text())["title"] for path in DASHBOARDS}
    titles |= {panel["title"] for path in DASHBOARDS for panel in panels_of(path)}
    for page in RUNBOOKS.glob("*.md"):
        named = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", page.read_text())
        assert {" ".join(name.split()) for name in named} <= titles, page


@pytest.mark.parametrize(
    ("ci", "outcome"), (("", pytest.skip.Exception), ("true", pytest.fail.Exception))
)
def test_where_there_is_no_prometheus_its_tests_are_skipped(monkeypatch, tmp_path, ci, outcome):
    """But in continuous integration, where they fail."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="no promtool here: scripts/get_prometheus"):
        program("promtool")
