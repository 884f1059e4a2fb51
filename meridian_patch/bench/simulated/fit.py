"""Fits the replay's cost model to timed steps: non-negative least squares with a robust loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import CostModel
from meridian_patch.replay.types import StepWork

Floats = NDArray[np.float64]

FEWEST_STEPS = 100
# Huber's constant: 95 % as good as least squares where the noise is normal.
_HUBER = 1.345
_SIGMA_OVER_MAD = 1.4826
_ROUNDS = 30
_TINY = 1e-9
# A fit of two branches is used only if each has this share of the steps and its error is this much
# smaller.
_LEAST_BRANCH = 0.1
_LEAST_GAIN = 0.9


@dataclass(frozen=True)
class Residuals:
    """How far predicted steps are from timed ones, relative to the prediction.

    Attributes:
        p50, p90: quantiles of the distance.
        total: predicted over timed seconds, over all steps.
    """

    p50: float
    p90: float
    total: float


@dataclass(frozen=True)
class Fit:
    """Coefficients as ``CostModel`` has them; seconds."""

    fixed_s: float
    prefill_s: float
    row_s: float
    weights_s: float
    kv_read_s_per_token: float
    token_s: float
    attention_s_per_pair: float
    overlap: bool

    def as_cost(self, name: str, provenance: str, derivation: str) -> CostModel:
        """The cost model of these coefficients, to 3 digits."""
        named = {"version": 1, "name": name, "provenance": provenance, "derivation": derivation}
        seconds = {n: v if n == "overlap" else float(f"{v:.3g}") for n, v in vars(self).items()}
        return CostModel.model_validate(named | seconds)


def fit_steps(steps: Sequence[tuple[StepWork, float]]) -> Fit:
    """Fit the cost model that predicts the steps best.

    Memory and compute overlap in the model if a fit of that form is clearly better. On a CPU, and
    with steps of only one kind, they are added up.

    Raises:
        BenchError: too few steps, or their time does not depend on their tokens.
    """
    if len(steps) < FEWEST_STEPS:
        raise BenchError(f"{len(steps)} timed steps, a fit needs at least {FEWEST_STEPS}")
    features, seconds = _arrays(steps)
    fit = _fit_sum(features, seconds)
    overlapping = _fit_overlap(features, seconds)
    if overlapping is not None:
        gain = residuals(overlapping, steps).p50 / residuals(fit, steps).p50
        fit = overlapping if gain <= _LEAST_GAIN else fit
    if not fit.token_s:
        raise BenchError(
            "the time of the timed steps does not grow with their tokens, so no cost model can be "
            "fitted; time steps with more prompt tokens (--max-num-batched-tokens)"
        )
    return fit


def residuals(model: Fit | CostModel, steps: Sequence[tuple[StepWork, float]]) -> Residuals:
    """How well a model predicts steps."""
    cost = model.as_cost("fit", "derived", "fit") if isinstance(model, Fit) else model
    predicted = np.array([cost.step_seconds(work) for work, _ in steps])
    seconds = np.array([seconds for _, seconds in steps])
    distance = np.abs(seconds / predicted - 1)
    p50, p90 = np.quantile(distance, [0.5, 0.9])
    return Residuals(float(p50), float(p90), float(predicted.sum() / seconds.sum()))


def _fit_sum(features: Floats, seconds: Floats) -> Fit:
    fixed_s, prefill_s, row_s, kv_s, token_s, attention_s = _robust_fit(features, seconds)
    return Fit(fixed_s, prefill_s, row_s, 0.0, kv_s, token_s, attention_s, overlap=False)


def _fit_overlap(features: Floats, seconds: Floats) -> Fit | None:
    """Fit the coefficients and decide which of memory and compute bounds each step, in turn."""
    one, prefills, rows, context, tokens, attended = features.T
    # At first, the steps with the most tokens count as bound by compute.
    is_compute = tokens > np.quantile(tokens, 0.75)
    for _ in range(_ROUNDS):
        share = is_compute.mean()
        if not _LEAST_BRANCH <= share <= 1 - _LEAST_BRANCH:
            return None
        memory = np.column_stack([one, context]) * ~is_compute[:, None]
        compute = np.column_stack([tokens, attended]) * is_compute[:, None]
        found = _robust_fit(np.column_stack([one, prefills, rows, memory, compute]), seconds)
        fixed_s, prefill_s, row_s, weights_s, kv_s, token_s, attention_s = found
        before = is_compute
        is_compute = token_s * tokens + attention_s * attended > weights_s + kv_s * context
        if np.array_equal(before, is_compute):
            break
    return Fit(fixed_s, prefill_s, row_s, weights_s, kv_s, token_s, attention_s, overlap=True)


def _arrays(steps: Sequence[tuple[StepWork, float]]) -> tuple[Floats, Floats]:
    """Columns in the order of ``_fit_sum``'s coefficients; and seconds."""
    rows = [
        (
            1,
            work.prefill_tokens > 0,
            work.decode_seqs + work.prefill_seqs,
            work.context_tokens,
            work.prefill_tokens + work.decode_seqs,
            work.attended_tokens,
        )
        for work, _ in steps
    ]
    return np.array(rows, dtype=float), np.array([seconds for _, seconds in steps])


def _robust_fit(features: Floats, seconds: Floats) -> list[float]:
    """Huber's loss of the relative error, by iteratively reweighted least squares.

    Errors are measured in the spread of their kind. Steps that compute prompts are few and vary
    much more; with one spread for all steps they would all count as outliers.
    """
    scale = seconds
    is_prefill = features[:, 1] > 0
    weights = np.ones_like(seconds)
    for _ in range(_ROUNDS):
        found = _non_negative(features * (weights / scale)[:, None], seconds * weights / scale)
        scale = features @ found
        error = np.abs(seconds / scale - 1)
        for kind in (is_prefill, ~is_prefill):
            if kind.any():
                width = _HUBER * _SIGMA_OVER_MAD * float(np.median(error[kind])) + _TINY
                weights[kind] = np.sqrt(np.minimum(1.0, width / (error[kind] + _TINY)))
    return [float(value) for value in found]


def _non_negative(features: Floats, target: Floats) -> Floats:
    """Least squares without negative coefficients: the best of all subsets of columns.

    A subset of columns never fits better than all of them, so the search goes from sets to their
    subsets, and leaves out the subsets of a set that fits without negative coefficients, or worse
    than the best set so far.
    """
    widths = np.linalg.norm(features, axis=0)
    widths[widths == 0] = 1.0
    scaled = features / widths
    products, moments = scaled.T @ scaled, scaled.T @ target
    best, least = np.zeros(len(widths)), 0.0
    pending = [tuple(range(len(widths)))]
    seen = set(pending)
    while pending:
        columns = pending.pop()
        chosen = list(columns)
        found: Floats = np.linalg.lstsq(products[np.ix_(chosen, chosen)], moments[chosen])[0]
        # The squared error up to a constant.
        error = -float(found @ moments[chosen])
        if error >= least:
            continue
        if (found >= 0).all():
            best, least = np.zeros(len(widths)), error
            best[chosen] = found
            continue
        subsets = set(combinations(columns, len(columns) - 1)) - seen - {()}
        seen |= subsets
        pending += sorted(subsets)
    solution: Floats = best / widths
    return solution
