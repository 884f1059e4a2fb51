"""Figures of one replay; times are in seconds of the virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meridian_patch.bench.figure_table import Figures, Floats, RequestTimes, Times, figures_of
from meridian_patch.bench.simulated.rows import ROWS
from meridian_patch.bench.statistics import mean, quantile
from meridian_patch.phase.tracker import Phase
from meridian_patch.replay.types import ReplayRecord, StepWork

# The pace of a reader, and the QoE below which an answer counts as low.
READING_S_PER_TOKEN = 0.05
LOW_QOE = 0.95
# Steady figures are taken between these shares of all output tokens. Before, the pool fills up;
# after, too few requests are left to fill it.
STEADY = (0.1, 0.8)
# Borders of the histogram of answer gaps, in seconds; 100 bins per factor of 10.
GAP_BORDERS_S = np.geomspace(1e-4, 1e3, 701)


class AloneTimes:
    """Times of a request that runs alone on the engine with nothing cached.

    Its prompt is computed in chunks. Each later step computes one token over the whole context.

    Args:
        step_seconds: of the cost model.
        chunk_tokens: upper bound of the tokens of one step.
    """

    def __init__(self, step_seconds: Callable[[StepWork], float], chunk_tokens: int) -> None:
        self._step_seconds = step_seconds
        self._chunk_tokens = chunk_tokens
        # Index c holds the seconds of all decode steps with a context of 1 to c tokens.
        self._decode_s = np.zeros(1)

    def seconds(self, prompt_tokens: int, token: int) -> float:
        """From submission to the output token with this index, counted from 0."""
        return self._prefill(prompt_tokens) + self._decode(prompt_tokens, token)

    def _prefill(self, prompt_tokens: int) -> float:
        seconds = 0.0
        for start in range(0, prompt_tokens, self._chunk_tokens):
            end = min(prompt_tokens, start + self._chunk_tokens)
            attended = sum(range(start + 1, end + 1))
            seconds += self._step_seconds(StepWork(end - start, 0, end, attended))
        return seconds

    def _decode(self, prompt_tokens: int, tokens: int) -> float:
        last = prompt_tokens + tokens
        if last >= len(self._decode_s):
            contexts = range(len(self._decode_s), max(last + 1, 2 * len(self._decode_s)))
            steps = [self._step_seconds(StepWork(0, 1, c, c)) for c in contexts]
            more = self._decode_s[-1] + np.cumsum(steps)
            self._decode_s = np.concatenate([self._decode_s, more])
        return float(self._decode_s[last] - self._decode_s[prompt_tokens])


@dataclass(frozen=True)
class PerRequest:
    """One row per request, sorted by id, so that runs of the same trace can be paired.

    Attributes:
        slowdown: TTFAT over that of the same request alone on the engine.
        ttot_s, think_tpot_s: NaN for a request that does not think.
        answer_itl_p99_s: over the request's own gaps; 0 for an answer of one token.
        first_wait_s: from arrival to the first step that the request was part of.
        longest_pause_s: longest later time in which it was part of no step.
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
    """Arrays with one entry per step.

    Attributes:
        end_s: time at which the step ended.
        seconds: duration.
        prefill_tokens: 0 for a step that only decodes.
        kv_usage: share of the KV pool that requests held when the step was scheduled.
    """

    end_s: Floats
    seconds: Floats
    prefill_tokens: NDArray[np.int64]
    kv_usage: Floats

    @property
    def decode_only_p99_s(self) -> float | None:
        """p99 of the duration of the steps that computed no prompt."""
        return quantile(self.seconds[(self.prefill_tokens == 0) & (self.seconds > 0)], 0.99)


def per_request(records: Sequence[ReplayRecord], alone: AloneTimes) -> PerRequest:
    """Times of each finished request."""
    ordered = sorted(records, key=lambda record: record.request.request_id)
    rows = np.array([_row(record, alone) for record in ordered])
    return PerRequest(tuple(record.request.request_id for record in ordered), *rows.T)


def _row(record: ReplayRecord, alone: AloneTimes) -> tuple[float, ...]:
    stamps, start = record.token_s, record.request.answer_start
    times = RequestTimes.of(record.arrival_s, stamps, start)
    assert times.ttfat_s is not None
    return (
        record.arrival_s,
        times.ttft_s,
        times.ttfat_s,
        times.ttfat_s / alone.seconds(len(record.request.prompt), start),
        np.nan if times.ttot_s is None else times.ttot_s,
        (stamps[start - 1] - stamps[0]) / (start - 1) if start > 1 else np.nan,
        quantile(times.answer_gaps_s, 0.99) or 0.0,
        reading_quality(stamps[start:]),
        times.e2e_s,
        (record.admitted_s or 0.0) - record.arrival_s,
        record.longest_pause_s,
    )


def reading_quality(stamps: Sequence[float]) -> float:
    """Andes' QoE of one answer: tokens read over tokens ideally read, integrated over time.

    The ideal reader starts with the first answer token and reads one per ``READING_S_PER_TOKEN``.
    The real reader has the same pace and waits for each token. Both integrals end when the real
    reader has read the last token. The QoE is 1 if the reader never waits.
    """
    due = READING_S_PER_TOKEN * np.arange(len(stamps))
    # Each late token delays all tokens after it: the reader does not catch up.
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
    """All figures of one replay; None for a figure without data."""
    stamps = np.sort(list(chain.from_iterable(record.token_s for record in records)))
    span = steady_span(records, stamps)
    is_steady = (steps.end_s >= span[0]) & (steps.end_s <= span[1])
    decode_only = steps.decode_only_p99_s
    prompt_tokens = float(sum(len(record.request.prompt) for record in records))
    hits = float(sum(record.hit_tokens for record in records))
    bound = float(sum(record.bound_tokens for record in records))
    busy_s = float(stamps[-1] - requests.arrival_s.min())
    times = Times(requests.ttft_s, requests.ttfat_s, requests.ttot_s, requests.e2e_s, gaps)
    timed = figures_of(times, (row.kind for row in ROWS))
    return {
        **timed,
        "slowdown_mean": float(requests.slowdown.mean()),
        "slowdown_p99": quantile(requests.slowdown, 0.99),
        "think_tpot_mean_s": mean(requests.think_tpot_s),
        "think_tpot_p99_s": quantile(requests.think_tpot_s, 0.99),
        "decode_only_step_p99_s": decode_only,
        "answer_itl_p99_over_decode_only": _over(timed["answer_itl_p99_s"], decode_only),
        "answer_gap_max_over_decode_only": _over(timed["answer_gap_max_s"], decode_only),
        "qoe_mean": float(requests.qoe.mean()),
        "qoe_low_share": float(np.mean(requests.qoe < LOW_QOE)),
        "tokens_per_s": len(stamps) / busy_s,
        "steady_tokens_per_s": steady_rate(stamps, span),
        # Afterwards the longest requests run alone: the makespan is theirs.
        "window_tokens_per_s": steady_rate(
            stamps, (float(requests.arrival_s.min()), float(requests.arrival_s.max()))
        ),
        "steady_kv_usage_p99": weighted_quantile(
            steps.kv_usage[is_steady], steps.seconds[is_steady], 0.99
        ),
        "preemptions": _total(records, "preemptions"),
        **{f"preemptions_{p}": _total(records, "preemptions", p) for p in Phase},
        "preempted_answers": float(sum(r.preemptions[Phase.ANSWER] > 0 for r in records)),
        "preemptions_max": float(max(r.preemptions.total() for r in records)),
        "recomputed_tokens": _total(records, "recomputed_tokens"),
        **{f"recomputed_tokens_{p}": _total(records, "recomputed_tokens", p) for p in Phase},
        "prompt_tokens": prompt_tokens,
        "output_tokens": float(len(stamps)),
        # Without shared prefixes there is nothing to hit.
        "hit_share": hits / prompt_tokens if bound else None,
        "hit_bound_share": bound / prompt_tokens if bound else None,
        "missed_tokens": bound - hits if bound else None,
        "first_wait_max_s": float(requests.first_wait_s.max()),
        "longest_pause_s": float(requests.longest_pause_s.max()),
        "makespan_s": busy_s,
        "steps": float(len(steps.seconds)),
    }


def steady_rate(stamps: Floats, span: tuple[float, float]) -> float:
    """Output tokens per second within a span of time."""
    first, last = np.searchsorted(stamps, span, side="right")
    return float(last - first) / (span[1] - span[0]) if span[1] > span[0] else 0.0


def steady_span(records: Sequence[ReplayRecord], stamps: Floats) -> tuple[float, float]:
    """Begin and end of the time in which the KV pool is full and requests wait.

    It ends early if the last request is admitted early, because no request waits after that.

    Args:
        records: of all requests.
        stamps: of all output tokens, sorted.
    """
    first, last = (float(stamps[int(share * (len(stamps) - 1))]) for share in STEADY)
    admitted = max(record.admitted_s or 0.0 for record in records)
    return first, min(last, admitted) if admitted > first else last


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """The smallest value such that the values up to it have ``share`` of all weight; 0 if empty."""
    if not values.size:
        return 0.0
    order = np.argsort(values)
    heaped = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(heaped, share * heaped[-1])]])


def harm_p99(ours: PerRequest, stock: PerRequest) -> float:
    """p99 over requests of (ours - stock) / stock of the TTFAT of the same request."""
    return float(np.quantile(ours.ttfat_s / stock.ttfat_s - 1, 0.99))


def goodput(requests: PerRequest, makespan_s: float, slowdown: float, itl_s: float) -> float:
    """Requests per second whose TTFAT slowdown and own answer ITL p99 stay within limits."""
    is_good = (requests.slowdown <= slowdown) & (requests.answer_itl_p99_s <= itl_s)
    return float(is_good.sum()) / makespan_s


def _total(records: Sequence[ReplayRecord], field: str, phase: Phase | None = None) -> float:
    counts = [getattr(record, field) for record in records]
    return float(sum(c.total() if phase is None else c[phase] for c in counts))


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
