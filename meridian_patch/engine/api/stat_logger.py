"""Exports the phase counts with vLLM's own Prometheus logger, in the API server process."""

from importlib.metadata import version
from typing import Any

from meridian_patch import envs
from meridian_patch.engine import stats_field, wire
from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.telemetry import counters, handoffs
from meridian_patch.telemetry.prometheus import PhaseMetrics

_EXPORTS = ApiGuard("metrics of a step were not exported")


def build_prometheus_stat_logger(original: type) -> type:
    """``original`` with the ``meridian_*`` metrics added."""
    stats_field.install()

    class PhasePrometheusStatLogger(original):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, *args, **kwargs)
            self._meridian = PhaseMetrics(vllm_config.model_config.served_model_name)
            for engine in self.engine_indexes:
                self._meridian.initialize(engine)
                info = f"{counters.INFO}:{version(envs.PLUGIN_NAME)}"
                self._meridian.record({info: 1}, engine)

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            stats = getattr(scheduler_stats, wire.COUNTS, None)
            if stats:
                with _EXPORTS:
                    self._meridian.record(stats, engine_idx)
            with _EXPORTS:
                events, gaps = handoffs.OF_THIS_PROCESS.drain()
                self._meridian.record(events, engine_idx)
                self._meridian.observe(gaps, engine_idx)
            times = getattr(iteration_stats, wire.TIMES, None)
            if times is not None:
                with _EXPORTS:
                    self._meridian.record(times.counts(), engine_idx)
                    self._meridian.observe(times.values, engine_idx)

    return PhasePrometheusStatLogger
