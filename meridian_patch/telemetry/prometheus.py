"""Exports the table of metrics with Prometheus, in the API server process.

Uses plain counters and gauges with a multiprocess mode, because custom collectors do not work with
several API servers.
"""

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from meridian_patch.telemetry.metrics import METRICS, Kind, Metric

_LABELS = ("model_name", "engine")


class PhaseMetrics:
    """The ``meridian_*`` metrics of one API server.

    Args:
        model_name: label value, as in vLLM's own metrics.
        registry: where the metrics are registered.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        _unregister_earlier(registry)
        self._model_name = model_name
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for metric in METRICS:
            if metric.kind is Kind.COUNTER:
                self._counters[metric.event] = Counter(*_arguments(metric), registry=registry)
            else:
                self._gauges[metric.event] = Gauge(
                    *_arguments(metric), registry=registry, multiprocess_mode="mostrecent"
                )

    def initialize(self, engine: int) -> None:
        """Export zeros for an engine at its start."""
        for metric in METRICS:
            for value in metric.values:
                labels = (self._model_name, str(engine), value)
                if metric.kind is Kind.COUNTER:
                    self._counters[metric.event].labels(*labels)
                else:
                    # With several API servers, only a gauge that was set is exported.
                    self._gauges[metric.event].labels(*labels).set(0)

    def record(self, stats: Mapping[str, int], engine: int) -> None:
        """Add one step's counts and set its gauges.

        Args:
            stats: what ``PhaseCounters.drain_with`` returned: ``<event>:<label value>`` to number.
            engine: index of the engine.
        """
        for key, value in stats.items():
            event, _, label = key.partition(":")
            labels = (self._model_name, str(engine), label)
            if event in self._gauges:
                self._gauges[event].labels(*labels).set(value)
            else:
                self._counters[event].labels(*labels).inc(value)


def _arguments(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    return metric.name, metric.help, (*_LABELS, metric.label)


def _unregister_earlier(registry: CollectorRegistry) -> None:
    """Unregister the metrics of an earlier engine in this process, as vLLM does with its own."""
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith("meridian_"):
            registry.unregister(collector)
