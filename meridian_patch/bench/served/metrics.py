"""Figures of one run: what its clients noted, and the server's counters. Times in seconds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.prefixes import reusable_tokens
from meridian_patch.demo.problems import grade
from meridian_patch.emulation.ledger import engine_seconds, late_share

STALL_S = 0.25
LATE_SHARE = "late_share"
# A gap that a reader notices.
PAUSE_S = 0.1

Figures = dict[str, float | None]

_EVICTION_TIERS = ("think_complete", "think_active", "output_critical")
_HIT_TIERS = (*_EVICTION_TIERS, "in_use")
# Family on a metrics page: the label and value that are counted, and the name they get here.
_COUNTERS: Mapping[str, Mapping[tuple[str, str] | None, str]] = {
    "vllm:num_preemptions": {None: "preemptions"},
    "vllm:prefix_cache_queries": {None: "prompt_tokens"},
    "vllm:prefix_cache_hits": {None: "hit_tokens"},
    "meridian_preemptions": {
        ("phase", "answer"): "answer_preemptions",
        ("phase", "think"): "think_preemptions",
    },
    "meridian_policy_fallbacks": {
        None: "policy_fallbacks",
        ("reason", "exception"): "policy_exceptions",
    },
    "meridian_probes": {
        ("result", "measured"): "probes_measured",
        ("result", "lost"): "probes_lost",
    },
    "meridian_kv_evictions": {("tier", tier): f"evictions_{tier}" for tier in _EVICTION_TIERS},
    "meridian_kv_hit_tokens": {("tier", tier): f"hits_{tier}" for tier in _HIT_TIERS},
}


@dataclass(frozen=True)
class FigureKind:
    """Name, label and unit of one figure.

    Attributes:
        name: key in the report's JSON; ends in its unit.
        label: shown in tables.
        unit: shown; the value itself is in seconds, a share, or a count.
    """

    name: str
    label: str
    unit: str = ""


FIGURE_KINDS = (
    FigureKind("ttft_p50_s", "TTFT p50", "ms"),
    FigureKind("ttft_p99_s", "TTFT p99", "ms"),
    FigureKind("ttfat_p50_s", "TTFAT p50", "s"),
    FigureKind("ttfat_mean_s", "TTFAT mean", "s"),
    FigureKind("ttfat_p95_s", "TTFAT p95", "s"),
    FigureKind("ttfat_p99_s", "TTFAT p99", "s"),
    FigureKind("ttot_p50_s", "TTOT p50", "ms"),
    FigureKind("ttot_max_s", "TTOT max", "ms"),
    FigureKind("answer_itl_p50_s", "answer ITL p50", "ms"),
    FigureKind("answer_itl_p99_s", "answer ITL p99", "ms"),
    FigureKind("answer_gap_max_s", "worst answer gap", "ms"),
    FigureKind("answer_stalls", f"answer stalls > {STALL_S * 1000:.0f} ms"),
    FigureKind("answer_pauses_s", "answers stood still", "s"),
    FigureKind("answer_preemptions", "answer preemptions"),
    FigureKind("think_preemptions", "think preemptions"),
    FigureKind("preemptions", "preemptions, all"),
    FigureKind("policy_fallbacks", "policy fallbacks"),
    FigureKind("silence_max_s", "longest silence", "ms"),
    FigureKind("e2e_p50_s", "end to end p50", "s"),
    FigureKind("tokens_per_s", "tokens/s"),
    FigureKind("think_tokens_mean", "think tokens per request"),
    FigureKind("computed_tokens", "prompt tokens computed"),
    FigureKind("computed_again_tokens", "prompt tokens computed again"),
    FigureKind("accuracy", "graded accuracy", "%"),
    FigureKind("failed_requests", "failed requests"),
)
# Shown below the others where servers run on an emulated device.
EMULATED_KINDS = (
    FigureKind(LATE_SHARE, "emulated time late", "%"),
    FigureKind("engine_cpu_s", "engine's CPU time per step", "ms"),
)
# Shown above the others where requests are turns of conversations.
TURN_KINDS = (
    FigureKind("hit_share", "prefix hits", "%"),
    FigureKind("prompt_tokens", "prompt tokens"),
    *(FigureKind(f"evictions_{tier}", f"evicted {tier.upper()}") for tier in _EVICTION_TIERS),
    *(FigureKind(f"hits_{tier}", f"hit tokens {tier.upper()}") for tier in _HIT_TIERS),
    FigureKind("requests", "requests sent"),
    FigureKind("unended_thoughts", "thoughts without end"),
)


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


def first_answer_index(token_ids: Sequence[int], end_marker: Sequence[int]) -> int | None:
    """Index after the first end marker, or None when thinking never ended."""
    width = len(end_marker)
    for start in range(len(token_ids) - width + 1):
        if list(token_ids[start : start + width]) == list(end_marker):
            return start + width
    return None


def request_times(record: RequestRecord, end_marker: Sequence[int]) -> RequestTimes | None:
    """Times of one request; None when it failed or never got a token."""
    if record.error is not None or not record.token_s:
        return None
    submit = record.submit_s
    first = first_answer_index(record.token_ids, end_marker)
    answer_s = record.token_s[first:] if first is not None else []
    # An empty marker stands for no thinking: the answer begins with the first token.
    boundary = record.token_s[first - 1] if first else None
    return RequestTimes(
        submit_s=submit,
        ttft_s=record.token_s[0] - submit,
        boundary_s=boundary,
        ttfat_s=answer_s[0] - submit if answer_s else None,
        ttot_s=answer_s[0] - boundary if answer_s and boundary is not None else None,
        e2e_s=record.token_s[-1] - submit,
        answer_gaps_s=tuple(b - a for a, b in pairwise(answer_s)),
        answer_gap_ends_s=tuple(answer_s[1:]),
    )


def read_counters(page: str) -> dict[str, float]:
    """Counters of a ``/metrics`` page by the names in ``_COUNTERS``, summed over engines.

    A server that does not export a family lacks its keys: stock has none of ours.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for label, name in _COUNTERS.get(family.name, {}).items():
            # A family that is declared but has not counted yet has no sample: it stands at 0.
            found[name] = _total(family.samples, label)
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each counter of ``after`` rose by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _total(samples: Iterable[Sample], label: tuple[str, str] | None) -> float:
    return sum(
        sample.value
        for sample in samples
        if sample.name.endswith("_total")
        and (label is None or sample.labels.get(label[0]) == label[1])
    )


def run_figures(
    records: Sequence[RequestRecord],
    end_marker: Sequence[int],
    counters: Mapping[str, float],
    block_size: int | None = None,
    tokens: int = 1,
) -> Figures:
    """All figures of one run.

    Args:
        records: one per request that was sent.
        end_marker: token ids that end thinking.
        counters: what rose during the run, from ``difference``; a missing one is reported as
            None.
        block_size: tokens per block of the server's KV cache, where it is known.
        tokens: of an emulated device that one token stands for. Above 1 every gap is one of
            several tokens, and limits of a reader's patience say nothing of it.
    """
    times = [t for t in (request_times(record, end_marker) for record in records) if t is not None]
    gaps = [gap for t in times for gap in t.answer_gaps_s]
    ttft = [t.ttft_s for t in times]
    ttfat = [t.ttfat_s for t in times if t.ttfat_s is not None]
    ttot = [t.ttot_s for t in times if t.ttot_s is not None]
    ended = [record for record in records if record.finish_reason is not None]
    graded = [record for record in ended if record.request.expected]
    right = sum(grade(record.answer, record.request.expected) for record in graded)
    thought = _think_tokens(ended, end_marker)
    counted = (name for names in _COUNTERS.values() for name in names.values())
    kinds = {kind.name for kind in (*FIGURE_KINDS, *TURN_KINDS)}
    return {
        **{name: counters.get(name) for name in counted if name in kinds},
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p99_s": quantile(ttft, 0.99),
        "ttfat_p50_s": quantile(ttfat, 0.5),
        "ttfat_mean_s": sum(ttfat) / len(ttfat) if ttfat else None,
        "ttfat_p95_s": quantile(ttfat, 0.95),
        "ttfat_p99_s": quantile(ttfat, 0.99),
        "ttot_p50_s": quantile(ttot, 0.5),
        "ttot_max_s": max(ttot, default=None),
        "answer_itl_p50_s": quantile(gaps, 0.5),
        "answer_itl_p99_s": quantile(gaps, 0.99),
        "answer_gap_max_s": max(gaps, default=None),
        "answer_stalls": float(sum(gap > STALL_S for gap in gaps)) if tokens == 1 else None,
        "answer_pauses_s": sum(gap for gap in gaps if gap > PAUSE_S) if tokens == 1 else None,
        "silence_max_s": longest_silence(records),
        "e2e_p50_s": quantile([t.e2e_s for t in times], 0.5),
        "tokens_per_s": _tokens_per_s(records),
        "think_tokens_mean": fmean(thought) if thought else None,
        "computed_tokens": _computed_tokens(counters),
        "computed_again_tokens": _computed_again(records, counters, block_size),
        "accuracy": right / len(graded) if graded else None,
        "failed_requests": float(len(records) - len(ended)),
        LATE_SHARE: late_share(counters),
        "engine_cpu_s": engine_seconds(counters),
        "hit_share": _hit_share(counters),
        "requests": float(len(records)),
        "unended_thoughts": float(len(times) - len(ttfat)),
    }


def longest_silence(records: Sequence[RequestRecord]) -> float | None:
    """Longest time in which no stream got a token although one was under way.

    The scheduler serves a request in every step, so a long silence is the machine's doing (or one
    very long step), and answer gaps of its size say nothing about scheduling.
    """
    streams = [record.token_s for record in records if record.token_s]
    stamps = sorted(stamp for stream in streams for stamp in stream)
    for begin, end in sorted(pairwise(stamps), key=lambda pair: pair[0] - pair[1]):
        if any(stream[0] <= begin and end <= stream[-1] for stream in streams):
            return end - begin
    return None


def _hit_share(counters: Mapping[str, float]) -> float | None:
    """Prompt tokens found in the prefix cache over prompt tokens, both at first admission."""
    asked = counters.get("prompt_tokens")
    return counters.get("hit_tokens", 0.0) / asked if asked else None


def _computed_tokens(counters: Mapping[str, float]) -> float | None:
    """Prompt tokens that the prefix cache did not have, at first admission."""
    asked = counters.get("prompt_tokens")
    return asked - counters.get("hit_tokens", 0.0) if asked is not None else None


def _computed_again(
    records: Sequence[RequestRecord], counters: Mapping[str, float], block_size: int | None
) -> float | None:
    """Prompt tokens that the prefix cache had evicted: of those computed before, the ones not hit.

    A prompt may hit what is computed while it waits, so that hits can exceed what is counted here.
    """
    reusable = reusable_tokens(records, block_size) if block_size else None
    if reusable is None or "prompt_tokens" not in counters:
        return None
    return max(0.0, reusable - counters.get("hit_tokens", 0.0))


def _think_tokens(records: Iterable[RequestRecord], end_marker: Sequence[int]) -> list[int]:
    """Tokens before each answer; all tokens of a request whose thought did not end."""
    if not end_marker:
        return []
    firsts = ((record, first_answer_index(record.token_ids, end_marker)) for record in records)
    return [len(record.token_ids) if first is None else first for record, first in firsts]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The ``share`` quantile (0 to 1); None without values."""
    return float(np.quantile(values, share)) if values else None


def _tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Generated tokens over the time from the first submit to the last token."""
    stamps = [record.token_s[-1] for record in records if record.token_s]
    if not stamps:
        return None
    span = max(stamps) - min(record.submit_s for record in records)
    return sum(len(record.token_ids) for record in records) / span if span > 0 else None
