"""Every expression on two servers with two engines each, by a real Prometheus; made-up numbers.

tests/engine/test_wire_watched.py asks the same of a real server, which has one engine.
"""

import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from alerting import ALERTS, RULES, panel_expressions, rules_of, runbook_expressions
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from run_prometheus import Prometheus

from meridian_patch.telemetry.metric import Kind
from meridian_patch.telemetry.metrics import METRICS
from meridian_patch.telemetry.prometheus import PhaseMetrics

GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
COUNTERS = (
    *("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
    *("vllm:prompt_tokens", "vllm:generation_tokens"),
)
ENGINES = (0, 1)


class Busy:
    """Two engines behind a page of metrics on which everything rises."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ours = PhaseMetrics("m", self._registry)
        labels = ("model_name", "engine")
        self._gauges = [Gauge(name, "", labels, registry=self._registry) for name in GAUGES]
        self._counters = [Counter(name, "", labels, registry=self._registry) for name in COUNTERS]
        for engine in ENGINES:
            self._ours.initialize(engine)

    def page(self) -> bytes:
        for engine in ENGINES:
            for gauge in self._gauges:
                gauge.labels("m", engine).set(1)
            for counter in self._counters:
                counter.labels("m", engine).inc()
            for metric in METRICS:
                for value in metric.values or ("1.0",):
                    key = f"{metric.event}:{value}"
                    if metric.kind is Kind.HISTOGRAM:
                        self._ours.observe({key: {0.2: 3}}, engine)
                    else:
                        self._ours.record({key: 1}, engine)
        return generate_latest(self._registry)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """It has scraped both servers for a while."""
    servers = []
    for _ in range(2):
        busy = Busy()

        class Page(BaseHTTPRequestHandler):
            def do_GET(self, busy=busy):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(busy.page())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    addresses = [f"127.0.0.1:{server.server_port}" for server in servers]
    folder = tmp_path_factory.mktemp("prometheus")
    try:
        with Prometheus(addresses[0], folder) as started:
            started.scrape(*addresses)
            assert started.wait(lambda p: len(p.ask("meridian:fallbacks:ratio")) == 4, 30)
            yield started
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def numbers(prometheus, expression):
    return [value for _, value in prometheus.ask(expression) if not math.isnan(value)]


def test_panels(prometheus):
    """Each has numbers."""
    for place, expression in panel_expressions("10s").items():
        assert numbers(prometheus, expression), place


def test_runbooks(prometheus):
    for place, expression in runbook_expressions().items():
        # A few show only what is wrong.
        wrong = "> 0" in expression
        assert wrong or numbers(prometheus, expression), place


def test_rules_are_by_engine(prometheus):
    """Each engine of each server has its own number, but for the times of requests."""
    for name in rules_of(RULES):
        of_servers = name == "meridian:first_answer_seconds:p95"
        assert len(numbers(prometheus, name)) == (2 if of_servers else 4), name


def test_alerts_can_be_asked_for(prometheus):
    """No alert's expression is refused, whatever the labels of its operands."""
    for alert in rules_of(ALERTS).values():
        prometheus.ask(alert["expr"])
    firing = prometheus.wait(lambda p: "MeridianPartOff" in p.alerts(), 15)
    assert firing
    assert len(prometheus.alerts()["MeridianPartOff"]) > 4
