"""Arms of a comparison: stock, or the patch with a set of settings."""

from collections.abc import Sequence

from meridian_patch.bench.arms import POLICIES, STOCK, load_arm_config, override, parse_arm
from meridian_patch.bench.simulated.trace import History
from meridian_patch.config.schema import ExitConfig
from meridian_patch.errors import BenchError
from meridian_patch.replay.types import ReplayArm

# The rule that fits the workload, as an operator would set it for a chat template.
_HISTORY_RULES = {
    History.STRIPPED: "strip",
    History.KEPT: "keep",
    History.TOOL_LOOP: "keep_in_tool_loop",
    History.PLAIN: "strip",
}
# A decision that exceeds its time budget falls back to stock. A replay must not depend on how fast
# this machine is, so the budget is never reached.
_TIME_BUDGET_US = "10000000"
_SHIPPED_EXIT: str = ExitConfig.model_fields["mode"].default


def named_arm(name: str) -> ReplayArm:
    """``stock``, or a policy by its name with all other settings at their defaults.

    ``noop`` has early exit off too: it shows that the patch alone changes no decision.

    Raises:
        BenchError: there is no such policy.
    """
    if name == STOCK:
        return ReplayArm(STOCK)
    if name not in POLICIES:
        raise BenchError(
            f"--arms: unknown arm {name!r}; known: {', '.join((STOCK, *POLICIES))}. An arm of "
            "your own is given as --arm NAME:KEY=VALUE,..."
        )
    return _patched(
        name, override({"policy.name": name} | ({"exit.mode": "off"} if name == "noop" else {}))
    )


def own_arm(text: str) -> ReplayArm:
    """An arm written as ``NAME:KEY=VALUE,...`` with keys as in a configuration file.

    Raises:
        BenchError: the text has another form, or the configuration refuses a key or value.
    """
    return _patched(*parse_arm(text, {STOCK}))


def choose_arms(names: str, own: Sequence[str]) -> list[ReplayArm]:
    """Stock, then the arms of ``--arms``, then those of ``--arm``.

    Raises:
        BenchError: an arm is unknown or wrong, or two have one name.
    """
    arms = [named_arm(name) for name in dict.fromkeys((STOCK, *filter(None, names.split(","))))]
    for arm in map(own_arm, own):
        if arm.name in {other.name for other in arms}:
            raise BenchError(f"--arm: there are two arms called {arm.name!r}; rename one")
        arms.append(arm)
    return arms


def arm_settings(arm: ReplayArm, history: History) -> dict[str, str]:
    """The arm's settings in a replay of a workload with this history."""
    if not arm.is_patched:
        return {}
    return {
        **override(
            {
                "policy.time_budget_us": _TIME_BUDGET_US,
                "kv.history": _HISTORY_RULES[history],
                "exit.mode": _SHIPPED_EXIT,
            }
        ),
        **arm.settings,
    }


def _patched(name: str, settings: dict[str, str]) -> ReplayArm:
    mode = load_arm_config(name, settings).exit.mode
    if mode == "enforce":
        raise BenchError(
            f"arm {name!r}: exit.mode is 'enforce', expected 'observe' or 'off': a replayed "
            "request says what its trace says, so no thought can be closed early"
        )
    return ReplayArm(name, True, settings)
