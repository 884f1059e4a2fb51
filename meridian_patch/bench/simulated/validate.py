"""Compares the lab with a real engine: the same trace, token for token, timed and replayed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meridian_patch.bench.simulated.cost import CostModel
from meridian_patch.bench.simulated.metrics import answer_gaps
from meridian_patch.bench.simulated.timed import TimedRequest, TimedRun
from meridian_patch.errors import BenchError
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import Arrival, play
from meridian_patch.replay.scheduler import read_markers
from meridian_patch.replay.types import (
    Markers,
    ReplayArm,
    ReplayRecord,
    ReplayRequest,
    StepWork,
)

PREEMPTIONS = "preemptions_per_100"
# Key and what a reader sees. Preemptions are compared by difference, all others by ratio.
FIGURES: Mapping[str, str] = {
    "ttfat_mean_s": "TTFAT mean, ms",
    "answer_itl_p50_s": "answer ITL p50, ms",
    "answer_itl_p99_s": "answer ITL p99, ms",
    "tokens_per_s": "tokens/s",
    PREEMPTIONS: "preemptions per 100 requests",
}


@dataclass(frozen=True)
class Comparison:
    """One trace on one arm.

    Attributes:
        number: of the round: each has an engine of its own.
        engine, replay: figures by name.
        steps_s, predicted_steps_s: the engine's steps in all, and what the cost model says of
            each of them at the engine's pace.
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
    """Seconds that an engine took for a play, over what a cost model says of the same steps.

    It holds what a cost model of other engines does not know: the time of an arm's own code, and
    the machine's mood while this engine ran.
    """
    steps = run.plays[name].steps
    return sum(seconds for _, seconds in steps) / sum(cost.step_seconds(work) for work, _ in steps)


def compare(
    run: TimedRun, names: Mapping[int, str], arm: ReplayArm, cost: CostModel, number: int = 0
) -> list[Comparison]:
    """Replay what an engine played, and compare.

    All traces of an engine are replayed on one scheduler and in their order, for a policy learns
    from what it has seen. The first trace is not compared: the engine's pace is taken from it.

    Args:
        run: the engine.
        names: of the plays, by the seed of their trace, in the order played.
        arm: that the engine ran.
        cost: from steps of other plays, perhaps of other engines.
        number: of the round.
    """
    markers = read_markers()
    own_pace = pace(run, next(iter(names.values())), cost)

    def step_seconds(work: StepWork) -> float:
        return own_pace * cost.step_seconds(work)

    engine = ReplayEngine(
        arm, run.blocks, step_seconds, markers, is_async=run.is_async, limits=run.limits
    )
    comparisons = []
    for place, (seed, name) in enumerate(names.items()):
        timed = run.plays[name]
        records = [_record(request, markers) for request in timed.requests]
        engine.reset_prefix_cache()
        before = engine.totals.preemptions
        replayed = play(engine, _Recorded(records, engine.now))
        if not place:
            continue
        comparisons.append(
            Comparison(
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
    """What is compared of one run."""
    gaps = answer_gaps(records)
    waits = [r.token_s[r.request.answer_start] - r.arrival_s for r in answered(records)]
    if not (gaps.size and waits):
        raise BenchError("no request of the trace reached its answer; give it more --max-tokens")
    tokens = sum(len(record.token_s) for record in records)
    begin = min(record.arrival_s for record in records)
    end = max(record.token_s[-1] for record in records)
    return {
        "ttfat_mean_s": float(np.mean(waits)),
        "answer_itl_p50_s": float(np.quantile(gaps, 0.5)),
        "answer_itl_p99_s": float(np.quantile(gaps, 0.99)),
        "tokens_per_s": tokens / (end - begin),
        PREEMPTIONS: 100 * preemptions / len(records),
    }


def answered(records: Iterable[ReplayRecord]) -> list[ReplayRecord]:
    """Those that got beyond thinking."""
    return [record for record in records if record.request.answer_start < len(record.token_s)]


def mean_figures(comparisons: Sequence[Comparison]) -> tuple[dict[str, float], dict[str, float]]:
    """Median over rounds, then mean over seeds: of the engine and of the replay."""
    return (
        _mean_of([(c.seed, c.engine) for c in comparisons]),
        _mean_of([(c.seed, c.replay) for c in comparisons]),
    )


def mean_errors(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """The replay's error by figure, of ``mean_figures``."""
    engine, replay = mean_figures(comparisons)
    return {name: _error(name, engine[name], replay[name]) for name in FIGURES}


def ratios(
    comparisons: Sequence[Comparison], base: Sequence[Comparison]
) -> dict[str, tuple[float, float]]:
    """An arm over another by figure: on the engine, and in replay; of preemptions differences."""
    own, others = mean_figures(comparisons), mean_figures(base)
    return {
        name: (
            _over(name, own[0][name], others[0][name]),
            _over(name, own[1][name], others[1][name]),
        )
        for name in FIGURES
    }


def repeat_spread(comparisons: Sequence[Comparison]) -> dict[str, float] | None:
    """How far the engine's own repeats of a trace are apart; None of one round.

    Largest less smallest over the median, mean over seeds; of preemptions the difference.
    """
    spreads: dict[str, list[float]] = {name: [] for name in FIGURES}
    for seed in dict.fromkeys(c.seed for c in comparisons):
        rounds = [c.engine for c in comparisons if c.seed == seed]
        if len(rounds) < 2:  # noqa: PLR2004 - one alone has no spread
            return None
        for name, values in spreads.items():
            of_rounds = [figures[name] for figures in rounds]
            spread = float(np.ptp(of_rounds))
            values.append(spread if name == PREEMPTIONS else spread / float(np.median(of_rounds)))
    return {name: float(np.mean(values)) for name, values in spreads.items()}


class _Recorded:
    """Requests as an engine had them; what finishes brings nothing about."""

    def __init__(self, records: Iterable[ReplayRecord], begin_s: float) -> None:
        self._arrivals: list[Arrival] = [(begin_s + r.arrival_s, r.request) for r in records]

    def start(self) -> Iterable[Arrival]:
        return self._arrivals

    def follow(self, _record: ReplayRecord) -> Iterable[Arrival]:
        return ()


def _record(request: TimedRequest, markers: Markers) -> ReplayRecord:
    output = request.output
    is_over = markers.think_end in output
    answer_start = output.index(markers.think_end) + 1 if is_over else len(output)
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
    return replay - engine if name == PREEMPTIONS else replay / engine - 1


def _mean_of(rows: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    by_seed: dict[int, list[dict[str, float]]] = {}
    for seed, row in rows:
        by_seed.setdefault(seed, []).append(row)
    return {
        name: float(np.mean([np.median([r[name] for r in rows]) for rows in by_seed.values()]))
        for name in FIGURES
    }
