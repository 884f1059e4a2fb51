"""Detects that signals do not arrive, so that the scheduler stops asking for them."""

from vllm.logger import init_logger

from meridian_patch.engine import status
from meridian_patch.exit.actions import NO_OBSTACLES, Obstacle, Obstacles
from meridian_patch.exit.strategies.build import BY_PROBES, BY_SIGNALS
from meridian_patch.telemetry.counters import PROBING_STOPPED, PhaseCounters

logger = init_logger("vllm.meridian_patch")

# Probing ends after so many probes in a row without a signal. It is more than one step can lose: a
# step whose measuring failed loses its probes, at most 16 by default, and the next may succeed.
MOST_LOST = 32


class SignalHealth:
    """Counts lost signals, and notes a worker's refusal to measure.

    Args:
        counters: counts that probing came to an end.
        is_blind: the workers measure nothing from the start.

    Attributes:
        is_blind: the workers measure nothing.
    """

    def __init__(self, counters: PhaseCounters, *, is_blind: bool) -> None:
        self._counters = counters
        self.is_blind = is_blind
        self._num_lost = 0

    def probed(self, *, is_lost: bool) -> None:
        """Count a probe that ended without being aborted."""
        self._num_lost = self._num_lost + 1 if is_lost else 0

    def check(self, refusal: str | None, *, is_probing: bool) -> Obstacles:
        """After a step: find what can no longer be carried out; report it in log, status, metric.

        Args:
            refusal: the workers' reason for measuring nothing; None: they have given none.
            is_probing: thoughts are probed.

        Returns:
            New obstacles by strategy; if those that need probes are among them, probing
            must stop.
        """
        if refusal is not None and not self.is_blind:
            self.is_blind = True
            logger.warning("meridian_patch: early exit has no signals, only bounds: %s", refusal)
            status.publish(exit_signals=f"none: {refusal}")
            if is_probing:
                self._counters.count(PROBING_STOPPED, "refused")
                report_not_probed(refusal)
            return dict.fromkeys(BY_SIGNALS, Obstacle.NO_SIGNALS)
        if is_probing and self._num_lost >= MOST_LOST:
            self._counters.count(PROBING_STOPPED, "lost")
            report_not_probed(f"{self._num_lost} probes in a row came back without a signal")
            return dict.fromkeys(BY_PROBES, Obstacle.NO_SIGNALS)
        return NO_OBSTACLES


def report_not_probed(why: str) -> None:
    """Report in log and status that EAT is off."""
    logger.warning("meridian_patch: EAT is off, thoughts are not probed: %s", why)
    status.publish(probes=f"off: {why}")
