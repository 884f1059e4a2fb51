"""The files of Prometheus and Grafana as Python, and where its programs are."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from missing import skip_but_in_ci

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "configs" / "prometheus"
RULES, ALERTS = PROMETHEUS / "rules.yml", PROMETHEUS / "alerts.yml"
DASHBOARDS = sorted((ROOT / "configs" / "grafana").glob("*.json"))
RUNBOOKS = ROOT / "docs" / "runbooks"
# A string of PromQL, and a name in it.
_TEXT = re.compile(r'"[^"]*"')
_NAME = re.compile(r"\b(?:meridian|vllm)[:_][a-z_:0-9]+")


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`; where there is none, skips the test, but fails in CI."""
    here = Path(sys.executable).parent / name
    found = str(here) if here.exists() else shutil.which(name)
    if found is None:
        skip_but_in_ci(f"no {name} here: scripts/get_prometheus gets it where there is apt")
    return found


def promtool(*arguments) -> str:
    """What promtool says; it must succeed."""
    command = [program("promtool"), *map(str, arguments)]
    run = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def rules_of(path: Path) -> dict[str, dict]:
    """Rules of a file by their name."""
    groups = yaml.safe_load(path.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule for rule in rules}


def panels_of(path: Path) -> list[dict]:
    """The panels of a dashboard that show something."""
    panels = json.loads(path.read_text())["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def panel_expressions(window: str) -> dict[str, str]:
    """``<dashboard>: <panel>: <legend>`` to its expression, Grafana's variables filled in.

    Args:
        window: in place of the windows that Grafana chooses, such as ``5s``.
    """
    values = {"$__rate_interval": window, "$__range": window, "$model": ".*", "$instance": ".*"}
    found = {}
    for path in DASHBOARDS:
        for panel in panels_of(path):
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in values.items():
                    expression = expression.replace(name, value)
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = expression
    return found


def runbook_expressions() -> dict[str, str]:
    """``<runbook>: <number>`` to an expression that it has the reader look at."""
    blocks = re.compile(r"^```promql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        f"{page.stem}: {index}": block.strip()
        for page in sorted(RUNBOOKS.glob("*.md"))
        for index, block in enumerate(blocks.findall(page.read_text()))
    }


def names_in(expression: str) -> set[str]:
    """Names of metrics and of recording rules in an expression."""
    return set(_NAME.findall(_TEXT.sub('""', expression)))


def all_expressions() -> dict[str, str]:
    """Every expression of rules, alerts, panels and runbooks, by where it stands."""
    rules = {
        name: rule["expr"] for path in (RULES, ALERTS) for name, rule in rules_of(path).items()
    }
    return rules | panel_expressions("5m") | runbook_expressions()
