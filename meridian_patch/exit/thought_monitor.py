"""Decides when to close and when to probe one thought."""

import math
from collections.abc import Sequence
from typing import Final

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.actions import Action, Close, Obstacle, Obstacles, Probe
from meridian_patch.exit.probe_schedule import ProbeSchedule
from meridian_patch.exit.strategies.base import Signals, ThoughtStart, TokenSignals
from meridian_patch.exit.strategies.build import build_strategies
from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.exit.strategies.hard_cap import HardCap

MOST_STORED: Final = 128
"""Tokens that are processed together at most, where they come one by one."""


class ThoughtMonitor:
    """Monitors one thought from its start to its verdict or its end.

    1. Strategies see every token of the thought, and the probe results. The strategy that fires at
       the earliest token is used; below the floor none fires.
    2. The floor is ``min_think_tokens``, or an upper bound of the thought that is lower.
    3. After a strategy fired, the close is due at the first end of a line, at the latest after
       ``grace_tokens`` or at an upper bound. This is the verdict. After it tokens are only counted.

    Invariant: the verdict depends on the tokens, their signals and the order of probe results among
    them, not on how many tokens are passed at once.

    Most tokens are only stored. The strategies process them together: at ends of lines, once a
    close may be due there, and at least once per ``grace_tokens`` from the token on at which a
    strategy may fire. So no close is late because of this. Below the floor, too, they are processed
    every ``MOST_STORED`` tokens: a request may set a floor of any height, and the steps of others
    must not wait until a whole thought is processed.

    Args:
        number: number of the thought in its request, from 1.
        config: the request's configuration.
        start: what is known of the thought.
    """

    def __init__(self, number: int, config: ExitConfig, start: ThoughtStart) -> None:
        self._number = number
        self._line_ends = start.breaks.line
        self._grace_tokens = config.grace_tokens
        self._strategies = build_strategies(config, start)
        bounds = (each.most_tokens for each in self._strategies if isinstance(each, HardCap))
        self._most_tokens = min(bounds, default=math.inf)
        self._floor_tokens = int(min(config.min_think_tokens, self._most_tokens))
        fires_from = min((each.fires_from for each in self._strategies), default=math.inf)
        self._fires_from = max(fires_from, self._floor_tokens)
        self._eat = next((each for each in self._strategies if isinstance(each, Eat)), None)
        self._schedule: ProbeSchedule | None = None
        if any(each.uses_probes for each in self._strategies):
            self._schedule = ProbeSchedule(
                config.probe_min_gap_tokens,
                config.probe_max_gap_tokens,
                start.breaks,
                start.think_tokens,
            )
        # Accepted tokens of the thought.
        self.think_tokens = start.think_tokens
        # The decision to close the thought; it is not changed once set.
        self.verdict: Close | None = None
        # Stored tokens that were not processed yet, and their signals.
        self._tokens: list[int] = []
        self._rows: list[TokenSignals] = []
        # Number of signals that were not finite, of processed tokens and of probes.
        self._num_invalid = 0
        # The strategy that fired, the think tokens at that time, and why.
        self._fired: tuple[str, int, str] | None = None
        # Think tokens of the last probe whose result arrived.
        self._probed_at = -1
        # Number of requested probes.
        self._num_asked = 0
        # Whether the last processed token ends a line.
        self._is_line_end = False
        # Think tokens at which to process at the latest; after a firing, the end of the grace.
        self._look_at = self._next_look()

    @property
    def num_invalid(self) -> int:
        """Number of signals of tokens and probes that were not finite."""
        return self._num_invalid + _count_invalid([row[0] for row in self._rows])

    @property
    def fast_path_tokens(self) -> float:
        """Tokens until the stored ones must be processed; after a verdict, the grace."""
        if self.verdict is not None:
            return self._grace_tokens
        return self._look_at - self.think_tokens

    @property
    def fast_path_line_tokens(self) -> float:
        """Tokens until an end of a line may lead to a close; at most 0: the next one may."""
        if self.verdict is not None:
            return self._grace_tokens
        return self._lines_from - self.think_tokens

    @property
    def fast_path_paragraph_tokens(self) -> float:
        """Same as ``fast_path_line_tokens``, for probes at ends of paragraphs."""
        if self.verdict is not None:
            return self._grace_tokens
        return self._paragraphs_from - self.think_tokens

    @property
    def eat_variance(self) -> float:
        """EAT's debiased variance in nats squared; infinite before the first result of a probe."""
        return math.inf if self._eat is None else self._eat.variance

    def accept(self, token_ids: Sequence[int], rows: Sequence[TokenSignals]) -> Action | None:
        """Store the next tokens and their signals; returns the action to take now, if any."""
        self.think_tokens += len(token_ids)
        if self.verdict is not None:
            return None
        self._tokens += token_ids
        self._rows += rows
        return self._look() if self._is_something_due(token_ids) else None

    def probed(self, probe: Probe, entropy_nats: float) -> Action | None:
        """Process a probe's result; it is dropped if it is of another thought or out of order."""
        # Tokens that came before the result are processed first.
        action = self._look() if self.verdict is None else None
        is_stale = probe.thought != self._number or probe.think_tokens <= self._probed_at
        if self.verdict is not None or self._fired is not None or is_stale:
            return action
        self._probed_at = probe.think_tokens
        self._num_invalid += not math.isfinite(entropy_nats)
        said = [(strategy.reason, strategy.probed(entropy_nats)) for strategy in self._strategies]
        firing = next(((reason, why) for reason, why in said if why is not None), None)
        if firing is None or self.think_tokens < self._floor_tokens:
            return action
        self._fire(firing[0], self.think_tokens, firing[1])
        if self._is_line_end or self.think_tokens >= self._look_at:
            return self._close(self.think_tokens)
        return None

    def too_soon(self) -> Obstacles:
        """Strategies that could not have fired in the thought yet, and why."""
        judges = [each for each in self._strategies if not each.is_bound]
        if self.think_tokens < self._floor_tokens:
            return dict.fromkeys((each.reason for each in judges), Obstacle.FLOOR)
        found = {
            each.reason: Obstacle.WARM_UP
            for each in judges
            if self.think_tokens < each.fires_from < math.inf
        }
        if self._eat is not None and not self._eat.is_warm:
            is_asked = self._num_asked > self._eat.warmup_probes
            found[self._eat.reason] = Obstacle.NOT_PROBED if is_asked else Obstacle.WARM_UP
        return found

    def _look(self) -> Action | None:
        tokens, rows = self._tokens, self._rows
        if len(tokens) != len(rows):
            raise ValueError(
                f"{len(rows)} rows of signals for {len(tokens)} tokens, expected one each"
            )
        if not tokens:
            return None
        self._tokens, self._rows = [], []
        signals = Signals.of(rows)
        self._num_invalid += _count_invalid(signals.entropy)
        self._is_line_end = tokens[-1] in self._line_ends
        before = self.think_tokens - len(tokens)
        if self._fired is None:
            self._ask(tokens, signals, before)
        if self._fired is not None:
            return self._close_within(tokens, before)
        due = self._schedule.accept(tokens) if self._schedule else None
        self._look_at = self._next_look()
        if due is None:
            return None
        self._num_asked += 1
        return Action(probe=Probe(self._number, due))

    def _is_something_due(self, token_ids: Sequence[int]) -> bool:
        think_tokens, schedule = self.think_tokens, self._schedule
        if think_tokens >= self._look_at:
            return True
        if think_tokens >= self._lines_from and not self._line_ends.isdisjoint(token_ids):
            return True
        if schedule is None or think_tokens < self._paragraphs_from:
            return False
        return schedule.is_paragraph_end_in(self._tokens, len(token_ids))

    @property
    def _lines_from(self) -> float:
        """Think tokens from which on a close may be due at the end of a line."""
        return self._fires_from if self._fired is None else 0

    @property
    def _paragraphs_from(self) -> float:
        """Think tokens from which on a probe may be due at the end of a paragraph."""
        return self._schedule.due_from if self._schedule and self._fired is None else math.inf

    def _next_look(self) -> float:
        latest = max(self.think_tokens, self._fires_from - 1) + max(self._grace_tokens, 1)
        due_by = self._schedule.due_by if self._schedule else math.inf
        return min(latest, due_by, self._most_tokens, self.think_tokens + MOST_STORED)

    def _ask(self, tokens: list[int], signals: Signals, before: int) -> None:
        first = max(0, self._floor_tokens - before - 1)
        asked = [(s.reason, s.accept(tokens, signals, first)) for s in self._strategies]
        fired = [(firing.at, reason, firing.why) for reason, firing in asked if firing]
        if fired:
            at, reason, why = min(fired, key=lambda each: each[0])
            self._fire(reason, before + at + 1, why)

    def _fire(self, reason: str, think_tokens: int, why: str) -> None:
        self._fired = reason, think_tokens, why
        self._look_at = max(min(think_tokens + self._grace_tokens, self._most_tokens), think_tokens)

    def _close_within(self, tokens: list[int], before: int) -> Action | None:
        assert self._fired
        fired_at = self._fired[1]
        for index in range(max(fired_at - before - 1, 0), len(tokens)):
            if tokens[index] in self._line_ends or before + index + 1 >= self._look_at:
                return self._close(before + index + 1)
        return None

    def _close(self, close_at: int) -> Action:
        assert self._fired
        reason, fired_at, why = self._fired
        self.verdict = Close(reason, fired_at, close_at, why)
        return Action(close=self.verdict)


def _count_invalid(entropies: Sequence[float]) -> int:
    # Fast path: the sum of finite entropies is finite, because they are far from overflow.
    return 0 if math.isfinite(sum(entropies)) else sum(not math.isfinite(e) for e in entropies)
