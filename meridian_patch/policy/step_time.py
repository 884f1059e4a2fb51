"""Predicts the duration of the next step: least squares over past steps, updated online.

A step reads the weights and the KV of its sequences once, and computes its tokens; the slower of
the two determines its duration (roofline: Williams et al., 2009). So there are two linear fits, one
of steps that only decode and one of steps that prefill made longer. A prediction is the greater of
both.
"""

import math
from dataclasses import dataclass, field
from operator import mul
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meridian_patch.policy.chunk_rates import ChunkRates

_Array = NDArray[np.float64]

_FORGETTING: Final = 0.995
# Limit of a step's distance from the fit, as a share of the fit or a multiple of the median
# distance, whichever is greater. It limits the weight of steps that were delayed by other causes.
_OUTLIER_SHARE: Final = 0.05
_OUTLIER_MEDIANS: Final = 4.0
# Rounds of computing weights and fit from each other: the maximum, and the number in each of the
# first steps. Later a step runs one. The fit is done when no weight changes by more than
# `_SAME_WEIGHT`.
_MOST_ROUNDS: Final = 12
_EARLY_ROUNDS: Final = 2
_SAME_WEIGHT: Final = 0.01
_MIN_STEPS: Final = 4
# The first steps are fitted one by one; later ones together, every `_REFIT_EVERY` steps.
_EARLY_STEPS: Final = 64
_REFIT_EVERY: Final = 32
# Weights by age of the steps that are fitted together; the newest step is last.
_FADING: Final = _FORGETTING ** np.arange(_EARLY_STEPS)[::-1]
# Weight of the previous coefficients against new data, in steps. It keeps the value of
# coefficients that new data do not determine.
_MEMORY: Final = 1e-3
# Prefill made a step longer if it took more than this multiple of decoding alone.
_PREFILL_SHOWS: Final = 1.03
# After so many steps with prefill, one that only decodes is requested. Under a backlog every step
# has prefill, and the decode time would never be measured again.
_DECODE_EVERY: Final = 128
# At most so many of these are requested in a row, because a step's time is known some steps later.
_MOST_IN_A_ROW: Final = 8
# Largest fixed share of prefill time that is expected of a chunk size which was not seen yet.
_MOST_FIXED_SHARE: Final = 0.25
# The time that a chunk of at most so many tokens adds is an upper bound of prefill's fixed time.
_SMALL_CHUNK_TOKENS: Final = 256
# More tokens than any step or prompt has.
_MOST_TOKENS: Final = 2**53
# How far the estimate of the least added time moves towards a new value, up and down. A single
# chunk that took almost no time, or was timed wrongly, changes it little.
_UP, _DOWN = 0.02, 0.1
# Stiffness of the prefill fit's constant and context coefficients relative to those of tokens.
# Chunks of one size do not separate them, and most of prefill's time is due to its tokens.
_STIFF: Final = 100.0
# The same for a decode's token and context coefficients relative to its constant. Steps of one
# shape do not separate them, and most of a decode's time is due to reading the weights.
_STIFF_ROWS: Final = 10.0


class StepShape(NamedTuple):
    """The work of a step.

    Attributes:
        prefill_tokens: tokens of prompts and of resumed requests.
        decode_tokens: tokens of decoding requests in this step: one each, and its drafts. Predicted
            and measured steps use the same unit.
        context_tokens: KV tokens that the requests of the step hold.
        attended_tokens: number of tokens attended to, summed over prefill tokens. Attention of a
            prompt token takes longer the more tokens are before it, within a chunk too.
        probe_tokens: tokens of probes, which do not count as prefill tokens.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    attended_tokens: int = 0
    probe_tokens: int = 0


class PrefillAllowance(NamedTuple):
    """Prefill tokens of a step.

    Attributes:
        in_time: the most with which the step ends in time.
        worthwhile: the fewest of which one takes at most a third more than the least that
            a token was seen to take. In smaller chunks a fixed time of each step with prefill,
            of launching kernels for example, would be paid too often. 0 without a fixed time.
    """

    in_time: int
    worthwhile: int


class StepTimeModel:
    """Predicts seconds per step from its shape.

    Attributes:
        graph_tokens: most tokens of a step that a captured graph runs; None where that is unknown
            or all steps are alike. Above it kernels are launched one by one, which adds a fixed
            time.
        largest_chunk: most prefill tokens of a step whose time was learnt.
    """

    def __init__(self) -> None:
        self.graph_tokens: int | None = None
        self.largest_chunk = 0
        self._decode = LinearFit(5, (1.0, _STIFF_ROWS, _STIFF_ROWS, 1.0, 1.0))
        self._prefill = LinearFit(5, (_STIFF, 1.0, _STIFF, 1.0, 1.0))
        self._rates = ChunkRates()
        # Estimate of the least time that small chunks add to a step; None before the first one.
        self._least_added_s: float | None = None
        # The most prefill tokens that did not make a step longer.
        self._most_hidden_tokens = 0
        self._since_decode_only = _DECODE_EVERY
        # Requested steps without prefill since the last step whose time arrived.
        self._unanswered = 0

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn the duration of a step.

        A step with probes but without prefill goes into the decode fit, where probes have their own
        features: their few tokens add mostly a fixed time. In the prefill fit they would make every
        prefill token look as expensive.

        Returns:
            Whether the step was used. It is not if ``seconds`` is invalid (not positive or not
            finite), or if it has prefill before the decode time is known.
        """
        if not 0 < seconds < float("inf"):
            return False
        self._unanswered = 0
        if not shape.prefill_tokens:
            self._decode.add(_decode_features(shape), seconds)
            self._since_decode_only = 0 if self._decode.coefficients else _DECODE_EVERY
            return True
        self._since_decode_only += 1
        decode_s, features = self.decode_seconds(shape), self._prefill_features(shape)
        if decode_s is None:
            # It is unknown whether prefill made the step longer, and the first steps have a great
            # weight in a fit.
            return False
        self.largest_chunk = max(self.largest_chunk, shape.prefill_tokens)
        is_shown = seconds > _PREFILL_SHOWS * decode_s
        room = self.graph_room(shape)
        # With more rows than the graph, launching is a part of the decode time.
        if room is not None or self.graph_tokens is None:
            is_launched = room is not None and shape.prefill_tokens > room
            added_s = seconds - decode_s if is_shown else 0.0
            self._rates.add(shape.prefill_tokens, added_s, is_launched=is_launched)
        if shape.prefill_tokens <= _SMALL_CHUNK_TOKENS:
            self._added(max(seconds - decode_s, 0.0))
        predicted_s = self._prefill.predict(features)
        if is_shown:
            self._prefill.add(features, seconds)
            return True
        self._most_hidden_tokens = max(self._most_hidden_tokens, shape.prefill_tokens)
        # The step corrects a prediction that is too high. Without such steps budgets could become
        # so small that prefill never makes a step longer again, and the prediction would stay.
        if predicted_s is not None and predicted_s > seconds:
            self._prefill.add(features, seconds)
        return True

    def wants_decode_only(self, shape: StepShape) -> bool:
        """Whether this step should have no prefill, to measure decoding alone.

        Limited to some steps in a row, also while the times of requested steps do not arrive: if
        there is only prefill to do, a step without it would be empty.
        """
        since = self._since_decode_only
        is_due = since >= _DECODE_EVERY and since % _DECODE_EVERY < _MOST_IN_A_ROW
        if not is_due or not shape.decode_tokens or self._unanswered >= _MOST_IN_A_ROW:
            return False
        self._unanswered += 1
        return True

    def decode_seconds(self, shape: StepShape) -> float | None:
        """Duration of a step without its prefill, with its probes; None before there is data."""
        return self._decode.predict(_decode_features(shape))

    def seconds(self, shape: StepShape) -> float | None:
        """Duration of the whole step; None before there is data."""
        decode_s = self.decode_seconds(shape)
        if decode_s is None or not shape.prefill_tokens:
            return decode_s
        prefill_s = self._prefill.predict(self._prefill_features(shape))
        return None if prefill_s is None else max(decode_s, prefill_s)

    def bare_seconds(self, shape: StepShape) -> float | None:
        """Duration of a step with prefill, minus the time of the prefill tokens; None without data.

        At most the decode time plus what small chunks have added: a fit of long chunks only would
        attribute part of their time to the constant.
        """
        fitted_s = self._prefill.predict(
            (1.0, float(shape.decode_tokens), float(shape.context_tokens), 0.0, 0.0)
        )
        decode_s = self.decode_seconds(shape)
        if fitted_s is None or decode_s is None:
            return fitted_s
        return min(fitted_s, decode_s + (self._least_added_s or 0.0))

    def prefill_room(
        self, shape: StepShape, seconds: float, before: int, *, is_on_average: bool = False
    ) -> PrefillAllowance | None:
        """How much prefill a step of this shape may have; None without data.

        Args:
            shape: the step; its own prefill tokens are ignored.
            seconds: how long the step may take.
            before: tokens of the prompt before the chunk.
            is_on_average: of many steps, of which few may be above the captured graph.
        """
        decode, prefill = self._decode.coefficients, self._prefill.coefficients
        bare_s = self.bare_seconds(shape)
        if decode is None or prefill is None or bare_s is None:
            return None
        in_time = self._tokens_in(max(seconds - bare_s, 0.0), before)
        room = None if is_on_average else self.graph_room(shape)
        if in_time is not None and room is not None and in_time > room:
            launched = self._tokens_in(max(seconds - bare_s - prefill[4], 0.0), before) or 0
            in_time = max(room, launched)
        # Context adds the same time to both kinds of steps, so its coefficients are left out. They
        # differ only while the fits have few data.
        fixed_s = prefill[0] - decode[0] + (prefill[1] - decode[1]) * shape.decode_tokens
        # Limited by what small chunks have added, because a fit of long ones does not determine it.
        fixed_s = min(fixed_s, self._least_added_s or 0.0)
        expected = self._tokens_in(max(fixed_s, 0.0) * (1 / _MOST_FIXED_SHARE - 1), before)
        graph_room = self.graph_room(shape)
        if in_time is None:
            # By the fit a token takes no time.
            if graph_room is None:
                return None
            in_time = graph_room if seconds > bare_s else 0
            if room is not None:
                decode_s = self.decode_seconds(shape) or 0.0
                in_time = max(in_time, self._rates.launched_within(seconds - decode_s))
        worthwhile = self._rates.worthwhile(graph_room, expected or 0)
        return PrefillAllowance(in_time, worthwhile)

    def graph_room(self, shape: StepShape) -> int | None:
        """Prefill tokens with which a captured graph still runs the step; None: no such limit."""
        if self.graph_tokens is None:
            return None
        room = self.graph_tokens - shape.decode_tokens - shape.probe_tokens
        # Without prefill it is launched, too, then.
        return room if room >= 0 else None

    def untried_chunk(self, shape: StepShape, most: int) -> int:
        """Prefill tokens to try because the sizes that were seen take long; 0: none.

        They do if they add more to a step than its decoding takes.

        Args:
            shape: decode tokens and context of the requests that decode.
            most: prefill tokens that the step has room for.
        """
        decode_s = self.decode_seconds(shape)
        return self._rates.untried(decode_s, most) if decode_s else 0

    def launched_chunk(self, before: int) -> int | None:
        """Prefill tokens that take as long as launching a step without a graph; None without data.

        Args:
            before: tokens of the prompt before the chunk.
        """
        coefficients = self._prefill.coefficients
        return self._tokens_in(coefficients[4], before) if coefficients else None

    def _prefill_features(self, shape: StepShape) -> tuple[float, ...]:
        tokens = shape.prefill_tokens + shape.probe_tokens + shape.decode_tokens
        is_launched = self.graph_tokens is not None and tokens > self.graph_tokens
        work = float(tokens), float(shape.context_tokens), float(shape.attended_tokens)
        return 1.0, *work, float(is_launched)

    def _added(self, seconds: float) -> None:
        """Update the least added time with that of a small chunk."""
        least_s = seconds if self._least_added_s is None else self._least_added_s
        share = _UP if seconds > least_s else _DOWN
        self._least_added_s = least_s + share * (seconds - least_s)

    @property
    def untested_tokens(self) -> int:
        """Prefill tokens to try before there is data: twice the most that added no time."""
        return 2 * self._most_hidden_tokens

    def prefill_seconds(self, tokens: int) -> float | None:
        """Time that a prompt of ``tokens`` tokens adds to steps; None without data."""
        if self._prefill.coefficients is None:
            return None
        _, token_s, _, attended_s, _ = self._prefill.coefficients
        return (token_s + attended_s * tokens / 2) * tokens

    def _tokens_in(self, seconds: float, before: int) -> int | None:
        if self._prefill.coefficients is None:
            return None
        _, token_s, _, attended_s, _ = self._prefill.coefficients
        first_s = token_s + attended_s * before
        if first_s <= 0 and attended_s <= 0:
            return None
        if seconds <= 0:
            return 0
        # Each token takes attended_s longer than the one before it: the positive root of
        # attended_s / 2 * n^2 + first_s * n = seconds, in a form in which attended_s may be 0.
        tokens = 2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * attended_s * seconds))
        # Infinite if a request asks for an extremely long latency.
        return int(min(tokens, _MOST_TOKENS))


class LinearFit:
    """Least squares with forgetting, robust to outliers; coefficients are never negative.

    Observations are gathered and fitted together, so most of them only append to a list. Outliers
    are found by their distance from the fit that includes them (Huber's weights, by iteratively
    reweighted least squares: Holland and Welsch, 1977), not from the previous fit. The reason: the
    first fits have seen few shapes and predict others wrongly. A fit that includes new shapes is
    near all of them, but not near a step that stalled.

    The rounds of a fit are spread over several observations, to limit the time of each.

    Args:
        features: number of features; the first is 1 by convention.
        stiffness: per coefficient, the weight of its previous value against new data, as a multiple
            of ``_MEMORY``; None: 1 each.
    """

    def __init__(self, features: int, stiffness: tuple[float, ...] | None = None) -> None:
        self._memory = [_MEMORY * each for each in stiffness or (1.0,) * features]
        self.coefficients: tuple[float, ...] | None = None
        self._moments = np.zeros((features, features))
        self._products = np.zeros(features)
        self._steps = 0
        # Features and seconds of each step.
        self._gathered: list[tuple[float, ...]] = []
        # True while the first steps are all of the data.
        self._is_first = True
        # The fit in progress, if any; its observations are no longer in `_gathered`.
        self._batch: _Batch | None = None

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        """Add one observation."""
        self._gathered.append((*features, seconds))
        self._steps += 1
        if self._steps < _EARLY_STEPS:
            # These observations stay gathered, because it is not known yet which are outliers.
            # Each fit starts from the previous one.
            if self._steps >= _MIN_STEPS:
                self._run(self._begin(), _EARLY_ROUNDS)
        elif self._batch is not None:
            if self._run(self._batch, 1):
                self._moments, self._products = self._batch.moments, self._batch.products
                self._batch, self._is_first = None, False
        elif self._steps % _REFIT_EVERY == 0:
            self._batch = self._begin()
            self._gathered = []

    def predict(self, features: tuple[float, ...]) -> float | None:
        """The predicted seconds; None before there is enough data."""
        if self.coefficients is None:
            return None
        return float(sum(map(mul, self.coefficients, features)))

    def _begin(self) -> "_Batch":
        """Begin a fit of the moments so far and the observations gathered since."""
        rows = np.array(self._gathered)
        before = self.coefficients or (0.0,) * (rows.shape[1] - 1)
        return _Batch(rows[:, :-1], rows[:, -1], before)

    def _run(self, batch: "_Batch", rounds: int) -> bool:
        """Run some rounds of a fit and use its coefficients; returns whether it is done."""
        features, seconds = batch.features, batch.seconds
        # The last step has the greatest weight.
        fading = _FADING[-len(seconds) :]
        faded = _FORGETTING ** len(seconds)
        for _ in range(rounds):
            weights = np.ones(len(seconds))
            if self.coefficients:
                weights = _weights(features @ self.coefficients, seconds, is_first=self._is_first)
            if batch.weights is not None and _are_close(weights, batch.weights):
                return True
            weighted = features.T * (weights * fading)
            batch.weights = weights
            batch.moments = self._moments * faded + weighted @ features
            batch.products = self._products * faded + weighted @ seconds
            found = self._solve(batch.moments, batch.products, batch.before)
            self.coefficients = tuple(found)
            batch.rounds += 1
        return batch.rounds >= _MOST_ROUNDS

    def _solve(self, moments: _Array, products: _Array, before: tuple[float, ...]) -> list[float]:
        """The coefficients, in plain Python: for five unknowns, numpy takes three times as long.

        Features that never occurred, or whose coefficient would be negative, get a 0.
        """
        rows, sums = moments.tolist(), products.tolist()
        scale = [math.sqrt(rows[index][index]) for index in range(len(rows))]
        used = [index for index, size in enumerate(scale) if size > 0]
        found = [0.0] * len(rows)
        while used:
            system: list[list[float]] = []
            for one in used:
                line = [rows[one][other] / (scale[one] * scale[other]) for other in used]
                line[len(system)] += self._memory[one]
                pull = self._memory[one] * before[one] * scale[one]
                system.append([*line, sums[one] / scale[one] + pull])
            solved = _eliminate(system)
            found = [0.0] * len(rows)
            for index, value in zip(used, solved, strict=True):
                found[index] = value / scale[index]
            if min(found) >= 0:
                break
            used = [index for index in used if found[index] >= 0]
        return [max(value, 0.0) for value in found]


@dataclass(slots=True)
class _Batch:
    """A fit in progress.

    Attributes:
        features: [steps, features].
        seconds: [steps], measured.
        before: coefficients before the fit.
        rounds: number of rounds so far.
        weights: [steps], from the last round.
        moments: [features, features], from the last round.
        products: [features], from the last round.
    """

    features: _Array
    seconds: _Array
    before: tuple[float, ...]
    rounds: int = 0
    weights: _Array | None = None
    moments: _Array = field(default_factory=lambda: np.zeros(0))
    products: _Array = field(default_factory=lambda: np.zeros(0))


def _weights(fitted: _Array, seconds: _Array, *, is_first: bool) -> _Array:
    """Huber's weights of steps, given the fit's predictions.

    The median distance is not used for the first steps, because their fit may be wrong.
    """
    off = np.abs(seconds - fitted)
    limit = _OUTLIER_SHARE * np.maximum(fitted, 0.0)
    if not is_first:
        middle = len(off) // 2
        limit = np.maximum(limit, _OUTLIER_MEDIANS * np.partition(off, middle)[middle])
    return np.where(off > limit, limit / np.maximum(off, 1e-12), 1.0)


def _eliminate(system: list[list[float]]) -> list[float]:
    """Solve a positive definite system by elimination; its last column is the right-hand side."""
    size = len(system)
    for pivot, line in enumerate(system):
        for lower in system[pivot + 1 :]:
            share = lower[pivot] / line[pivot]
            for column in range(pivot, size + 1):
                lower[column] -= share * line[column]
    solved = [0.0] * size
    for row in range(size - 1, -1, -1):
        line = system[row]
        known = sum(line[column] * solved[column] for column in range(row + 1, size))
        solved[row] = (line[size] - known) / line[row]
    return solved


def _are_close(weights: _Array, others: _Array) -> bool:
    return float(np.abs(weights - others).max()) <= _SAME_WEIGHT


def _decode_features(shape: StepShape) -> tuple[float, ...]:
    probes = float(shape.probe_tokens)
    has_probes = 1.0 if probes else 0.0
    return 1.0, float(shape.decode_tokens), float(shape.context_tokens), has_probes, probes
