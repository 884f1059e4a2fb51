"""Figures of one replay. Times in seconds of the virtual clock, boundaries by token index."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meridian_patch.bench.simulated.alone import AloneTimes
from meridian_patch.phase.tracker import Phase
from meridian_patch.replay.types import ReplayRecord

STALL_S = 0.25
# A reader's pace, and the share of an undisturbed reading below which it is counted as spoilt.
READING_S_PER_TOKEN = 0.05
LOW_QOE = 0.95
# Steady figures are taken between these shares of all output tokens: before, the pool fills;
# after, too few requests are left to fill it.
STEADY = (0.1, 0.8)
# Borders of the histogram of answer gaps, in seconds; 100 bins per factor of 10.
GAP_BORDERS_S = np.geomspace(1e-4, 1e3, 701)

Floats = NDArray[np.float64]
Figures = dict[str, float | None]


@dataclass(frozen=True)
class PerRequest:
    """One row per request, sorted by id, so that runs of the same trace can be paired.

    Attributes:
        slowdown: TTFAT over that of the same request alone on the engine.
        ttot_s, think_tpot_s: NaN for a request that does not think.
        answer_itl_p99_s: over the request's own gaps; 0 for an answer of one token.
        first_wait_s: from its arrival to the first step that it was part of.
        longest_pause_s: longest time after that in which it was part of no step.
    """

    ids: tuple[str, ...]
    arrival_s: Floats
    ttft_s: Floats
    ttfat_s: Floats
    slowdown: Floats
    ttot_s: Floats
    think_tpot_s: Floats
    answer_itl_p99_s: Floats
    qoe: Floats
    e2e_s: Floats
    first_wait_s: Floats
    longest_pause_s: Floats


@dataclass(frozen=True)
class StepTimes:
    """What each step did; one entry per step.

    Attributes:
        end_s: of the virtual clock.
        seconds: that the step took.
        prefill_tokens: 0 for a step that only decodes.
        kv_usage: share of the KV pool that requests held after the step was scheduled.
    """

    end_s: Floats
    seconds: Floats
    prefill_tokens: NDArray[np.int64]
    kv_usage: Floats

    @property
    def decode_only_p99_s(self) -> float | None:
        """The p99 of the steps that computed no prompt."""
        return _quantile(self.seconds[(self.prefill_tokens == 0) & (self.seconds > 0)], 0.99)


def per_request(records: Sequence[ReplayRecord], alone: AloneTimes) -> PerRequest:
    """Times of each finished request."""
    ordered = sorted(records, key=lambda record: record.request.request_id)
    rows = np.array([_row(record, alone) for record in ordered])
    return PerRequest(tuple(record.request.request_id for record in ordered), *rows.T)


def _row(record: ReplayRecord, alone: AloneTimes) -> tuple[float, ...]:
    stamps, start = record.token_s, record.request.answer_start
    ttfat_s = stamps[start] - record.arrival_s
    gaps = np.diff(stamps[start:])
    return (
        record.arrival_s,
        stamps[0] - record.arrival_s,
        ttfat_s,
        ttfat_s / alone.seconds(len(record.request.prompt), start),
        stamps[start] - stamps[start - 1] if start else np.nan,
        (stamps[start - 1] - stamps[0]) / (start - 1) if start > 1 else np.nan,
        float(np.quantile(gaps, 0.99)) if gaps.size else 0.0,
        reading_quality(stamps[start:]),
        stamps[-1] - record.arrival_s,
        (record.admitted_s or 0.0) - record.arrival_s,
        record.longest_pause_s,
    )


def reading_quality(stamps: Sequence[float], pace_s: float = READING_S_PER_TOKEN) -> float:
    """Andes' QoE of one answer: tokens read over tokens ideally read, integrated over time.

    The ideal reader starts with the first answer token and reads one per ``pace_s``; the real one
    reads as fast, but no token before it comes. Both integrals end when the real one has read the
    last token. 1 is an answer that never keeps its reader waiting.
    """
    due = pace_s * np.arange(len(stamps))
    # The reader falls behind for good with each late token: pauses are not read up.
    read = due + np.maximum.accumulate(np.asarray(stamps) - stamps[0] - due)
    ideal = float(np.sum(read[-1] - due))
    return 1.0 if ideal <= 0 else float(np.sum(read[-1] - read)) / ideal


def answer_gaps(records: Sequence[ReplayRecord]) -> Floats:
    """Gaps between consecutive answer tokens of all requests, the stop token included."""
    gaps = [np.diff(record.token_s[record.request.answer_start :]) for record in records]
    return np.concatenate(gaps)


def run_figures(
    records: Sequence[ReplayRecord], requests: PerRequest, gaps: Floats, steps: StepTimes
) -> Figures:
    """All figures that one replay has by itself; None where there is nothing to take them from."""
    stamps = np.sort(list(chain.from_iterable(record.token_s for record in records)))
    span = steady_span(records, stamps)
    is_steady = (steps.end_s >= span[0]) & (steps.end_s <= span[1])
    decode_only = steps.decode_only_p99_s
    itl_p99, gap_max = _quantile(gaps, 0.99), _quantile(gaps, 1.0)
    busy_s = float(stamps[-1] - requests.arrival_s.min())
    return {
        "ttft_mean_s": float(requests.ttft_s.mean()),
        "ttft_p99_s": _quantile(requests.ttft_s, 0.99),
        "ttfat_mean_s": float(requests.ttfat_s.mean()),
        "ttfat_p50_s": _quantile(requests.ttfat_s, 0.5),
        "ttfat_p95_s": _quantile(requests.ttfat_s, 0.95),
        "ttfat_p99_s": _quantile(requests.ttfat_s, 0.99),
        "slowdown_mean": float(requests.slowdown.mean()),
        "slowdown_p50": _quantile(requests.slowdown, 0.5),
        "slowdown_p99": _quantile(requests.slowdown, 0.99),
        "ttot_p99_s": _quantile(requests.ttot_s, 0.99),
        "ttot_max_s": _quantile(requests.ttot_s, 1.0),
        "think_tpot_mean_s": _mean(requests.think_tpot_s),
        "think_tpot_p99_s": _quantile(requests.think_tpot_s, 0.99),
        "answer_itl_p50_s": _quantile(gaps, 0.5),
        "answer_itl_p99_s": itl_p99,
        "answer_itl_p999_s": _quantile(gaps, 0.999),
        "answer_gap_max_s": gap_max,
        "decode_only_step_p99_s": decode_only,
        "answer_itl_p99_over_decode_only": _over(itl_p99, decode_only),
        "answer_gap_max_over_decode_only": _over(gap_max, decode_only),
        "answer_stalls": float(np.sum(gaps > STALL_S)),
        "qoe_mean": float(requests.qoe.mean()),
        "qoe_low_share": float(np.mean(requests.qoe < LOW_QOE)),
        "e2e_mean_s": float(requests.e2e_s.mean()),
        "e2e_p99_s": _quantile(requests.e2e_s, 0.99),
        "tokens_per_s": len(stamps) / busy_s,
        "steady_tokens_per_s": steady_rate(stamps, span),
        "steady_kv_usage_p99": weighted_quantile(
            steps.kv_usage[is_steady], steps.seconds[is_steady], 0.99
        ),
        "preemptions": _total(records, "preemptions"),
        **{f"preemptions_{p}": _total(records, "preemptions", p) for p in Phase},
        "preempted_answers": float(sum(r.preemptions[Phase.ANSWER] > 0 for r in records)),
        "preemptions_max": float(max(r.preemptions.total() for r in records)),
        "recomputed_tokens": _total(records, "recomputed_tokens"),
        **{f"recomputed_tokens_{p}": _total(records, "recomputed_tokens", p) for p in Phase},
        "prompt_tokens": float(sum(len(r.request.prompt) for r in records)),
        "output_tokens": float(len(stamps)),
        "hit_tokens": float(sum(r.hit_tokens for r in records)),
        "bound_tokens": float(sum(r.bound_tokens for r in records)),
        "first_wait_max_s": float(requests.first_wait_s.max()),
        "longest_pause_s": float(requests.longest_pause_s.max()),
        "offered_tokens_per_s": len(stamps) / float(np.ptp(requests.arrival_s) or np.inf),
        "makespan_s": busy_s,
        "steps": float(len(steps.seconds)),
    }


def steady_rate(stamps: Floats, span: tuple[float, float]) -> float:
    """Output tokens per second within a time."""
    first, last = np.searchsorted(stamps, span, side="right")
    return float(last - first) / (span[1] - span[0]) if span[1] > span[0] else 0.0


def steady_span(records: Sequence[ReplayRecord], stamps: Floats) -> tuple[float, float]:
    """Begin and end of the time in which a replay neither fills up nor runs dry.

    It ends early when the last request is admitted early: then the queue is empty for good.

    Args:
        records: of all requests.
        stamps: of all output tokens, sorted.
    """
    first, last = (float(stamps[int(share * (len(stamps) - 1))]) for share in STEADY)
    admitted = max(record.admitted_s or 0.0 for record in records)
    return first, min(last, admitted) if admitted > first else last


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """The smallest value such that those up to it weigh ``share`` of all; 0 of nothing."""
    if not values.size:
        return 0.0
    order = np.argsort(values)
    heaped = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(heaped, share * heaped[-1])]])


def harm_p99(ours: PerRequest, stock: PerRequest) -> float:
    """The p99 over requests of (ours - stock) / stock, of the TTFAT of the same request."""
    return float(np.quantile(ours.ttfat_s / stock.ttfat_s - 1, 0.99))


def goodput(requests: PerRequest, makespan_s: float, slowdown: float, itl_s: float) -> float:
    """Requests per second whose TTFAT slowdown and own answer ITL p99 stay within limits."""
    is_good = (requests.slowdown <= slowdown) & (requests.answer_itl_p99_s <= itl_s)
    return float(is_good.sum()) / makespan_s


def _total(records: Sequence[ReplayRecord], field: str, phase: Phase | None = None) -> float:
    counts = [getattr(record, field) for record in records]
    return float(sum(c.total() if phase is None else c[phase] for c in counts))


def _quantile(values: Floats, share: float) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, share)) if known.size else None


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
