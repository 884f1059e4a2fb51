"""Where a strategy would close a finished thought, for every threshold."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.lag import Lag
from meridian_patch.exit.probe_schedule import ProbeSchedule
from meridian_patch.exit.strategies.base import NO_SIGNALS, Signals
from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.exit.strategies.rpdi import Rpdi
from meridian_patch.exit.text_breaks import Breaks


class ClosePoint(NamedTuple):
    """A point where a strategy could fire.

    Attributes:
        close_at: think tokens at which the thought would then be closed.
        value: of the strategy's figure: EAT's variance (nats squared) or RPDI.
    """

    close_at: int
    value: float


def probe_points(thought: Sequence[int], config: ExitConfig, breaks: Breaks) -> list[int]:
    """Think tokens at which a thought is probed."""
    schedule = ProbeSchedule(config.probe_min_gap_tokens, config.probe_max_gap_tokens, breaks)
    due = (schedule.accept([token_id]) for token_id in thought)
    return [point for point in due if point is not None]


def eat_close_points(
    thought: Sequence[int],
    probes: Iterable[tuple[int, float]],
    config: ExitConfig,
    breaks: Breaks,
    lag: Lag,
    wait_steps: Callable[[int], int],
) -> list[ClosePoint]:
    """Probes at which EAT could fire: warm, and below the entropy's bound.

    Args:
        thought: its tokens, without the end marker.
        probes: think tokens and entropy (nats) of each, in order.
        config: of early exit.
        breaks: of the vocabulary.
        lag: of the engine that will close thoughts.
        wait_steps: that a probe at so many think tokens waits for.
    """
    # With no bound of the variance it fires wherever a bound could make it fire.
    strategy = Eat(
        config.eat_alpha, math.inf, config.eat_warmup_probes, config.eat_max_entropy_nats
    )
    fired = (
        (point, lag.result_step(wait_steps(point)), strategy.variance)
        for point, entropy in probes
        if strategy.probed(entropy) is not None
    )
    return _closed(thought, fired, config, breaks.line, lag)


def rpdi_close_points(
    thought: Sequence[int],
    entropies: Sequence[float],
    config: ExitConfig,
    breaks: Breaks,
    lag: Lag,
) -> list[ClosePoint]:
    """Sentence ends at which RPDI is known.

    Args:
        thought: its tokens, without the end marker.
        entropies: of these tokens, in nats.
        config: of early exit.
        breaks: of the vocabulary.
        lag: of the engine that will close thoughts.
    """
    ratios = _ratios(thought, entropies, config.rpdi_window_tokens, breaks.sentence)
    # It fires when the token itself is known.
    fired = ((point, 0, ratio) for point, ratio in ratios)
    return _closed(thought, fired, config, breaks.line, lag)


def reached(
    points: Sequence[ClosePoint], thresholds: Sequence[float], *, fires_below: bool
) -> list[ClosePoint]:
    """Those points that some threshold reaches first.

    Other points never end a thought.
    """
    first = {
        next((p for p in points if (p.value < t if fires_below else p.value > t)), None)
        for t in thresholds
    }
    return [point for point in points if point in first]


def _ratios(
    thought: Sequence[int], entropies: Sequence[float], window: int, ends: AbstractSet[int]
) -> Iterator[tuple[int, float]]:
    # It never fires by itself; its figure is read at each sentence's end.
    strategy = Rpdi(window, math.inf, ends)
    begin = 0
    for index, token_id in enumerate(thought):
        if token_id not in ends or not math.isfinite(entropies[index]):
            continue
        rows = [(entropy, *NO_SIGNALS[1:]) for entropy in entropies[begin : index + 1]]
        strategy.accept(thought[begin : index + 1], Signals.of(rows), 0)
        begin = index + 1
        ratio = strategy.ratio
        if ratio is not None:
            yield begin, ratio


def _closed(
    thought: Sequence[int],
    fired: Iterable[tuple[int, int, float]],
    config: ExitConfig,
    line_ends: AbstractSet[int],
    lag: Lag,
) -> list[ClosePoint]:
    """Where thoughts are closed, from where a strategy fired.

    The end of the line is looked for as ``ThoughtMonitor`` does, from the tokens on that are known
    when the strategy fires; then come the tokens that are on the way.

    Args:
        thought: its tokens, without the end marker.
        fired: think tokens that were judged, the step (see ``Lag``) whose output fires, and the
            strategy's figure.
        config: of early exit.
        line_ends: ids of tokens that end a line.
        lag: of the engine that will close thoughts.
    """
    points = []
    for judged_at, step, value in fired:
        fired_at = judged_at + lag.tokens_before(step)
        latest = fired_at + config.grace_tokens
        within = range(fired_at, min(latest, len(thought) + 1))
        due_at = next((n for n in within if thought[n - 1] in line_ends), latest)
        decided = max(step, (due_at - judged_at) * lag.stride_steps)
        close_at = judged_at + lag.tokens_at_close(decided)
        # Where the thought ends before, it ends by itself.
        if fired_at >= config.min_think_tokens and close_at < len(thought):
            points.append(ClosePoint(close_at, value))
    return points
