"""Exports the phase counts with vLLM's own Prometheus logger, in the API server process."""

from typing import Any

from meridian_patch.config.request_fields import RequestFields
from meridian_patch.engine import stats_field
from meridian_patch.exit.obstacles import TO_CLOSES
from meridian_patch.exit.strategies.base import Reason
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.retention import Tier
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback
from meridian_patch.telemetry.prometheus import PhaseMetrics

_TIERS = tuple(tier.label for tier in Tier)
LABELS = {
    counters.PREEMPTION: tuple(Phase),
    counters.FALLBACK: tuple(Fallback),
    counters.PHASE_CHANGE: tuple(Phase),
    counters.EVICTION: _TIERS,
    counters.HIT_TOKENS: (*_TIERS, counters.IN_USE),
    counters.EXIT: tuple(Reason),
    counters.MEASURED: ("observe", "enforce"),
    counters.EXIT_GIVEN_UP: TO_CLOSES,
    counters.THINK_TOKENS: tuple(Reason),
    counters.VERDICT: tuple(Reason),
    counters.PROBE: ("measured", "lost"),
    counters.INVALID: ("think",),
    counters.IGNORED_FIELD: tuple(RequestFields.model_fields),
    counters.STEP: ("ran", "learnt"),
}


def build_prometheus_stat_logger(original: type) -> type:
    """``original`` with the ``meridian_*`` metrics added."""
    stats_field.install()

    class PhasePrometheusStatLogger(original):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, *args, **kwargs)
            self._meridian = PhaseMetrics(vllm_config.model_config.served_model_name)
            for engine in self.engine_indexes:
                self._meridian.initialize(engine, LABELS)

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            stats = getattr(scheduler_stats, stats_field.FIELD, None)
            if stats:
                self._meridian.record(stats, engine_idx)

    return PhasePrometheusStatLogger
