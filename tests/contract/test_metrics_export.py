"""Metrics that EngineCore exports itself, against what the API server's code counts."""

import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from scheduler_driver import Job
from served_driver import JOBS, THINKS, Served, patch_output_processor
from tier_driver import driver_for

from meridian_patch.config.schema import MetricsConfig
from meridian_patch.engine import status
from meridian_patch.engine.scheduler import metrics_part
from meridian_patch.operate.scrape import Scrape, parse
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.metric import Kind
from meridian_patch.telemetry.metrics import METRICS

PORT = "MERIDIAN_PATCH_SET_METRICS__PORT"
LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def patched(monkeypatch, demo_model):
    patch_output_processor(monkeypatch, demo_model)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port(monkeypatch):
    """EngineCore of this test exports at it."""
    chosen = free_port()
    monkeypatch.setenv(PORT, str(chosen))
    return chosen


def scrape(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return parse(reply.read().decode(), 0.0)


def scrape_with(port: int, tokens: float) -> Scrape:
    """The page as soon as the thread has taken in that many tokens."""
    end = time.monotonic() + LIMIT_S
    while (page := scrape(port)).total("meridian_output_tokens_total") != tokens:
        assert time.monotonic() < end, page.by("meridian_output_tokens_total", "phase")
        time.sleep(0.01)
    return page


def histograms(page: Scrape) -> dict[str, float]:
    """Observations by event and label, those that are not 0."""
    counts = {}
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            for value, number in page.by(metric.sample_name, metric.label).items():
                if number:
                    counts[f"{metric.event}:{value}"] = number
    return counts


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_they_are_those_of_the_api_server(demo_model, port, is_async):
    """All metrics are there; tokens and observations are what the API server counts."""
    served = Served(demo_model, is_async=is_async)
    for job in JOBS.values():
        served.add(job)
    served.driver.drain()
    expected: dict[str, float] = {}
    for times in served.stats:
        for key, values in times.values.items():
            expected[key] = expected.get(key, 0) + sum(values.values())
    expected = {key: number for key, number in expected.items() if number}
    tokens = [sum(each.tokens[place] for each in served.stats) for place in (0, 1)]
    page = scrape_with(port, sum(tokens))
    assert page.by("meridian_output_tokens_total", "phase") == {
        "think": tokens[0],
        "answer": tokens[1],
    }
    assert histograms(page) == expected
    assert {metric.sample_name for metric in METRICS} <= page.samples.keys()
    totals = served.driver.scheduler.phase_counters.totals
    for metric in METRICS:
        for value in metric.values:
            if (counted := totals.get(f"{metric.event}:{value}")) is not None:
                assert page.total(metric.exported_name, **{metric.label: value}) == counted
    assert page.total("meridian_requests") == 0


def test_requests_that_left_are_forgotten(demo_model, port):
    """Ended, aborted while they run, and aborted before their first step."""
    served = Served(demo_model)
    for number in range(4):
        served.add(Job(f"r{number}", THINKS, 200, 10))
    served.driver.step()
    served.add(Job("late", THINKS, 200, 10))
    served.driver.abort(["late", "r0"])
    served.driver.drain()
    part = served.driver.scheduler._metrics
    scrape_with(port, sum(sum(each.tokens) for each in served.stats))
    end = time.monotonic() + LIMIT_S
    while part._exporter._states and time.monotonic() < end:
        time.sleep(0.01)
    assert part._exporter._states == {}


def test_a_sessions_turns_are_requests_of_their_own(demo_model, port):
    """Also where the next chunk had come before the turn ended; each ends with an observation."""
    driver = driver_for(demo_model)
    for number in range(3):
        driver.send_chunk(Job("s", THINKS, 5, 3))
        if number != 1:
            driver.step()
    for _ in range(40):
        driver.step()
    page = scrape_with(port, 3 * 10)
    assert page.total("meridian_request_phase_seconds_count", phase="think") == 3
    assert page.total("meridian_time_to_first_answer_token_seconds_count", thought="yes") == 3


def test_no_step_waits_for_the_export(demo_model, port, monkeypatch):
    """A thread that is stuck delays nothing, and takes all in later."""
    hold = threading.Event()
    take = metrics_part.Exporter.take

    def stuck(*args):
        hold.wait(LIMIT_S)
        take(*args)

    monkeypatch.setattr(metrics_part.Exporter, "take", stuck)
    served = Served(demo_model)
    served.add(JOBS["thinks"])
    served.driver.drain()
    tokens = sum(sum(each.tokens) for each in served.stats)
    assert tokens
    assert scrape(port).total("meridian_output_tokens_total") == 0
    hold.set()
    scrape_with(port, tokens)


def test_a_failure_of_the_export_is_not_the_engines(demo_model, port, monkeypatch):
    """The next steps are taken in."""
    failed = []
    take = metrics_part.Exporter.take

    def once(*args):
        if not failed:
            failed.append(args)
            raise RuntimeError("a bad step")
        take(*args)

    monkeypatch.setattr(metrics_part.Exporter, "take", once)
    served = Served(demo_model)
    served.add(JOBS["thinks"])
    served.driver.drain()
    end = time.monotonic() + LIMIT_S
    while not scrape(port).total("meridian_output_tokens_total"):
        assert time.monotonic() < end
        time.sleep(0.01)


def told() -> dict[str, object]:
    return {name: status._report.get(name) for name in ("metrics", "metrics_off")}


def test_off_unless_asked_for_or_needed(demo_model, monkeypatch):
    """Behind the Rust front end it has a port; 0 is none there too."""
    assert Served(demo_model).driver.scheduler._metrics is None
    assert told() == {"metrics": None, "metrics_off": None}
    chosen = free_port()
    monkeypatch.setattr(metrics_part, "DEFAULT_PORT", chosen)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert Served(demo_model).driver.scheduler._metrics is not None
    assert told()["metrics"] == f"http://127.0.0.1:{chosen}/metrics"
    assert scrape(chosen).has("meridian_info")
    monkeypatch.setenv(PORT, "0")
    assert Served(demo_model).driver.scheduler._metrics is None


@pytest.mark.parametrize(("index", "has_port"), [(0, True), (2, True), (60_000, False)])
def test_each_rank_has_a_port_of_its_own(index, has_port):
    """That of the first rank and its index; the label says which engine it is."""
    first = max(free_port(), 10_000)
    scheduler = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=index),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(served_model_name="m")),
        log_stats=True,
    )
    part = metrics_part.build_metrics(scheduler, MetricsConfig(port=first), dict)
    assert (part is not None) is has_port
    if has_port:
        assert scrape(first + index).label("meridian_info", "engine") == str(index)


def test_an_engine_without_statistics_exports_none(caplog):
    """As its API server."""
    scheduler = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(served_model_name="m")),
        log_stats=False,
    )
    assert metrics_part.build_metrics(scheduler, MetricsConfig(port=free_port()), dict) is None
    assert "--disable-log-stats" in caplog.text


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("taken", "cannot be had"),
        ("multiprocess", "PROMETHEUS_MULTIPROC_DIR is set"),
    ],
)
def test_a_port_that_cannot_be_had_ends_no_engine(
    demo_model, monkeypatch, tmp_path, caplog, case, why
):
    """The log and the status report say so."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv(PORT, str(taken.getsockname()[1]))
        if case == "multiprocess":
            monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        served = Served(demo_model)
    assert why in str(told()["metrics_off"])
    assert why in caplog.text
    served.add(JOBS["plain"])
    served.driver.drain()
    assert not served.driver.scheduler.phase_counters.totals.get(
        f"{counters.FALLBACK}:{counters.Fallback.EXCEPTION}"
    )
