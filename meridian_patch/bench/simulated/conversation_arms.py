"""Arms of an ``s-turns`` replay: what is compared with what."""

from dataclasses import asdict

from meridian_patch.bench.simulated.conversations import History
from meridian_patch.errors import BenchError
from meridian_patch.policy.profiles import PROFILES
from meridian_patch.replay.types import ReplayArm

STOCK = "stock"
KNOWS_END = "knows-end"
# Reported beside the arms, not replayed: see ``ReplayRecord.bound_tokens``.
INFINITE = "infinite"

_SET = "MERIDIAN_PATCH_SET_"
# A decision that runs into its time budget falls back to stock: a replay must not depend on that.
_PATIENT = {f"{_SET}POLICY__TIME_BUDGET_US": "10000000"}
# The workload knows what it does with thinking, as an operator does.
_HISTORY_RULES = {
    History.STRIPPED: "strip",
    History.KEPT: "keep",
    History.TOOL_LOOP: "keep_in_tool_loop",
    History.PLAIN: "strip",
}
# Policy noop would switch the tiers off too.
_TIERS_ALONE = {f"{_SET}POLICY__{rule.upper()}": "false" for rule in asdict(PROFILES["latency"])}
_NO_TIERS = {f"{_SET}KV__TIERS": "false"}
# What each arm sets, and what it is in words.
_ARMS: dict[str, tuple[dict[str, str], str]] = {
    "noop": ({f"{_SET}POLICY__NAME": "noop", **_NO_TIERS}, "our classes, deciding as stock"),
    "tiers": (_TIERS_ALONE, "stock order, KV tiers"),
    "latency": (_NO_TIERS, "latency policy, no KV tiers"),
    "meridian": ({}, "latency policy and KV tiers"),
    "no-decay": (
        {f"{_SET}KV__RETAIN_S": "1.0e+9", **_TIERS_ALONE},
        "as tiers, prompts never decay",
    ),
    KNOWS_END: (_TIERS_ALONE, "as tiers, and ended conversations are known: a bound, no server is"),
    "fast-decay": (
        {f"{_SET}KV__RETAIN_S": "30.0", **_TIERS_ALONE},
        "as tiers, prompts decay after 30 s",
    ),
}
ARM_WORDS = {STOCK: "vLLM as it is", **{name: words for name, (_, words) in _ARMS.items()}}
DEFAULT_ARMS = (STOCK, "noop", "tiers", "meridian")


def turns_arm(name: str, history: History) -> ReplayArm:
    """The arm called ``name``, set up for what the workload does with thinking.

    Raises:
        BenchError: there is no such arm.
    """
    if name == STOCK:
        return ReplayArm(STOCK)
    if name not in _ARMS:
        raise BenchError(f"unknown arm {name!r}; known: {', '.join(ARM_WORDS)}")
    settings, _ = _ARMS[name]
    rule = {f"{_SET}KV__HISTORY": _HISTORY_RULES[history]}
    settings = {**_PATIENT, **rule, **settings}
    return ReplayArm(name, True, settings, knows_the_end=name == KNOWS_END)
