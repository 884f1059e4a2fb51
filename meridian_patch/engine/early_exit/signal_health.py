"""Notices that no signals come, so that the scheduler stops asking for them."""

from vllm.logger import init_logger

from meridian_patch.engine import status
from meridian_patch.exit.actions import NO_OBSTACLES, Obstacles
from meridian_patch.exit.obstacles import Obstacle
from meridian_patch.exit.strategies.base import BY_SIGNALS, Reason

logger = init_logger("vllm.meridian_patch")

# Probes in a row that come back without a signal, and probing ends. A step whose measuring failed
# loses its probes, 16 at most by default, and the next one may measure again.
MOST_LOST = 32


class SignalHealth:
    """What came of the signals that were asked for.

    Attributes:
        is_blind: the workers measure nothing at all.
    """

    def __init__(self, *, is_blind: bool) -> None:
        self.is_blind = is_blind
        self._num_lost = 0

    def probed(self, *, is_lost: bool) -> None:
        """A probe ran to its end."""
        self._num_lost = self._num_lost + 1 if is_lost else 0

    def check(self, refusal: str | None, *, is_probing: bool) -> Obstacles:
        """Behind a step: what cannot be carried out any more; said in log and status.

        Args:
            refusal: why the workers measure nothing, as they say; None: they do not say so.
            is_probing: thoughts are probed.

        Returns:
            What is newly found; with ``Reason.EAT`` in it no more thought should be probed.
        """
        if refusal is not None and not self.is_blind:
            self.is_blind = True
            logger.warning("meridian_patch: early exit has no signals, only bounds: %s", refusal)
            status.publish(exit_signals=f"none: {refusal}")
            if is_probing:
                tell_not_probed(refusal)
            return dict.fromkeys(BY_SIGNALS, Obstacle.NO_SIGNALS)
        if is_probing and self._num_lost >= MOST_LOST:
            tell_not_probed(f"{self._num_lost} probes in a row came back without a signal")
            return {Reason.EAT: Obstacle.NO_SIGNALS}
        return NO_OBSTACLES


def tell_not_probed(why: str) -> None:
    """Say in log and status that EAT is off."""
    logger.warning("meridian_patch: EAT is off, thoughts are not probed: %s", why)
    status.publish(probes=f"off: {why}")
