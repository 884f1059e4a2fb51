"""Figures of one run: what its clients noted, and the server's counters. Times in seconds."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from meridian_patch.bench.figure_table import (
    EVICTION_TIERS,
    FIGURES,
    HIT_TIERS,
    LATE_SHARE,
    Figures,
    RequestTimes,
    Times,
    figures_of,
)
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.prefixes import reusable_tokens
from meridian_patch.bench.statistics import mean
from meridian_patch.demo.problems import grade
from meridian_patch.emulation.ledger import engine_seconds, late_share

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
    "meridian_kv_evictions": {("tier", tier): f"evictions_{tier}" for tier in EVICTION_TIERS},
    "meridian_kv_hit_tokens": {("tier", tier): f"hits_{tier}" for tier in HIT_TIERS},
}


_SHOWN = (
    *("ttft_p50_s", "ttft_p99_s", "ttfat_p50_s", "ttfat_mean_s", "ttfat_p95_s", "ttfat_p99_s"),
    *("ttot_p50_s", "ttot_max_s", "answer_itl_p50_s", "answer_itl_p99_s", "answer_gap_max_s"),
    *("answer_stalls", "answer_pauses_s"),
    *("answer_preemptions", "think_preemptions", "preemptions", "policy_fallbacks"),
    *("silence_max_s", "e2e_p50_s", "tokens_per_s", "think_tokens_mean"),
    *("computed_tokens", "computed_again_tokens", "accuracy", "failed_requests"),
)
FIGURE_KINDS = tuple(FIGURES[name] for name in _SHOWN)
# Shown below the others where servers run on an emulated device.
EMULATED_KINDS = (FIGURES[LATE_SHARE], FIGURES["engine_cpu_s"])
# Shown above the others where requests are turns of conversations.
TURN_KINDS = (
    FIGURES["hit_share"],
    FIGURES["prompt_tokens"],
    *(FIGURES[f"evictions_{tier}"] for tier in EVICTION_TIERS),
    *(FIGURES[f"hits_{tier}"] for tier in HIT_TIERS),
    FIGURES["requests"],
    FIGURES["unended_thoughts"],
)


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
    # An empty marker stands for no thinking: the answer begins with the first token.
    first = first_answer_index(record.token_ids, end_marker)
    return RequestTimes.of(record.submit_s, record.token_s, first)


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
    found = [t for t in (request_times(record, end_marker) for record in records) if t is not None]
    ended = [record for record in records if record.finish_reason is not None]
    graded = [record for record in ended if record.request.expected]
    right = sum(grade(record.answer, record.request.expected) for record in graded)
    counted = (name for names in _COUNTERS.values() for name in names.values())
    kinds = {kind.name for kind in (*FIGURE_KINDS, *TURN_KINDS)}
    patience = dict.fromkeys(("answer_stalls", "answer_pauses_s")) if tokens > 1 else {}
    return {
        **{name: counters.get(name) for name in counted if name in kinds},
        **figures_of(Times.of(found), FIGURE_KINDS),
        **patience,
        "silence_max_s": longest_silence(records),
        "tokens_per_s": _tokens_per_s(records),
        "think_tokens_mean": mean(_think_tokens(ended, end_marker)),
        "computed_tokens": _computed_tokens(counters),
        "computed_again_tokens": _computed_again(records, counters, block_size),
        "accuracy": right / len(graded) if graded else None,
        "failed_requests": float(len(records) - len(ended)),
        LATE_SHARE: late_share(counters),
        "engine_cpu_s": engine_seconds(counters),
        "hit_share": _hit_share(counters),
        "requests": float(len(records)),
        "unended_thoughts": float(sum(t.ttfat_s is None for t in found)),
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


def _tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Generated tokens over the time from the first submit to the last token."""
    stamps = [record.token_s[-1] for record in records if record.token_s]
    if not stamps:
        return None
    span = max(stamps) - min(record.submit_s for record in records)
    return sum(len(record.token_ids) for record in records) / span if span > 0 else None
