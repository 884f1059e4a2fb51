"""Switches the policy and early exit of a running engine, between two of its steps."""

import sys
from typing import TYPE_CHECKING, Any, Final, get_args

from vllm.logger import init_logger

from meridian_patch.config.policy import PolicyName
from meridian_patch.config.schema import ExitMode
from meridian_patch.engine import status, wire
from meridian_patch.engine.scheduler.parts import Parts
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from meridian_patch.engine.scheduler.assembly import Policy
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

logger = init_logger("vllm.meridian_patch")


_MODES: Final = get_args(ExitMode)


class LiveSwitch:
    """Turns the policy off and on again, and sets the mode of early exit.

    Off, each step is one of those for which no request competes: the parts of the policy follow
    all requests, and arrange none. KV tiers and hand-off stay as they are.

    Args:
        scheduler: the phase-aware scheduler.
        parts: its parts, of which the circuit breaker may have switched some off.
        policy: its policy.
        started_as: the policy to switch back to; ``noop`` where no rule is on.
        phase_counters: count the switches.
    """

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        parts: Parts,
        policy: "Policy",
        started_as: PolicyName,
        phase_counters: PhaseCounters,
    ) -> None:
        self._scheduler = scheduler
        self._parts = parts
        self._policy = policy
        self._counters = phase_counters
        early_exit = scheduler.early_exit
        self._started_as = started_as
        self._most: ExitMode = early_exit.config.mode if early_exit else "off"

    def in_force(self) -> dict[str, str | int]:
        """What is in force: the policy, and the mode of early exit; how both were started.

        ``rank`` is the engine's among data-parallel ones.
        """
        scheduler, early_exit = self._scheduler, self._scheduler.early_exit
        return {
            "rank": int(scheduler.vllm_config.parallel_config.data_parallel_index),
            "policy": "noop" if self._is_off else self._started_as,
            "exit": early_exit.config.mode if early_exit else "off",
            "started_as": f"{self._started_as}, {self._most}",
        }

    def turn(self, policy: PolicyName | None, exit_mode: ExitMode | None) -> dict[str, str | int]:
        """Switch both; None leaves one as it is.

        Returns:
            As ``in_force``; with ``refused`` what was not switched, and why: an engine is never
            given more than it was started with.
        """
        before, refused = self.in_force(), []
        if policy is not None and policy not in self._allowed():
            refused.append(f"policy is {policy!r}, expected {self._allowed()[0]!r}")
        elif policy is not None:
            self._turn_policy(off=policy == "noop")
        if exit_mode is not None and _MODES.index(exit_mode) > _MODES.index(self._most_now()):
            refused.append(f"exit is {exit_mode!r}, expected at most {self._most_now()!r}")
        elif exit_mode not in {None, before["exit"]} and self._scheduler.early_exit is not None:
            self._scheduler.early_exit.set_mode(exit_mode)
        after = self.in_force()
        for name in ("policy", "exit"):
            if after[name] != before[name]:
                self._counters.count(counters.SWITCHED, f"{name} {after[name]}")
                logger.warning(
                    "meridian_patch: %s switched from %s to %s while the engine runs",
                    *(name, before[name], after[name]),
                )
        rules = [] if self._is_off else self._policy.rules.names_on
        status.publish(policy=after["policy"], exit=after["exit"], rules=rules)
        return after | ({"refused": "; ".join(refused)} if refused else {})

    @property
    def _is_off(self) -> bool:
        return self._policy.stock_steps.are_all or self._is_broken

    @property
    def _is_broken(self) -> bool:
        """Whether the circuit breaker has switched the policy off."""
        return counters.POLICY in self._parts.off

    def _allowed(self) -> list[PolicyName]:
        return ["noop"] if self._is_broken else ["noop", self._started_as]

    def _most_now(self) -> ExitMode:
        return self._most if self._scheduler.early_exit else "off"

    def _turn_policy(self, *, off: bool) -> None:
        scheduler, policy = self._scheduler, self._policy
        if off == policy.stock_steps.are_all or self._is_broken or policy.rules.are_all_off:
            return
        policy.stock_steps.are_all = off
        # No thinker is held any more for the request that it was to make room for.
        scheduler.request_states.held.clear()
        if policy.displacing is not None:
            policy.displacing.on_switched_off()
        if off:
            policy.waiting_order.sort_by_arrival(scheduler.waiting, scheduler.clock())
            scheduler.running = policy.order.order.as_admitted(scheduler.running)


def install() -> None:
    """Give EngineCore the method by which its clients switch."""
    # A scheduler without an engine core, as in a replay, has no clients.
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        # Load-bearing: EngineCore looks a utility method up by its name when a client calls it. A
        # subclass would come too late: the process has chosen its class by then.
        setattr(core.EngineCore, wire.SWITCH, _switch)


def _switch(
    core: Any, policy: PolicyName | None, exit_mode: ExitMode | None
) -> dict[str, str | int]:
    switch: LiveSwitch = core.scheduler.live_switch
    return switch.turn(policy, exit_mode)
