"""Figures of served conversations, from what clients noted and two ``/metrics`` pages."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.metrics import FigureKind, Figures, quantile, request_times
from meridian_patch.demo.problems import grade

EVICTION_TIERS = ("think_complete", "think_active", "output_critical")
HIT_TIERS = (*EVICTION_TIERS, "in_use")
PHASES = ("prefill", "think", "answer")
_POOL_USE = "vllm:kv_cache_usage_perc"
# Family on the page: label that splits it, its values, and the names they get here.
_FAMILIES: Mapping[str, Mapping[tuple[str, str] | None, str]] = {
    "vllm:prefix_cache_queries": {None: "prompt_tokens"},
    "vllm:prefix_cache_hits": {None: "hit_tokens"},
    "vllm:num_preemptions": {None: "preemptions"},
    "meridian_preemptions": {("phase", phase): f"preemptions_{phase}" for phase in PHASES},
    "meridian_kv_evictions": {("tier", tier): f"evictions_{tier}" for tier in EVICTION_TIERS},
    "meridian_kv_hit_tokens": {("tier", tier): f"hits_{tier}" for tier in HIT_TIERS},
}

SERVED_FIGURES = (
    FigureKind("hit_share", "prefix hits", "%"),
    FigureKind("prompt_tokens", "prompt tokens"),
    FigureKind("ttft_p50_s", "TTFT p50", "ms"),
    FigureKind("ttfat_p50_s", "TTFAT p50", "ms"),
    FigureKind("ttfat_p95_s", "TTFAT p95", "ms"),
    FigureKind("e2e_p50_s", "end to end p50", "ms"),
    FigureKind("tokens_per_s", "tokens/s"),
    FigureKind("pool_use_mean", "pool used by live requests", "%"),
    *(FigureKind(f"evictions_{t}", f"evicted {t.upper()}") for t in EVICTION_TIERS),
    *(FigureKind(f"hits_{t}", f"hit tokens {t.upper()}") for t in HIT_TIERS),
    FigureKind("preemptions", "preemptions, all"),
    *(FigureKind(f"preemptions_{phase}", f"preemptions, {phase}") for phase in PHASES),
    FigureKind("requests", "requests"),
    FigureKind("unended_thoughts", "thoughts without an end"),
    FigureKind("accuracy", "graded accuracy", "%"),
    FigureKind("failed_requests", "failed requests"),
)


def read_turn_counters(page: str) -> dict[str, float]:
    """Counters of one page, summed over engines.

    Returns:
        ``prompt_tokens`` looked up at first admissions, ``hit_tokens`` of them, ``preemptions``;
        where the server exports ours, also evictions, hit tokens and preemptions by kind.
        Servers without them lack the keys.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for label, name in _FAMILIES.get(family.name, {}).items():
            found[name] = _total(family, label)
    return found


def read_pool_use(page: str) -> float | None:
    """Share of the KV blocks that live requests hold, 0 to 1; None when the page has none."""
    # Read several times a second beside the streams: not worth parsing the whole page.
    values = [
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(_POOL_USE)
    ]
    return max(values, default=None)


def served_figures(
    records: Sequence[RequestRecord],
    end_marker: Sequence[int],
    counters: Mapping[str, float],
    pool_use: Sequence[float],
) -> Figures:
    """All figures of one run.

    Args:
        records: one per request that was sent.
        end_marker: token ids that end thinking; empty when there is none, so that the first token
            counts as the first of the answer.
        counters: what rose during the run; a missing one is reported as None.
        pool_use: shares noted during the run.
    """
    times = [t for t in (request_times(record, end_marker) for record in records) if t is not None]
    ttfat = [t.ttfat_s for t in times if t.ttfat_s is not None]
    ended = [record for record in records if record.finish_reason is not None]
    right = sum(grade(record.answer, record.request.expected) for record in ended)
    counted = (name for names in _FAMILIES.values() for name in names.values())
    figures: Figures = {name: counters.get(name) for name in counted}
    return figures | {
        "hit_share": _share(counters.get("hit_tokens"), counters.get("prompt_tokens")),
        "ttft_p50_s": quantile([t.ttft_s for t in times], 0.5),
        "ttfat_p50_s": quantile(ttfat, 0.5),
        "ttfat_p95_s": quantile(ttfat, 0.95),
        "e2e_p50_s": quantile([t.e2e_s for t in times], 0.5),
        "tokens_per_s": _tokens_per_s(records),
        "pool_use_mean": sum(pool_use) / len(pool_use) if pool_use else None,
        "requests": float(len(records)),
        "unended_thoughts": float(len(times) - len(ttfat)),
        "accuracy": _share(right, len(ended)),
        "failed_requests": float(len(records) - len(ended)),
    }


def avoidable_miss_share(ours: float, stock: float, ample: float) -> float | None:
    """(ample - ours) / (ample - stock), of hit shares; None where stock misses nothing."""
    return (ample - ours) / (ample - stock) if ample > stock else None


def _total(family: Metric, label: tuple[str, str] | None) -> float:
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
        and (label is None or sample.labels.get(label[0]) == label[1])
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _tokens_per_s(records: Iterable[RequestRecord]) -> float | None:
    """Generated tokens over the time from the first submit to the last token."""
    heard = [record for record in records if record.token_s]
    if not heard:
        return None
    span = max(r.token_s[-1] for r in heard) - min(r.submit_s for r in heard)
    return sum(len(record.token_ids) for record in heard) / span if span > 0 else None
