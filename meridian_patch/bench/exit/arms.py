"""The arms of ``meridian bench exit``: what ends a thought, and on which engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NATURAL, EAT, EAT_RPDI = "natural", "eat", "eat+rpdi"
CAP, BUDGET = "cap", "budget"
NGRAM, PRESSED = "ngram", "pressed"
SECOND = "second"

_OFF = {"meridian_exit": "off"}
_ENFORCE = {"meridian_exit": "enforce"}


@dataclass(frozen=True)
class ExitArm:
    """One way to end thoughts.

    Attributes:
        name: shown and stored.
        kind: arms of one kind are points of one curve.
        params: of ``SamplingParams``, beside temperature, seed and length.
        tokens: the bound that it sets; None: it sets none.
    """

    name: str
    kind: str
    params: Mapping[str, Any]
    tokens: int | None = None


@dataclass(frozen=True)
class Stage:
    """One engine and the arms that are run on it.

    Attributes:
        name: shown, and of its log file.
        arms: in order.
        problems: which set they get: ``main`` or ``second``, or the few of the special stages.
        engine: arguments of ``vllm.LLM`` in place of the usual ones.
        settings: of section ``exit`` in place of the profile's.
        temperature: of all requests.
        is_seeded: every request has the same seed in every arm, so that thoughts are equal up to
            where they are ended.
        needs_budget: vLLM's own thinking budget is switched on.
    """

    name: str
    arms: Sequence[ExitArm]
    problems: str = "main"
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 1.0
    is_seeded: bool = True
    needs_budget: bool = False


def natural() -> ExitArm:
    """No thought is ended early."""
    return ExitArm(NATURAL, NATURAL, {"extra_args": _OFF})


def eat() -> ExitArm:
    """EAT, with the profile's thresholds."""
    return ExitArm(EAT, EAT, {"extra_args": _ENFORCE})


def eat_rpdi(threshold: float) -> ExitArm:
    """The same with RPDI beside EAT."""
    return ExitArm(
        EAT_RPDI, EAT_RPDI, {"extra_args": _ENFORCE | {"meridian_rpdi_lambda": threshold}}
    )


def cap(tokens: int) -> ExitArm:
    """Our own fixed budget of think tokens."""
    return ExitArm(
        f"{CAP} {tokens}",
        CAP,
        {"extra_args": _ENFORCE | {"meridian_max_think_tokens": tokens}},
        tokens,
    )


def budget(tokens: int) -> ExitArm:
    """The fixed budget that vLLM itself has."""
    return ExitArm(
        f"{BUDGET} {tokens}", BUDGET, {"extra_args": _OFF, "thinking_token_budget": tokens}, tokens
    )


def plan_stages(budgets: Sequence[int], rpdi_threshold: float, pool_blocks: int) -> list[Stage]:
    """All engines of the comparison, in order.

    Args:
        budgets: think tokens of the fixed budgets.
        rpdi_threshold: of the arm with RPDI.
        pool_blocks: KV blocks of the engine under pressure.
    """
    ours = [natural(), eat(), eat_rpdi(rpdi_threshold)]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    small = {"num_gpu_blocks_override": pool_blocks, "max_num_seqs": 32}
    some_cap = cap(sorted(budgets)[len(budgets) // 2])
    return [
        Stage("exits", ours),
        Stage(
            "bounds",
            [*map(cap, budgets), *map(budget, budgets)],
            # A cap looks for a line's end before it; EAT's profile may close in mid-line.
            settings={"eat": "false", "rpdi": "false", "grace_tokens": "64"},
            needs_budget=True,
        ),
        Stage(SECOND, [natural(), eat()], problems=SECOND),
        # Load-bearing: vLLM's CPU build is only right when all drafts are greedy.
        Stage(
            NGRAM,
            [eat(), some_cap],
            problems="few",
            engine={"speculative_config": speculation},
            temperature=0.0,
            is_seeded=False,
        ),
        # Without seeds: a preempted request is computed again in pieces, which changes its logits'
        # last bits.
        Stage(PRESSED, [eat(), some_cap], problems="few", engine=small, is_seeded=False),
    ]
