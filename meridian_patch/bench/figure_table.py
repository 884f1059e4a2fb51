"""Every figure of a comparison, once: name, label, unit, which way is better, and what it is.

Served, emulated and replayed runs have figures of the same name computed by the same function.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meridian_patch.bench.statistics import mean, quantile

STALL_S = 0.25
# A gap that a reader notices.
PAUSE_S = 0.1
HARM = "harm_p99"
GOODPUT = "goodput_per_s"
LATE_SHARE = "late_share"
EVICTION_TIERS = ("think_complete", "think_active", "output_critical")
HIT_TIERS = (*EVICTION_TIERS, "in_use")

Floats = NDArray[np.float64]
Figures = dict[str, float | None]
# Values are in seconds, shares and counts; shown is a value times this.
_SCALES = {"ms": 1000.0, "%": 100.0, "% of requests": 100.0}
# Digits after the point, where all figures of a unit have as many.
_DIGITS = {"ms": 1, "%": 1, "% of requests": 1, "requests/s": 3}

# What a label does not say.
_WORDS: Mapping[str, str] = {
    "ttft_mean_s": "submit to first token of any kind",
    "ttfat_mean_s": "submit to first answer token",
    "slowdown_mean": "TTFAT over that of the same request alone on the engine with nothing cached",
    HARM: "p99 over requests of (arm - stock) / stock, TTFAT of the same request",
    "ttot_p99_s": "boundary to first answer token",
    "think_tpot_mean_s": "per think token but the first",
    "answer_itl_p50_s": "gaps between answer tokens",
    "answer_itl_p99_over_decode_only": "over the p99 time of the run's steps without prefill",
    "answer_stalls": f"answer gaps over {STALL_S * 1000:.0f} ms",
    "qoe_mean": "Andes' integral at 50 ms/token",
    "tokens_per_s": "output tokens from the first arrival to the last token",
    "steady_tokens_per_s": "from 10 % to 80 % of all output tokens",
    "window_tokens_per_s": "output tokens from the first arrival to the last",
    GOODPUT: "requests within the limits on TTFAT slowdown and own answer ITL p99",
    "hit_share": "prompt tokens found in the prefix cache when a request is first admitted",
    "hit_bound_share": "prompt tokens in full blocks that an earlier request of the run computed",
    "missed_tokens": "prompt tokens that would be hit if nothing were evicted, and are not",
    "first_wait_max_s": "from a request's arrival to the first step that it is part of",
    "longest_pause_s": "longest time after its first step in which a request was part of no step",
}


@dataclass(frozen=True)
class RequestTimes:
    """What the client of one request waited for.

    Attributes:
        submit_s: from the start of the trace.
        ttft_s: submit to first token of any kind.
        boundary_s: when the last token of the think end came, from the start of the trace.
        ttfat_s: submit to first answer token.
        ttot_s: boundary to first answer token.
        e2e_s: submit to last token.
        answer_gaps_s: gaps between consecutive answer tokens, the stop token included.
        answer_gap_ends_s: when each of these gaps ended, from the start of the trace.
    """

    submit_s: float
    ttft_s: float
    boundary_s: float | None
    ttfat_s: float | None
    ttot_s: float | None
    e2e_s: float
    answer_gaps_s: tuple[float, ...]
    answer_gap_ends_s: tuple[float, ...]

    @classmethod
    def of(cls, submit_s: float, token_s: Sequence[float], answer_start: int | None) -> Self:
        """Times of a request.

        Args:
            submit_s: when it was sent.
            token_s: when each of its tokens came; at least one.
            answer_start: index of the first answer token, 0 without a thought; None: the thought
                has no end.
        """
        answer_s = token_s[answer_start:] if answer_start is not None else []
        boundary = token_s[answer_start - 1] if answer_start else None
        return cls(
            submit_s=submit_s,
            ttft_s=token_s[0] - submit_s,
            boundary_s=boundary,
            ttfat_s=answer_s[0] - submit_s if answer_s else None,
            ttot_s=answer_s[0] - boundary if answer_s and boundary is not None else None,
            e2e_s=token_s[-1] - submit_s,
            answer_gaps_s=tuple(b - a for a, b in pairwise(answer_s)),
            answer_gap_ends_s=tuple(answer_s[1:]),
        )


class Times(NamedTuple):
    """Times of the requests of one run; the names are those of ``RequestTimes``.

    Attributes:
        ttft_s, ttfat_s, ttot_s, e2e_s: one per request; NaN for one without.
        answer_gaps_s: of all requests.
    """

    ttft_s: Floats
    ttfat_s: Floats
    ttot_s: Floats
    e2e_s: Floats
    answer_gaps_s: Floats

    @classmethod
    def of(cls, requests: Iterable[RequestTimes]) -> Self:
        """The times of these requests."""
        listed = list(requests)
        rows = [(t.ttft_s, t.ttfat_s, t.ttot_s, t.e2e_s) for t in listed]
        known = [[nan if value is None else value for value in row] for row in rows]
        columns = np.array(known, np.float64).reshape(-1, 4).T
        gaps = np.array([gap for t in listed for gap in t.answer_gaps_s])
        return cls(columns[0], columns[1], columns[2], columns[3], gaps)


@dataclass(frozen=True)
class Kind:
    """One figure.

    Attributes:
        name: key in the report's JSON; ends in its unit.
        label: shown in tables.
        unit: shown; the value itself is in seconds, a share, or a count.
        better: which way is better; None: neither.
        decimals: digits after the point; None: as many as others of the unit have.
        of: computes it from the times of a run's requests; None: it comes from elsewhere.
    """

    name: str
    label: str
    unit: str = ""
    better: Literal["less", "more"] | None = "less"
    decimals: int | None = None
    of: Callable[[Times], float | None] | None = None

    @property
    def words(self) -> str:
        """What the label does not say; may be empty."""
        return _WORDS.get(self.name, "")

    @property
    def title(self) -> str:
        """Label and unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def scale(self) -> float:
        """Factor from a value to what is shown."""
        return _SCALES.get(self.unit, 1.0)

    @property
    def digits(self) -> int:
        """Digits after the point where each figure has a number of its own."""
        return _DIGITS.get(self.unit, 2) if self.decimals is None else self.decimals


def figures_of(times: Times, kinds: Iterable[Kind]) -> Figures:
    """Those of the figures that follow from times."""
    return {kind.name: kind.of(times) for kind in kinds if kind.of is not None}


def _mean(field: str) -> Callable[[Times], float | None]:
    return lambda times: mean(getattr(times, field))


def _at(field: str, share: float) -> Callable[[Times], float | None]:
    return lambda times: quantile(getattr(times, field), share)


def _stalls(times: Times) -> float:
    return float(np.sum(times.answer_gaps_s > STALL_S))


def _pauses(times: Times) -> float:
    gaps = times.answer_gaps_s
    return float(np.sum(gaps[gaps > PAUSE_S]))


FIGURES: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("ttft_mean_s", "TTFT mean", "s", of=_mean("ttft_s")),
        Kind("ttft_p50_s", "TTFT p50", "ms", of=_at("ttft_s", 0.5)),
        Kind("ttft_p99_s", "TTFT p99", "ms", of=_at("ttft_s", 0.99)),
        Kind("ttfat_mean_s", "TTFAT mean", "s", of=_mean("ttfat_s")),
        Kind("ttfat_p50_s", "TTFAT p50", "s", of=_at("ttfat_s", 0.5)),
        Kind("ttfat_p95_s", "TTFAT p95", "s", of=_at("ttfat_s", 0.95)),
        Kind("ttfat_p99_s", "TTFAT p99", "s", of=_at("ttfat_s", 0.99)),
        Kind("slowdown_mean", "TTFAT slowdown mean"),
        Kind("slowdown_p99", "TTFAT slowdown p99"),
        Kind(HARM, "harm p99", "%"),
        Kind("ttot_p50_s", "TTOT p50", "ms", of=_at("ttot_s", 0.5)),
        Kind("ttot_p99_s", "TTOT p99", "ms", of=_at("ttot_s", 0.99)),
        Kind("ttot_max_s", "TTOT max", "ms", of=_at("ttot_s", 1.0)),
        Kind("think_tpot_mean_s", "think TPOT mean", "ms"),
        Kind("think_tpot_p99_s", "think TPOT p99", "ms"),
        Kind("answer_itl_p50_s", "answer ITL p50", "ms", of=_at("answer_gaps_s", 0.5)),
        Kind("answer_itl_p99_s", "answer ITL p99", "ms", of=_at("answer_gaps_s", 0.99)),
        Kind("answer_itl_p999_s", "answer ITL p99.9", "ms", of=_at("answer_gaps_s", 0.999)),
        Kind("answer_gap_max_s", "worst answer gap", "ms", of=_at("answer_gaps_s", 1.0)),
        Kind("answer_itl_p99_over_decode_only", "answer ITL p99 / decode step"),
        Kind("answer_gap_max_over_decode_only", "answer gap max / decode step"),
        Kind("decode_only_step_p99_s", "decode-only step p99", "ms"),
        Kind("answer_stalls", f"answer stalls > {STALL_S * 1000:.0f} ms", decimals=1, of=_stalls),
        Kind("answer_pauses_s", "answers stood still", "s", of=_pauses),
        Kind("qoe_mean", "QoE mean", better="more", decimals=4),
        Kind("qoe_low_share", "QoE < 0.95", "% of requests"),
        Kind("silence_max_s", "longest silence", "ms"),
        Kind("e2e_mean_s", "e2e mean", "s", of=_mean("e2e_s")),
        Kind("e2e_p50_s", "end to end p50", "s", of=_at("e2e_s", 0.5)),
        Kind("e2e_p99_s", "e2e p99", "s", of=_at("e2e_s", 0.99)),
        Kind("tokens_per_s", "tokens/s", better="more", decimals=1),
        Kind("steady_tokens_per_s", "steady tokens/s", better="more", decimals=1),
        Kind("window_tokens_per_s", "tokens/s while requests arrive", better="more", decimals=1),
        Kind(GOODPUT, "goodput", "requests/s", better="more"),
        Kind("preemptions", "preemptions, all", decimals=1),
        Kind("answer_preemptions", "answer preemptions"),
        Kind("think_preemptions", "think preemptions"),
        Kind("preemptions_prefill", "... in prefill", decimals=1),
        Kind("preemptions_think", "... thinking", decimals=1),
        Kind("preemptions_answer", "... answering", decimals=1),
        Kind("preempted_answers", "preempted answers", decimals=1),
        Kind("preemptions_max", "preemptions of one request, most", decimals=1),
        Kind("policy_fallbacks", "policy fallbacks"),
        Kind("recomputed_tokens", "recomputed tokens", decimals=0),
        Kind("recomputed_tokens_think", "... thinking", decimals=0),
        Kind("recomputed_tokens_answer", "... answering", decimals=0),
        Kind("hit_share", "prefix hits", "%", better="more"),
        Kind("hit_bound_share", "... if nothing were evicted", "%", better=None),
        Kind("missed_tokens", "avoidable prefix misses", decimals=0),
        Kind("prompt_tokens", "prompt tokens", better=None),
        Kind("computed_tokens", "prompt tokens computed"),
        Kind("computed_again_tokens", "prompt tokens computed again"),
        *(Kind(f"evictions_{t}", f"evicted {t.upper()}", better=None) for t in EVICTION_TIERS),
        *(Kind(f"hits_{tier}", f"hit tokens {tier.upper()}", better=None) for tier in HIT_TIERS),
        Kind("think_tokens_mean", "think tokens per request"),
        Kind("accuracy", "graded accuracy", "%", better="more"),
        Kind("requests", "requests sent", better=None),
        Kind("failed_requests", "failed requests"),
        Kind("unended_thoughts", "thoughts without end"),
        Kind("first_wait_max_s", "longest first wait", "s"),
        Kind("longest_pause_s", "longest pause", "s"),
        Kind(LATE_SHARE, "emulated time late", "%"),
        Kind("engine_cpu_s", "engine's CPU time per step", "ms"),
    )
}
