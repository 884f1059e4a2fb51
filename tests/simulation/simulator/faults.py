"""What goes wrong around an engine: drawn per tick from the seed, alike for every arm."""

import random
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from simulator.axes import Case
from simulator.engine import Arm

# Methods of ours that are made to fail; each must exist.
HOOKS = (
    "policy_parts.cut.before_schedule", "policy_parts.first.after_schedule",
    "policy_parts.timing.before_update", "policy_parts.cut.on_phase_changed",
    "policy_parts.queue.on_added", "policy_parts.review.on_freed",
    "policy_parts.order.order.arrange",
    "phase_tracker.observe", "early_exit.arrange", "early_exit.after_schedule",
    "early_exit.signals.receive",
    "early_exit.follow_step", "early_exit.on_phase_changed", "early_exit.on_freed",
)  # fmt: skip

# Of early exit, from the least on.
MODES = ("off", "observe", "enforce")


class InjectedError(Exception):
    """A hook of ours fails on purpose."""


class Faults:
    """The faults of one arm.

    Attributes:
        num_raised: hooks that failed so far.
        is_policy_off: the last switch of the policy was to ``noop``.
    """

    def __init__(self, case: Case, arm: Arm) -> None:
        self._case = case
        self._arm = arm
        self._rng = random.Random(f"faults {case.seed}")
        self._paused_until = 0
        self._lost_until = 0
        self._armed: str | None = None
        self.num_raised = 0
        self.is_policy_off = False
        # What each fault did, for the report.
        self.met: dict[str, int] = {}
        if case.has_fault("raises") and not arm.is_stock:
            for path in HOOKS:
                self._hook(path)
        connector = arm.scheduler.connector
        if case.has_fault("load_failure"):
            draws = random.Random(f"loads {case.seed}")
            connector.fails = lambda: draws.random() < 0.3
            connector.failed = arm.ledger.failed_loads

    @property
    def is_paused(self) -> bool:
        return self._arm.tick < self._paused_until

    def before_step(self) -> None:
        """Faults of one tick."""
        case, rng, arm = self._case, self._rng, self._arm
        # Always the same number of draws: a fault that is switched off moves no other.
        draws = [rng.random() for _ in range(10)]
        pick = rng.random()
        is_on = arm.tick < 2 * case.steps
        if self._paused_until == arm.tick:
            arm.scheduler.set_pause_state(PauseState.UNPAUSED)
        if case.has_fault("abort") and draws[0] < 0.02 and is_on:
            self._abort(pick)
        if case.has_fault("reset") and draws[1] < 0.03 and is_on:
            self._reset(running=pick < 0.7)
        if case.has_fault("pause") and draws[2] < 0.005 and is_on and not self.is_paused:
            self._pause(PauseState.PAUSED_ALL if pick < 0.5 else PauseState.PAUSED_NEW, 10)
        if case.has_fault("sleep") and draws[3] < 0.002 and is_on and not self.is_paused:
            self._sleep()
        if case.has_fault("late") and draws[4] < 0.02:
            self._count("late")
            arm.clock.now += 0.3 if pick < 0.9 else 40.0
        if draws[5] < 0.01:
            self._lost_until = arm.tick + 5
        is_lossy = arm.tick < self._lost_until
        arm.workers.loses_probes = case.has_fault("lost_probe") and is_lossy
        arm.workers.loses_signals = case.has_fault("empty") and is_lossy
        arm.entropies.is_nan = case.has_fault("nan")
        if case.has_fault("empty") and draws[6] < 0.02 and not arm.is_drained:
            # The core wakes up although there is nothing to be done.
            self._count("empty")
        if not arm.is_stock:
            self._armed = None
            self._of_ours(draws[7], draws[8] if is_on else 1.0, pick)

    def _of_ours(self, raises: float, switches: float, pick: float) -> None:
        """Faults of what stock does not have."""
        if self._case.switch and switches < 0.02:
            self._switch(pick)
        if self._case.has_fault("raises") and raises < 0.03:
            self._armed = HOOKS[int(pick * len(HOOKS))]

    def _count(self, name: str) -> None:
        self.met[name] = self.met.get(name, 0) + 1

    def _abort(self, pick: float) -> None:
        names = [record.ask.name for record in self._arm.live()]
        if names:
            self._count("abort")
            self._arm.abort([names[int(pick * len(names))]])

    def _reset(self, *, running: bool) -> None:
        scheduler = self._arm.scheduler
        self._count("reset")
        is_held = any(r.num_computed_tokens for r in scheduler.kv_holding_waiting)
        is_held |= any(
            r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in scheduler.kv_holding_waiting
        )
        is_held |= bool(scheduler.deferred_frees) or scheduler.connector is not None
        # Load-bearing: upstream fails where blocks are held by what does not run.
        scheduler.reset_prefix_cache(reset_running_requests=running and not is_held)

    def _pause(self, state: PauseState, ticks: int) -> None:
        self._count("pause")
        self._arm.scheduler.set_pause_state(state)
        self._paused_until = self._arm.tick + ticks

    def _sleep(self) -> None:
        """As ``EngineCore.sleep`` with its default mode: everybody is aborted, caches are reset."""
        self._count("sleep")
        arm = self._arm
        arm.abort(None)
        arm.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        arm.deliver_all()
        if arm.scheduler.connector is None and not arm.scheduler.deferred_frees:
            arm.scheduler.reset_prefix_cache(reset_running_requests=True)
            arm.scheduler.reset_encoder_cache()
        self._paused_until = arm.tick + 15

    def _switch(self, pick: float) -> None:
        """As an operator, by ``meridian policy set``: off more often than on."""
        switch = self._arm.scheduler.live_switch
        started_as = switch.in_force()["started_as"].partition(",")[0]
        policy = ("noop", "noop", started_as, None)[int(4 * pick)]
        wanted = (*MODES, None)[int(16 * pick) % 4]
        if policy is not None:
            self.is_policy_off = policy == "noop"
        # An engine is given no more than it was started with.
        if wanted is not None and MODES.index(wanted) <= MODES.index(self._case.exit):
            self._arm.ledger.switch_exit(wanted)
        if "refused" not in switch.turn(policy, wanted):
            self._count("switch")

    def _hook(self, path: str) -> None:
        *owners, name = path.split(".")
        owner: Any = self._arm.scheduler
        for each in owners:
            owner = getattr(owner, each)
            if owner is None:
                return
        original = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if self._armed == path:
                self._armed = None
                self.num_raised += 1
                self._count("raises")
                raise InjectedError(path)
            return original(*args, **kwargs)

        setattr(owner, name, failing)
        # Hooks are looked up once.
        self._arm.scheduler._parts._find_hooks()
