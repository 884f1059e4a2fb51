"""Exports the table of metrics with Prometheus, in the API server process.

Uses plain counters, histograms, and gauges with a multiprocess mode, because custom collectors do
not work with several API servers.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from meridian_patch.telemetry.metric import Kind, Metric
from meridian_patch.telemetry.metrics import METRICS

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
        self._histograms: dict[str, Histogram] = {}
        # By ``<event>:<label value>`` and engine.
        self._children: dict[tuple[str, int], Any] = {}
        for metric in METRICS:
            if metric.kind is Kind.COUNTER:
                self._counters[metric.event] = Counter(*_arguments(metric), registry=registry)
            elif metric.kind is Kind.HISTOGRAM:
                self._histograms[metric.event] = Histogram(
                    *_arguments(metric), registry=registry, buckets=metric.buckets
                )
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
                elif metric.kind is Kind.HISTOGRAM:
                    self._histograms[metric.event].labels(*labels)
                else:
                    # With several API servers, only a gauge that was set is exported.
                    self._gauges[metric.event].labels(*labels).set(0)

    def observe(self, values: Mapping[str, Mapping[float, int]], engine: int) -> None:
        """Add one step's observations to histograms.

        Args:
            values: ``<event>:<label value>`` to observed values and how often each was observed.
            engine: index of the engine.
        """
        for key, times_of in values.items():
            child = self._child(key, engine)
            for value, times in times_of.items():
                _observe_times(child, value, times)

    def record(self, stats: Mapping[str, float], engine: int) -> None:
        """Add one step's counts and set its gauges.

        Args:
            stats: what ``PhaseCounters.drain_with`` returned: ``<event>:<label value>`` to number.
            engine: index of the engine.
        """
        for key, value in stats.items():
            child = self._child(key, engine)
            if isinstance(child, Gauge):
                child.set(value)
            else:
                child.inc(value)

    def _child(self, key: str, engine: int) -> Any:
        """The metric of an event with its labels, found once: it is needed in every step."""
        child = self._children.get((key, engine))
        if child is None:
            event, _, label = key.partition(":")
            kinds: tuple[dict[str, Any], ...] = (self._counters, self._gauges, self._histograms)
            metric = next(kind[event] for kind in kinds if event in kind)
            child = metric.labels(self._model_name, str(engine), label)
            self._children[key, engine] = child
        return child


def _observe_times(child: Histogram, value: float, times: int) -> None:
    """Observe a value several times at the cost of one: requests of a step share their gaps."""
    # Load-bearing: what `observe` does, for one.
    child._sum.inc(value * times)
    for index, bound in enumerate(child._upper_bounds):
        if value <= bound:
            child._buckets[index].inc(times)
            break


def _arguments(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    return metric.name, metric.help, (*_LABELS, metric.label)


def _unregister_earlier(registry: CollectorRegistry) -> None:
    """Unregister the metrics of an earlier engine in this process, as vLLM does with its own."""
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith("meridian_"):
            registry.unregister(collector)
