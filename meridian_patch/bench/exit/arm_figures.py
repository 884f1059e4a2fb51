"""Figures of each arm, against the natural thoughts of the same problems."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meridian_patch.bench.exit.arms import NATURAL
from meridian_patch.bench.exit.run import ExitArmRun, Result
from meridian_patch.bench.statistics import Interval, clopper_pearson, ratio_of_sums

# Largest loss of accuracy at which a fixed budget counts as good, in percentage points.
TOLERANCE_PP = 0.5
_RISK = 0.05


class Figures(NamedTuple):
    """One arm; intervals are 95 %, by bootstrap over problems, which are paired with natural's.

    Attributes:
        think_tokens: per problem.
        think_ratio: think tokens over natural's; None where natural was not run on the engine.
        accuracy: share of right answers.
        difference_pp: accuracy less natural's, in percentage points.
        lost: problems that natural has right, and this arm has not.
        won: the other way round.
        lost_bound: least upper bound of the share that is lost, exact, with confidence 0.95.
        reasons: thoughts by what ended them, as callers are told.
        probes: probes that ran, per problem.
        probe_tokens: tokens that they computed, per problem.
    """

    stage: str
    arm: str
    problems: int
    think_tokens: float
    think_ratio: float | None
    think_ratio_interval: Interval | None
    accuracy: float
    difference_pp: float | None
    difference_pp_interval: Interval | None
    lost: int | None
    won: int | None
    lost_bound: float | None
    reasons: Mapping[str, int]
    probes: float
    probe_tokens: float
    preemptions: int
    accepted_drafts: int
    violations: Mapping[str, int]
    seconds: float


def figures_of(run: ExitArmRun, natural: ExitArmRun | None) -> Figures:
    """Figures of one arm.

    Args:
        run: the arm.
        natural: the arm that ends nothing, on the same problems; None: not run.
    """
    results, totals, count = run.results, run.totals, len(run.results)
    compared = _compare(run.results, natural.results) if natural is not None else {}
    values: dict[str, Any] = dict.fromkeys(Figures._fields) | compared
    return Figures(
        **values
        | {
            "stage": run.stage,
            "arm": run.arm.name,
            "problems": count,
            "think_tokens": sum(result.think_tokens for result in results) / count,
            "accuracy": sum(result.is_right for result in results) / count,
            "reasons": dict(Counter(result.reason for result in results if result.reason)),
            "probes": totals.get("probes", 0) / count,
            "probe_tokens": totals.get("probe_tokens", 0) / count,
            "preemptions": sum(n for name, n in totals.items() if name.startswith("preemption:")),
            "accepted_drafts": totals.get("accepted", 0),
            "violations": dict(Counter(each.rule for each in run.violations)),
            "seconds": run.seconds,
        }
    )


def best_fixed(figures: Sequence[Figures], kind: str) -> Figures | None:
    """The fixed budget with the fewest tokens whose accuracy is natural's, within the tolerance.

    Args:
        figures: of all arms on the same problems.
        kind: ``cap`` for ours, ``budget`` for vLLM's.
    """
    good = [
        each
        for each in figures
        if each.arm.startswith(f"{kind} ")
        and each.difference_pp is not None
        and each.difference_pp >= -TOLERANCE_PP
    ]
    return min(good, key=lambda each: each.think_tokens, default=None)


def all_figures(runs: Sequence[ExitArmRun], problems_of: Mapping[str, str]) -> list[Figures]:
    """Figures of all arms.

    Args:
        runs: all arms; those of one set of problems share a natural one.
        problems_of: by stage, the set of problems that it had.
    """
    natural = {problems_of[run.stage]: run for run in runs if run.arm.kind == NATURAL}
    return [figures_of(run, natural.get(problems_of[run.stage])) for run in runs]


def _compare(ours: Sequence[Result], natural: Sequence[Result]) -> dict[str, Any]:
    tokens = np.array([[r.think_tokens for r in side] for side in (ours, natural)], np.float64)
    right = np.array([[r.is_right for r in side] for side in (ours, natural)], np.float64)
    changes = right[0] - right[1]
    lost = int((changes < 0).sum())
    think_ratio, think_interval = ratio_of_sums(tokens[0], tokens[1])
    difference_pp, difference_interval = ratio_of_sums(100 * changes)
    return {
        "think_ratio": think_ratio,
        "think_ratio_interval": think_interval,
        "difference_pp": difference_pp,
        "difference_pp_interval": difference_interval,
        "lost": lost,
        "won": int((changes > 0).sum()),
        "lost_bound": clopper_pearson(lost, len(ours), _RISK),
    }
