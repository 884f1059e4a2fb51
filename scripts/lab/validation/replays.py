"""Compares replays with a real engine: the same trace, token for token, timed and replayed."""

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
from rich.table import Table

from meridian_patch.bench.figure_table import FIGURES as KINDS
from meridian_patch.bench.figure_table import RequestTimes, Times, figures_of
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.simulated.timed import TimedRequest, TimedRun
from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import CostModel
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import Arrival, play
from meridian_patch.replay.scheduler import read_template_tokens
from meridian_patch.replay.types import (
    ReplayArm,
    ReplayRecord,
    ReplayRequest,
    StepWork,
    TemplateTokens,
)

PREEMPTIONS = "preemptions_per_100"
# Name and label. Preemptions are compared by difference, all others by ratio.
FIGURES: Mapping[str, str] = {
    "ttfat_mean_s": "TTFAT mean, ms",
    "answer_itl_p50_s": "answer ITL p50, ms",
    "answer_itl_p99_s": "answer ITL p99, ms",
    "tokens_per_s": "tokens/s",
    PREEMPTIONS: "preemptions per 100 requests",
}


@dataclass(frozen=True)
class ValidationLoad:
    """What is played: drawn problems of the tiny reasoner, with greedy sampling."""

    seeds: Sequence[int]
    requests: int
    rate_per_s: float
    max_tokens: int


@dataclass(frozen=True)
class ReplayComparison:
    """One trace on one arm.

    Attributes:
        number: of the round; each round has its own engine.
        engine, replay: figures by name.
        steps_s, predicted_steps_s: seconds of all steps of the engine, and those that the cost
            model predicts for them at the engine's pace.
        pace: of the engine, see ``pace``.
    """

    arm: str
    seed: int
    number: int
    engine: dict[str, float]
    replay: dict[str, float]
    steps_s: float
    predicted_steps_s: float
    pace: float

    @property
    def errors(self) -> dict[str, float]:
        """Replay against engine, relative; of preemptions the difference."""
        return {name: _error(name, self.engine[name], self.replay[name]) for name in FIGURES}


def pace(run: TimedRun, name: str, cost: CostModel) -> float:
    """Seconds that an engine took for a play, over what a cost model predicts for its steps.

    It covers what a cost model of other engines does not know: the time of an arm's own code, and
    how fast the machine was while this engine ran.
    """
    steps = run.plays[name].steps
    return sum(seconds for _, seconds in steps) / sum(cost.step_seconds(work) for work, _ in steps)


def compare(
    run: TimedRun, names: Mapping[int, str], arm: ReplayArm, cost: CostModel, number: int = 0
) -> list[ReplayComparison]:
    """Replay what an engine played, and compare.

    All traces of an engine are replayed on one scheduler and in their order, because a policy
    learns from earlier requests. The first trace gives the engine's pace and is not compared.

    Args:
        run: the engine.
        names: of the plays, by the seed of their trace, in the order played.
        arm: that the engine ran.
        cost: fitted to steps of other plays.
        number: of the round.
    """
    template = read_template_tokens()
    own_pace = pace(run, next(iter(names.values())), cost)

    def step_seconds(work: StepWork) -> float:
        return own_pace * cost.step_seconds(work)

    engine = ReplayEngine(
        arm, run.blocks, step_seconds, template, is_async=run.is_async, limits=run.limits
    )
    comparisons = []
    for place, (seed, name) in enumerate(names.items()):
        timed = run.plays[name]
        records = [_record(request, template) for request in timed.requests]
        engine.reset_prefix_cache()
        before = engine.totals.preemptions
        replayed = play(engine, _Recorded(records, engine.now))
        if not place:
            continue
        comparisons.append(
            ReplayComparison(
                arm.name,
                seed,
                number,
                figures(records, timed.preemptions),
                figures(replayed, engine.totals.preemptions - before),
                sum(seconds for _, seconds in timed.steps),
                sum(step_seconds(work) for work, _ in timed.steps),
                own_pace,
            )
        )
    return comparisons


def figures(records: Sequence[ReplayRecord], preemptions: int) -> dict[str, float]:
    """The figures of one run that are compared.

    Raises:
        BenchError: no request has an answer.
    """
    times = Times.of(
        RequestTimes.of(record.arrival_s, record.token_s, record.request.answer_start)
        for record in records
    )
    kinds = [KINDS[name] for name in FIGURES if name in KINDS]
    found = {name: value for name, value in figures_of(times, kinds).items() if value is not None}
    if not times.answer_gaps_s.size:
        raise BenchError("no request of the trace reached its answer; give it more --max-tokens")
    tokens = sum(len(record.token_s) for record in records)
    begin = min(record.arrival_s for record in records)
    end = max(record.token_s[-1] for record in records)
    return {
        **found,
        "tokens_per_s": tokens / (end - begin),
        PREEMPTIONS: 100 * preemptions / len(records),
    }


def mean_figures(
    comparisons: Sequence[ReplayComparison],
) -> tuple[dict[str, float], dict[str, float]]:
    """Median over rounds, then mean over seeds; of the engine and of the replay."""
    return (
        _mean_of([(c.seed, c.engine) for c in comparisons]),
        _mean_of([(c.seed, c.replay) for c in comparisons]),
    )


def mean_errors(comparisons: Sequence[ReplayComparison]) -> dict[str, float]:
    """The replay's error by figure, from ``mean_figures``."""
    engine, replay = mean_figures(comparisons)
    return {name: _error(name, engine[name], replay[name]) for name in FIGURES}


def repeat_spread(comparisons: Sequence[ReplayComparison]) -> dict[str, float] | None:
    """How far the engine's own repeats of a trace are apart; None if there is one round.

    It is (largest - smallest) / median, mean over seeds; of preemptions the difference.
    """
    spreads: dict[str, list[float]] = {name: [] for name in FIGURES}
    for seed in dict.fromkeys(c.seed for c in comparisons):
        rounds = [c.engine for c in comparisons if c.seed == seed]
        if len(rounds) < 2:  # noqa: PLR2004 - one alone has no spread
            return None
        for name, values in spreads.items():
            of_rounds = [of_round[name] for of_round in rounds]
            spread = float(np.ptp(of_rounds))
            values.append(spread if name == PREEMPTIONS else spread / float(np.median(of_rounds)))
    return {name: float(np.mean(values)) for name, values in spreads.items()}


def _by_arm(comparisons: Sequence[ReplayComparison]) -> dict[str, list[ReplayComparison]]:
    names = dict.fromkeys(comparison.arm for comparison in comparisons)
    return {name: [c for c in comparisons if c.arm == name] for name in names}


def validation_table(comparisons: Sequence[ReplayComparison]) -> Table:
    """A row per arm and figure."""
    table = Table("arm", "figure", "engine", "replay", "error", "engine's repeats apart")
    for name, of_arm in _by_arm(comparisons).items():
        engine, replay = mean_figures(of_arm)
        errors, spread = mean_errors(of_arm), repeat_spread(of_arm)
        for figure, label in FIGURES.items():
            scale = 1000 if label.endswith("ms") else 1
            form = "{:+.1f}" if figure == PREEMPTIONS else "{:+.1%}"
            apart = form.format(spread[figure]).lstrip("+") if spread else ""
            shown = [f"{found[figure] * scale:.4g}" for found in (engine, replay)]
            table.add_row(name, label, *shown, form.format(errors[figure]), apart)
    return table


def ratio_table(comparisons: Sequence[ReplayComparison], base: str) -> Table | None:
    """Each arm over ``base``, on the engine and in replay; None if there is nothing to compare."""
    means = {name: mean_figures(of_arm) for name, of_arm in _by_arm(comparisons).items()}
    of_base = means.pop(base, None)
    if of_base is None or not means:
        return None
    table = Table("arm", f"over {base}", "engine", "replay")
    for name, of_arm in means.items():
        for figure, label in FIGURES.items():
            form = "{:+.1f}" if figure == PREEMPTIONS else "{:.3f}"
            pairs = zip(of_arm, of_base, strict=True)
            shown = [form.format(_over(figure, ours[figure], its[figure])) for ours, its in pairs]
            table.add_row(name, label.removesuffix(", ms"), *shown)
    return table


def validation_report(
    comparisons: Sequence[ReplayComparison],
    cost: CostModel,
    load: ValidationLoad,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """The results of a validation as plain data.

    Args:
        comparisons: of all arms, seeds and rounds.
        cost: of the replays.
        load: what was played.
        arguments: of ``vllm.LLM``.
    """
    arms = {}
    for name, of_arm in _by_arm(comparisons).items():
        engine, replay = mean_figures(of_arm)
        steps_s = sum(comparison.steps_s for comparison in of_arm)
        arms[name] = {
            "engine": engine,
            "replay": replay,
            "errors": mean_errors(of_arm),
            "repeats_apart": repeat_spread(of_arm),
            "pace": [comparison.pace for comparison in of_arm],
            "predicted_over_timed_steps": sum(c.predicted_steps_s for c in of_arm) / steps_s,
        }
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["meridian", *sys.argv[1:]]),
        "machine": str(describe_machine()),
        "load": asdict(load),
        "engine": {name: value for name, value in arguments.items() if name != "model"},
        "cost": cost.model_dump(exclude_none=True),
        "arms": arms,
        "comparisons": [asdict(c) | {"errors": c.errors} for c in comparisons],
    }


class _Recorded:
    """A source of requests at the arrival times that an engine had."""

    def __init__(self, records: Iterable[ReplayRecord], begin_s: float) -> None:
        self._arrivals: list[Arrival] = [(begin_s + r.arrival_s, r.request) for r in records]

    def start(self) -> Iterable[Arrival]:
        return self._arrivals

    def follow(self, _record: ReplayRecord) -> Iterable[Arrival]:
        return ()


def _record(request: TimedRequest, template: TemplateTokens) -> ReplayRecord:
    output = request.output
    is_over = template.think_end in output
    answer_start = output.index(template.think_end) + 1 if is_over else len(output)
    return ReplayRecord(
        ReplayRequest(
            request.id, request.prompt, output, answer_start, max_tokens=request.max_tokens
        ),
        request.arrival_s,
        token_s=request.token_s,
    )


def _over(name: str, figure: float, base: float) -> float:
    return figure - base if name == PREEMPTIONS else figure / base


def _error(name: str, engine: float, replay: float) -> float:
    over = _over(name, replay, engine)
    return over if name == PREEMPTIONS else over - 1


def _mean_of(rows: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    by_seed: dict[int, list[dict[str, float]]] = {}
    for seed, row in rows:
        by_seed.setdefault(seed, []).append(row)
    return {
        name: float(np.mean([np.median([r[name] for r in rows]) for rows in by_seed.values()]))
        for name in FIGURES
    }
