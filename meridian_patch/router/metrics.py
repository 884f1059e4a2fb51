"""The router's own metrics, on its ``/metrics``."""

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meridian_patch.router.engine import Engine

Moved = Literal["moved", "answered_again", "resumed"]

_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.14, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Counters of one router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "meridian_route_requests",
            "Requests by endpoint and HTTP status.",
            ("path", "status"),
            registry=self._registry,
        )
        self._moved = Counter(
            "meridian_route_handoffs",
            "Requests that went on at another engine: moved with their KV cache, answered again "
            "without it because the answer engine failed, or resumed after an engine was lost.",
            ("outcome",),
            registry=self._registry,
        )
        self._gap = Histogram(
            "meridian_route_handoff_gap_seconds",
            "From the end of the thought to the first chunk of the answer engine.",
            buckets=_GAP_BUCKETS_S,
            registry=self._registry,
        )
        self._engines = Gauge(
            "meridian_route_engines",
            "Engines by role and state: healthy, hung (its API server answers, its EngineCore does "
            "not) or down.",
            ("role", "state"),
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "meridian_route_requests_in_flight",
            "Requests that the router has at an engine now.",
            ("engine", "role"),
            registry=self._registry,
        )
        for outcome in ("moved", "answered_again", "resumed"):
            self._moved.labels(outcome)

    def request(self, path: str, status: int) -> None:
        """Count a request whose response began with this status."""
        self._requests.labels(path, str(status)).inc()

    def moved(self, outcome: Moved) -> None:
        """Count a request that went on at another engine."""
        self._moved.labels(outcome).inc()

    def gap(self, seconds: float) -> None:
        """Note the time from a thought's end to the answer's first chunk."""
        self._gap.observe(seconds)

    def page(self, engines: Iterable[Engine]) -> bytes:
        """The text of ``/metrics``."""
        engines = tuple(engines)
        for role in ("think", "answer"):
            of_role = [engine for engine in engines if engine.role == role]
            healthy = sum(engine.is_healthy for engine in of_role)
            self._engines.labels(role, "healthy").set(healthy)
            hung = sum(engine.silence.is_hung for engine in of_role if not engine.is_healthy)
            self._engines.labels(role, "hung").set(hung)
            self._engines.labels(role, "down").set(len(of_role) - healthy - hung)
        for engine in engines:
            self._in_flight.labels(engine.url, engine.role).set(engine.num_requests)
        return bytes(generate_latest(self._registry))
