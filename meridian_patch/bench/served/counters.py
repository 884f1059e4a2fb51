"""Reads the counters of a server's ``/metrics`` page."""

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_PREEMPTIONS = "vllm:num_preemptions"
_BY_PHASE = "meridian_preemptions"
_FALLBACKS = "meridian_policy_fallbacks"


def read_counters(page: str) -> dict[str, float]:
    """Counters of one page, summed over engines.

    Returns:
        ``preemptions``; where the server exports ours, also ``answer_preemptions``,
        ``think_preemptions`` and ``policy_fallbacks``. Servers without them lack the keys.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        # A family that is declared but has not counted yet has no sample: it stands at 0.
        if family.name == _PREEMPTIONS:
            found["preemptions"] = _total(family.samples)
        elif family.name == _BY_PHASE:
            found["answer_preemptions"] = _total(family.samples, phase="answer")
            found["think_preemptions"] = _total(family.samples, phase="think")
        elif family.name == _FALLBACKS:
            found["policy_fallbacks"] = _total(family.samples)
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each counter of ``after`` rose by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _total(samples: Iterable[Sample], **labels: str) -> float:
    return sum(
        sample.value
        for sample in samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    )
