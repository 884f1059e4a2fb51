"""Switches the policy and early exit of a running engine, between two of its steps."""

import sys
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from meridian_patch.config.policy import PolicyName
from meridian_patch.config.schema import ExitMode
from meridian_patch.engine import status, wire
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from meridian_patch.engine.scheduler.assembly import Policy
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

logger = init_logger("vllm.meridian_patch")


class LiveSwitch:
    """Turns the policy off and on again, and sets the mode of early exit.

    Off, each step is one of those for which no request competes: the parts of the policy follow
    all requests, and arrange none. The KV tiers stay as they are.

    Args:
        scheduler: the phase-aware scheduler.
        policy: its policy.
        started_as: the configured policy.
        phase_counters: count the switches.
    """

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        policy: "Policy",
        started_as: PolicyName,
        phase_counters: PhaseCounters,
    ) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self._started_as = started_as
        self._counters = phase_counters

    def in_force(self) -> dict[str, str]:
        """What is in force: the policy, the mode of early exit, and the policy at the start."""
        early_exit, started_as = self._scheduler.early_exit, self._started_as
        return {
            "policy": "noop" if self._policy.stock_steps.are_all else started_as,
            "exit": early_exit.config.mode if early_exit else "off",
            "started_as": started_as,
        }

    def turn(self, policy: PolicyName | None, exit_mode: ExitMode | None) -> dict[str, str]:
        """Switch both; None leaves one as it is.

        Returns:
            As ``in_force``.

        Raises:
            ValueError: this engine was started without what is asked for; nothing was switched.
        """
        early_exit, before = self._scheduler.early_exit, self.in_force()
        if policy not in {None, "noop", self._started_as}:
            raise ValueError(
                f"policy is {policy!r}, expected 'noop': the engine was started with that policy"
            )
        if exit_mode not in {None, "off"} and early_exit is None:
            raise ValueError(f"exit is {exit_mode!r}, expected 'off': the engine has no early exit")
        if policy is not None:
            self._policy.stock_steps.are_all = policy != self._started_as
            # Where requests waited by level, they go on in the order in which they came.
            if self._policy.stock_steps.are_all:
                self._policy.waiting_order.sort_by_arrival(self._scheduler.waiting)
        if exit_mode is not None and early_exit is not None:
            early_exit.set_mode(exit_mode)
        after = self.in_force()
        for name in ("policy", "exit"):
            if after[name] != before[name]:
                self._counters.count(counters.SWITCHED, f"{name} {after[name]}")
                logger.warning(
                    "meridian_patch: %s switched from %s to %s while the engine runs",
                    *(name, before[name], after[name]),
                )
        rules = [] if self._policy.stock_steps.are_all else self._policy.rules.names_on
        status.publish(policy=after["policy"], exit=after["exit"], rules=rules)
        return after


def install() -> None:
    """Give EngineCore the method by which its clients switch."""
    # A scheduler without an engine core, as in a replay, has no clients.
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        # Load-bearing: EngineCore looks a utility method up by its name when a client calls it. A
        # subclass would come too late: the process has chosen its class by then.
        setattr(core.EngineCore, wire.SWITCH, _switch)


def _switch(core: Any, policy: PolicyName | None, exit_mode: ExitMode | None) -> dict[str, str]:
    switch: LiveSwitch = core.scheduler.live_switch
    return switch.turn(policy, exit_mode)
