"""A real Prometheus scrapes the server of test_wire.py: metrics, panels, and alerts of overload."""

import math
import re
import time

import pytest
from alerting import ALERTS, RULES, panel_expressions, rules_of, runbook_expressions
from clients import clients
from metrics_page import check_documented, check_monotone, check_sums
from run_prometheus import Prometheus

pytestmark = pytest.mark.engine

# The tiny reasoner answers within a second, so a shorter wait is a long one.
LIMITS = {"MeridianFirstAnswerSlow": ("> 5 + 2", "> 1 + 0")}
OVERLOAD = {"MeridianAnswersPreempted", "MeridianFirstAnswerSlow", "MeridianRequestsWait"}
# What the runbooks of thoughts that are too long say.
BOUNDED = {
    "meridian_exit": "enforce",
    "meridian_max_think_tokens": 8,
    "meridian_min_think_tokens": 0,
}
# More than the cache holds, beside seven others.
LONG_ANSWER = {"ignore_eos": True, "max_tokens": 500, "vllm_xargs": BOUNDED}
PLAIN = {"prompt": "a b c", "max_tokens": 20}
# A histogram of think servers that has no value before a request moved.
OF_MOVED = {"cache: Wait for the answer engine: first token"}


@pytest.fixture(scope="module")
def prometheus(served, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(f"127.0.0.1:{served.port}", folder, LIMITS) as started:
        yield started


def without_data(prometheus, expressions) -> list[str]:
    """Places of the expressions that return no number now."""
    found = {place: prometheus.ask(expression) for place, expression in expressions.items()}
    return [place for place, all_of in found.items() if all(math.isnan(v) for _, v in all_of)]


def operands(expression: str) -> list[str]:
    """What the expression compares and joins, without the brackets around more than one."""
    operators = r">=?|<|==|\bor\b|\b(?:unless|and)\b(?: (?:on|ignoring) \([^)]*\))?"
    parts = re.split(f" (?:{operators}) ", " ".join(expression.split()))
    return [without_open_brackets(part) for part in parts]


def without_open_brackets(part: str) -> str:
    while part.count("(") > part.count(")"):
        part = part[1:].lstrip()
    while part.count(")") > part.count("("):
        part = part[:-1].rstrip()
    return part


def test_alerts_of_overload_fire_and_end_as_their_runbooks_say(served, prometheus):
    """And what they say is whole."""
    with clients(served, 20, aborts=True, **LONG_ANSWER), clients(served, 4, aborts=True):
        fired = prometheus.wait(lambda p: set(p.alerts()) >= OVERLOAD, 60)
        alerts = prometheus.alerts()
    assert fired, set(alerts)
    for name in OVERLOAD:
        for alert in alerts[name]:
            assert alert["labels"]["model_name"] == "m"
            texts = list(alert["annotations"].values())
            assert not [text for text in texts if "<" in text or "{{" in text], texts
    # Fewer requests, shorter answers, bounded thoughts.
    with clients(served, 3, vllm_xargs=BOUNDED):
        ended = prometheus.wait(lambda p: not OVERLOAD & set(p.alerts()), 40)
        left = set(prometheus.alerts())
    assert ended, left & OVERLOAD


def test_every_documented_metric_is_there_and_plausible(served):
    """Present, typed, and none undocumented; sums are right, and no total falls under load."""
    before = served.get("/metrics")
    with clients(served, 6):
        time.sleep(1.5)
        check_documented(served.get("/metrics"), ["0"])
        time.sleep(1.5)
    time.sleep(0.5)
    after = served.get("/metrics")
    check_documented(after, ["0"])
    check_monotone(before, after)
    check_sums(before, after)


def test_every_expression_has_data(served, prometheus):
    """Of panels, rules and runbooks, and each operand of each alert: silence means all is well."""
    asked = panel_expressions("60s") | {
        name: rule["expr"] for name, rule in rules_of(RULES).items()
    }
    for place, expression in runbook_expressions().items():
        # Some show only what is wrong.
        asked[place] = re.sub(r" > [\d.]+$", "", expression)
    for name, alert in rules_of(ALERTS).items():
        asked |= {f"{name}: {part}": part for part in operands(alert["expr"])}

    def has_all(watched) -> bool:
        # A rate needs a change between two scrapes.
        served.post("/v1/completions", PLAIN)
        return set(without_data(watched, asked)) <= OF_MOVED

    with clients(served, 3, vllm_xargs=BOUNDED), clients(served, 3):
        found = prometheus.wait(has_all, 30)
        bare = without_data(prometheus, asked)
    assert found, bare
