"""How long the next step would take: least squares over the steps so far, refreshed online.

A step reads the weights and the KV of its sequences once, and computes its tokens; the slower of
the two decides (roofline: Williams et al., 2009). So there are two linear fits, one over steps that
only decode and one over steps whose prefill made them longer; a prediction is the greater of both.
"""

import math
from dataclasses import dataclass, field
from operator import mul
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

_FORGETTING: Final = 0.995
# A step further from the fit than this share of it, or than so many times the median step, counts
# as this far: a step that waited for something else does not set the fit.
_OUTLIER_SHARE: Final = 0.05
_OUTLIER_MEDIANS: Final = 4.0
# Times that weights and fit are computed from each other, at most, and in one step; weights that
# change no more than this are final.
_MOST_ROUNDS: Final = 12
_ROUNDS_A_STEP: Final = 2
_SAME_WEIGHT: Final = 0.01
_MIN_STEPS: Final = 4
# Each step counts at first; later ones change little.
_EARLY_STEPS: Final = 64
_REFIT_EVERY: Final = 32
# Weights by age of the steps that are fitted together, the last one's last.
_FADING: Final = _FORGETTING ** np.arange(_EARLY_STEPS)[::-1]
# Weight of the coefficients so far against new data, in steps; keeps what new data cannot tell.
_MEMORY: Final = 1e-3
# A step that took this much longer than decoding alone was made longer by its prefill.
_PREFILL_SHOWS: Final = 1.03
# Steps without one that only decodes after which one is worth making: under a backlog every step
# has prefill, and how long decoding takes would never be known again.
_DECODE_EVERY: Final = 128
# Steps that may go by before a step that was made is back; more are not made in a row.
_MOST_IN_A_ROW: Final = 8
# Of what prefill adds to a step, the most that may be the same for one token and for many.
_MOST_FIXED_SHARE: Final = 0.25
# A chunk of at most so many tokens shows what any prefill adds to a step at most.
_SMALL_CHUNK_TOKENS: Final = 256
# Shares of the way that the least that small chunks add goes to what one added, up and down: one
# chunk that took next to nothing, or was timed wrong, does not set it.
_UP, _DOWN = 0.02, 0.1
# How much more of the data so far the prefill fit needs to change its constant and its share of the
# context than to change what tokens cost. Chunks of one size do not tell these apart, and most of
# what prefill adds to a step is due to its tokens.
_STIFF: Final = 100.0
# The same of a decode's tokens and its context against its constant: steps of one shape do not tell
# them apart, and the weights that every step reads are most of it.
_STIFF_ROWS: Final = 10.0


class StepShape(NamedTuple):
    """What a step has to do.

    Attributes:
        prefill_tokens: tokens of prompts and of resumes.
        decode_tokens: tokens of requests that decode and have tokens in this step: one each, and
            its drafts. The unit is the same for steps that are predicted and for steps that ran.
        context_tokens: KV tokens that the requests of the step hold.
        attended_tokens: summed over prefill tokens, how many tokens each attends to: attention
            over a long prompt costs more the further it got, within a chunk too.
        probe_tokens: tokens of probes; they are no prefill tokens.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    attended_tokens: int = 0
    probe_tokens: int = 0


class PrefillAllowance(NamedTuple):
    """Prefill tokens of a step.

    Attributes:
        in_time: most that let it end in time.
        worthwhile: fewest that take up most of what they add to it. Where any prefill makes a step
            longer by a fixed time, small chunks would pay it often; 0 where prefill hides behind
            decoding.
    """

    in_time: int
    worthwhile: int


class StepTimeModel:
    """Predicts seconds per step from its shape."""

    def __init__(self) -> None:
        self._decode = LinearFit(5, (1.0, _STIFF_ROWS, _STIFF_ROWS, 1.0, 1.0))
        self._prefill = LinearFit(4, (_STIFF, 1.0, _STIFF, 1.0))
        # About the least that small chunks add to a step; None before there was one.
        self._least_added_s: float | None = None
        # The most prefill tokens that did not make a step longer.
        self._most_hidden_tokens = 0
        self._since_decode_only = _DECODE_EVERY
        # Wishes for such a step since the last step that came back.
        self._unanswered = 0

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """A step of this shape took so long.

        A step with probes and without prefill teaches what decoding takes: the few tokens of its
        probes cost nearly a step's fixed price, and have features of their own. In the fit of
        prefill they would make every prefill token look as dear.

        Returns:
            Whether the step was taken in. It is left out when ``seconds`` is nonsense (not above
            0, not finite), and when it has prefill before it is known what decoding takes.
        """
        if not 0 < seconds < float("inf"):
            return False
        self._unanswered = 0
        if not shape.prefill_tokens:
            self._decode.add(_decode_features(shape), seconds)
            self._since_decode_only = 0 if self._decode.coefficients else _DECODE_EVERY
            return True
        self._since_decode_only += 1
        decode_s, features = self.decode_seconds(shape), _prefill_features(shape)
        if decode_s is None:
            # Whether it shows cannot be told, and the first steps weigh much in a fit.
            return False
        if shape.prefill_tokens <= _SMALL_CHUNK_TOKENS:
            self._added(max(seconds - decode_s, 0.0))
        predicted_s = self._prefill.predict(features)
        if seconds > _PREFILL_SHOWS * decode_s:
            self._prefill.add(features, seconds)
            return True
        self._most_hidden_tokens = max(self._most_hidden_tokens, shape.prefill_tokens)
        # It took no longer than this. Without such steps a prediction that is far too high would
        # stay: cuts would be too small for any prefill to show again.
        if predicted_s is not None and predicted_s > seconds:
            self._prefill.add(features, seconds)
        return True

    def wants_decode_only(self, shape: StepShape) -> bool:
        """Whether this step should have no prefill, for what that teaches.

        Not for many steps in a row, and not while steps that were asked for do not come back: with
        nothing but prefill to do, a step without it would do nothing.
        """
        since = self._since_decode_only
        is_due = since >= _DECODE_EVERY and since % _DECODE_EVERY < _MOST_IN_A_ROW
        if not is_due or not shape.decode_tokens or self._unanswered >= _MOST_IN_A_ROW:
            return False
        self._unanswered += 1
        return True

    def decode_seconds(self, shape: StepShape) -> float | None:
        """Without its prefill, with its probes; None before there is data."""
        return self._decode.predict(_decode_features(shape))

    def seconds(self, shape: StepShape) -> float | None:
        """The whole step; None before there is data."""
        decode_s = self.decode_seconds(shape)
        if decode_s is None or not shape.prefill_tokens:
            return decode_s
        prefill_s = self._prefill.predict(_prefill_features(shape))
        return None if prefill_s is None else max(decode_s, prefill_s)

    def bare_seconds(self, shape: StepShape) -> float | None:
        """What a step whose prefill shows takes beside its prefill; None before there is data.

        It is no more than decoding takes and small chunks have added. A fit that has seen long
        chunks only takes part of their time for a time that any prefill would take.
        """
        fitted_s = self._prefill.predict(
            (1.0, float(shape.decode_tokens), float(shape.context_tokens), 0.0)
        )
        decode_s = self.decode_seconds(shape)
        if fitted_s is None or decode_s is None:
            return fitted_s
        return min(fitted_s, decode_s + (self._least_added_s or 0.0))

    def prefill_room(
        self, shape: StepShape, seconds: float, before: int
    ) -> PrefillAllowance | None:
        """What prefill a step of this shape may have; None without data.

        Args:
            shape: its own prefill is of no account.
            seconds: that the step may take.
            before: tokens of the prompt that stand before the chunk.
        """
        decode, prefill = self._decode.coefficients, self._prefill.coefficients
        bare_s = self.bare_seconds(shape)
        if decode is None or prefill is None or bare_s is None:
            return None
        in_time = self._tokens_in(max(seconds - bare_s, 0.0), before)
        # Context costs both kinds of step the same. Where the fits differ in it they are young:
        # what they say of small steps is the better guess.
        fixed_s = prefill[0] - decode[0] + (prefill[1] - decode[1]) * shape.decode_tokens
        # Small chunks must have shown it: a fit of long ones does not tell.
        fixed_s = min(fixed_s, self._least_added_s or 0.0)
        worthwhile = self._tokens_in(max(fixed_s, 0.0) * (1 / _MOST_FIXED_SHARE - 1), before)
        if in_time is None or worthwhile is None:
            return None
        return PrefillAllowance(in_time, worthwhile)

    def _added(self, seconds: float) -> None:
        """A small chunk made a step so much longer than decoding alone."""
        least_s = seconds if self._least_added_s is None else self._least_added_s
        share = _UP if seconds > least_s else _DOWN
        self._least_added_s = least_s + share * (seconds - least_s)

    @property
    def untested_tokens(self) -> int:
        """Prefill tokens that are worth trying before there is data: twice what did not show."""
        return 2 * self._most_hidden_tokens

    def prefill_seconds(self, tokens: int) -> float | None:
        """What computing a prompt of so many tokens adds to steps whose prefill shows."""
        if self._prefill.coefficients is None:
            return None
        _, token_s, _, attended_s = self._prefill.coefficients
        return (token_s + attended_s * tokens / 2) * tokens

    def tokens_within(self, seconds: float) -> int | None:
        """The longest prompt that adds no more than this; None without data."""
        return self._tokens_in(seconds, 0)

    def _tokens_in(self, seconds: float, before: int) -> int | None:
        if self._prefill.coefficients is None:
            return None
        _, token_s, _, attended_s = self._prefill.coefficients
        first_s = token_s + attended_s * before
        if first_s <= 0:
            return None
        # Each token costs attended_s more than the one before it: the positive root of
        # attended_s / 2 * n^2 + first_s * n = seconds, written so that attended_s may be 0.
        return int(2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * attended_s * seconds)))


class LinearFit:
    """Least squares with forgetting, robust to outliers; coefficients are never negative.

    Observations are gathered and fitted together: most steps cost an addition to a list. Outliers
    are told by their distance from the fit that has taken them in (Huber's weights, by iteratively
    reweighted least squares: Holland and Welsch, 1977), not from the one before it. The first fits
    know few shapes, and predict others wrong: steps of those agree with each other and with the
    ones before, and a new fit is near all of them. A step that stalled agrees with none.

    No observation pays for all rounds of a fit: each pays for a few, and the next ones go on.

    Args:
        features: how many; the first is 1 by convention.
        stiffness: of each coefficient, the weight of its value so far against new data, as a
            multiple of ``_MEMORY``; None: 1 each.
    """

    def __init__(self, features: int, stiffness: tuple[float, ...] | None = None) -> None:
        self._memory = [_MEMORY * each for each in stiffness or (1.0,) * features]
        self.coefficients: tuple[float, ...] | None = None
        self._moments = np.zeros((features, features))
        self._products = np.zeros(features)
        self._steps = 0
        # Features and seconds of each step.
        self._gathered: list[tuple[float, ...]] = []
        # The first steps of all are all of the data.
        self._is_first = True
        # The fit under way, if any; what it fits is no longer gathered.
        self._batch: _Batch | None = None

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        """One observation."""
        self._gathered.append((*features, seconds))
        self._steps += 1
        if self._steps < _EARLY_STEPS:
            # These stay as they were measured: which of them are outliers is not known yet. Each
            # fit goes on from the one before.
            if self._steps >= _MIN_STEPS:
                self._run(self._begin())
        elif self._batch is not None:
            if self._run(self._batch):
                self._moments, self._products = self._batch.moments, self._batch.products
                self._batch, self._is_first = None, False
        elif self._steps % _REFIT_EVERY == 0:
            self._batch = self._begin()
            self._gathered = []

    def predict(self, features: tuple[float, ...]) -> float | None:
        """None before there is enough data."""
        if self.coefficients is None:
            return None
        return float(sum(map(mul, self.coefficients, features)))

    def _begin(self) -> "_Batch":
        """A fit of the moments so far and what was gathered since."""
        rows = np.array(self._gathered)
        before = self.coefficients or (0.0,) * (rows.shape[1] - 1)
        return _Batch(rows[:, :-1], rows[:, -1], before)

    def _run(self, batch: "_Batch") -> bool:
        """A few rounds of a fit, whose coefficients hold from now on; whether it is done."""
        features, seconds = batch.features, batch.seconds
        # The last step has the greatest weight.
        fading = _FADING[-len(seconds) :]
        faded = _FORGETTING ** len(seconds)
        for _ in range(_ROUNDS_A_STEP):
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
        """The coefficients, in plain Python: for five unknowns numpy's calls take thrice as long.

        A feature that was never there, or that would be negative, is left out by a 0.
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
    """A fit of some steps under way.

    Attributes:
        features: [steps, features].
        seconds: [steps], measured.
        before: coefficients before the fit.
        rounds: that have run.
        weights: [steps], of the last round.
        moments: [features, features], of the last round.
        products: [features], of the last round.
    """

    features: _Array
    seconds: _Array
    before: tuple[float, ...]
    rounds: int = 0
    weights: _Array | None = None
    moments: _Array = field(default_factory=lambda: np.zeros(0))
    products: _Array = field(default_factory=lambda: np.zeros(0))


def _weights(fitted: _Array, seconds: _Array, *, is_first: bool) -> _Array:
    """Huber's weights of steps, given what a fit says of them.

    The median tells nothing of the first steps of all: the fit that says it may be wrong.
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


def _prefill_features(shape: StepShape) -> tuple[float, ...]:
    tokens = shape.prefill_tokens + shape.probe_tokens + shape.decode_tokens
    return 1.0, float(tokens), float(shape.context_tokens), float(shape.attended_tokens)
