"""Prometheus metrics of the phases, in the API server process.

Plain counters and gauges with a multiprocess mode, so that they also work with several API
servers (custom collectors do not).
"""

from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from meridian_patch.telemetry import counters

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
        self._counters = {
            counters.PREEMPTION: Counter(
                "meridian_preemptions",
                "Preemptions by the phase the request was in.",
                (*_LABELS, "phase"),
                registry=registry,
            ),
            counters.FALLBACK: Counter(
                "meridian_policy_fallbacks",
                "Scheduler steps that ran as stock, by reason.",
                (*_LABELS, "reason"),
                registry=registry,
            ),
            counters.PHASE_CHANGE: Counter(
                "meridian_phase_changes",
                "Requests that entered a phase.",
                (*_LABELS, "phase"),
                registry=registry,
            ),
            counters.EVICTION: Counter(
                "meridian_kv_evictions",
                "Cached KV blocks evicted, by the tier they were in.",
                (*_LABELS, "tier"),
                registry=registry,
            ),
            counters.HIT_TOKENS: Counter(
                "meridian_kv_hit_tokens",
                "Prefix-cache hit tokens, by the tier of the free block, or in use by others.",
                (*_LABELS, "tier"),
                registry=registry,
            ),
            counters.EXIT: Counter(
                "meridian_thoughts_ended",
                "Thoughts that ended, by reason.",
                (*_LABELS, "reason"),
                registry=registry,
            ),
            counters.THINK_TOKENS: Counter(
                "meridian_think_tokens",
                "Tokens of the thoughts that ended, by reason.",
                (*_LABELS, "reason"),
                registry=registry,
            ),
            counters.VERDICT: Counter(
                "meridian_exit_verdicts",
                "Thoughts that early exit would close, closed or not, by strategy.",
                (*_LABELS, "reason"),
                registry=registry,
            ),
            counters.MEASURED: Counter(
                "meridian_thoughts_measured",
                "Thoughts that ended and had been measured, by mode.",
                (*_LABELS, "mode"),
                registry=registry,
            ),
            counters.EXIT_GIVEN_UP: Counter(
                "meridian_exits_given_up",
                "Closes not carried out, because something would undo them.",
                (*_LABELS, "reason"),
                registry=registry,
            ),
            counters.PROBE: Counter(
                "meridian_probes",
                "Probes of thoughts, by result.",
                (*_LABELS, "result"),
                registry=registry,
            ),
            counters.INVALID: Counter(
                "meridian_invalid_signals",
                "Signals that were no finite numbers, by phase.",
                (*_LABELS, "phase"),
                registry=registry,
            ),
            counters.IGNORED_FIELD: Counter(
                "meridian_ignored_fields",
                "Fields of requests ignored, because requests.allowed_fields does not name them.",
                (*_LABELS, "field"),
                registry=registry,
            ),
            counters.STEP: Counter(
                "meridian_steps",
                "Steps that ran, and steps that the step-time model learnt from.",
                (*_LABELS, "kind"),
                registry=registry,
            ),
        }
        self._requests = Gauge(
            "meridian_requests",
            "Unfinished requests by phase, waiting ones included.",
            (*_LABELS, "phase"),
            registry=registry,
            multiprocess_mode="mostrecent",
        )

    def initialize(self, engine: int, labels: Mapping[str, Iterable[str]]) -> None:
        """Export zeros for an engine before anything happened.

        Args:
            engine: index of the engine.
            labels: per event, the values of its label.
        """
        for event, metric in self._counters.items():
            for label in labels[event]:
                metric.labels(self._model_name, str(engine), label)

    def record(self, stats: Mapping[str, int], engine: int) -> None:
        """Take in one step's ``PhaseCounters.drain()`` and gauges."""
        for key, value in stats.items():
            event, _, label = key.partition(":")
            labels = (self._model_name, str(engine), label)
            if event == counters.REQUESTS:
                self._requests.labels(*labels).set(value)
            else:
                self._counters[event].labels(*labels).inc(value)


def _unregister_earlier(registry: CollectorRegistry) -> None:
    """Drop the metrics of an engine that this process ran before, as vLLM does with its own."""
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith("meridian_"):
            registry.unregister(collector)
