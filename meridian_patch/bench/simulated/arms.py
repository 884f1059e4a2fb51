"""Arms of a comparison: stock, or the patch with a set of settings."""

from collections.abc import Sequence
from typing import get_args

from meridian_patch.bench.simulated.trace import History
from meridian_patch.config.load import load_config
from meridian_patch.config.schema import ExitConfig, PolicyConfig
from meridian_patch.errors import BenchError, ConfigError
from meridian_patch.replay.types import ReplayArm

STOCK = "stock"
POLICIES: tuple[str, ...] = get_args(PolicyConfig.model_fields["name"].annotation)
_SET = "MERIDIAN_PATCH_SET_"
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
    return _patched(name, {"policy.name": name} | ({"exit.mode": "off"} if name == "noop" else {}))


def own_arm(text: str) -> ReplayArm:
    """An arm written as ``NAME:KEY=VALUE,...`` with keys as in a configuration file.

    Raises:
        BenchError: the text has another form, or the configuration refuses a key or value.
    """
    name, colon, rest = text.partition(":")
    settings = [item.partition("=") for item in rest.split(",")]
    if not (name and colon) or not all(key and equals for key, equals, _ in settings):
        raise BenchError(
            f"--arm is {text!r}, expected NAME:KEY=VALUE,... such as "
            "no-tiers:policy.name=latency,kv.tiers=false"
        )
    if name == STOCK:
        raise BenchError(f"--arm {text!r}: {STOCK!r} is vLLM as it is; choose another name")
    return _patched(name, {key.strip(): value.strip() for key, _, value in settings})


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
        f"{_SET}POLICY__TIME_BUDGET_US": _TIME_BUDGET_US,
        f"{_SET}KV__HISTORY": _HISTORY_RULES[history],
        f"{_SET}EXIT__MODE": _SHIPPED_EXIT,
        **arm.settings,
    }


def _patched(name: str, values: dict[str, str]) -> ReplayArm:
    settings = {_SET + key.upper().replace(".", "__"): value for key, value in values.items()}
    try:
        mode = load_config(settings).config.exit.mode
    except ConfigError as error:
        raise BenchError(f"arm {name!r}: {error}") from error
    if mode == "enforce":
        raise BenchError(
            f"arm {name!r}: exit.mode is 'enforce', expected 'observe' or 'off': a replayed "
            "request says what its trace says, so no thought can be closed early"
        )
    return ReplayArm(name, True, settings)
