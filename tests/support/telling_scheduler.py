"""A scheduler that sends how each thought ended to its caller, as early exit is to do."""

from meridian_patch.engine import wire
from meridian_patch.engine.scheduler_cls import AsyncPhaseScheduler
from meridian_patch.exit.actions import Outcome
from meridian_patch.exit.base import Reason
from meridian_patch.phase.router import Phase


class TellingScheduler(AsyncPhaseScheduler):
    """Every thought ends by itself."""

    def update_from_output(self, *args, **kwargs):
        thinking = self._in_phase(Phase.THINK)
        outputs = super().update_from_output(*args, **kwargs)
        ended = thinking & self._in_phase(Phase.ANSWER)
        tokens = {name: self.phase_router.get(name).think_tokens for name in ended}
        wire.attach_all(
            outputs, {name: (Outcome(Reason.NATURAL, n, None, 0), n) for name, n in tokens.items()}
        )
        return outputs

    def _in_phase(self, phase: Phase) -> set[str]:
        return {name for name in self.requests if self.phase_router.get(name).phase is phase}
