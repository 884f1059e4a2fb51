"""What holds for every page of metrics of a patched server."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from meridian_patch.telemetry.metric import Kind
from meridian_patch.telemetry.metrics import METRICS

OURS = "meridian_"
# Labels of all our samples.
_OF_ALL = {"model_name", "engine"}


def families_of(page: str) -> dict:
    """Metric families by name."""
    return {family.name: family for family in text_string_to_metric_families(page)}


def value_of(page: str, name: str, **labels: str) -> float:
    """Sum of a sample over the labels that are not given."""
    samples = [each for family in families_of(page).values() for each in family.samples]
    found = [
        each.value
        for each in samples
        if each.name == name and labels.items() <= each.labels.items()
    ]
    assert found, (name, labels)
    return sum(found)


def check_documented(page: str, engines: Iterable[str]) -> None:
    """Every metric of docs/metrics.md is there with type, help and all labels, and no other is."""
    ours = {name: each for name, each in families_of(page).items() if name.startswith(OURS)}
    totals = {metric.name for metric in METRICS if metric.kind is not Kind.GAUGE}
    begun = {name for name in ours if name.removesuffix("_created") in totals - {name}}
    # One API server tells all of them, several none.
    assert begun in (set(), {f"{name}_created" for name in totals})
    assert set(ours) - begun == {metric.name for metric in METRICS}
    for metric in METRICS:
        family = ours[metric.name]
        assert family.type == metric.kind, metric.name
        assert family.documentation == metric.help
        found = {(each.labels["engine"], each.labels[metric.label]) for each in family.samples}
        values = metric.values or {value for _, value in found}
        assert found == {(engine, value) for engine in engines for value in values}, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {*_OF_ALL, metric.label}
            assert sample.value >= 0
        if metric.kind is Kind.HISTOGRAM:
            _check_histogram(metric, family)


def _check_histogram(metric, family) -> None:
    """Its buckets are the documented ones, do not fall, and end in the count."""
    series = {}
    for sample in family.samples:
        key = sample.labels["engine"], sample.labels[metric.label]
        one = series.setdefault(key, {"buckets": []})
        if sample.name.endswith("_bucket"):
            one["buckets"].append((float(sample.labels["le"]), sample.value))
        else:
            one[sample.name.rpartition("_")[2]] = sample.value
    for one in series.values():
        bounds, counts = zip(*sorted(one["buckets"]), strict=True)
        assert bounds == (*metric.buckets, float("inf"))
        assert list(counts) == sorted(counts)
        assert counts[-1] == one["count"]
        # No observation is below 0, and none in a bucket is above its bound.
        assert one["sum"] >= 0
        if counts[-1] and counts[-1] == counts[-2]:
            assert one["sum"] <= counts[-1] * bounds[-2]


def check_monotone(before: str, after: str) -> None:
    """No total falls."""
    for name, family in families_of(before).items():
        if not name.startswith(OURS) or family.type == Kind.GAUGE:
            continue
        now = {_key(sample): sample.value for sample in families_of(after)[name].samples}
        for sample in family.samples:
            assert now[_key(sample)] >= sample.value, (before, after)


def _key(sample) -> tuple:
    return sample.name, tuple(sorted(sample.labels.items()))


class Totals:
    """Sums over engines of one page."""

    def __init__(self, page: str) -> None:
        self._samples = [each for family in families_of(page).values() for each in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, name
        return sum(found)


def _growth(before: str, after: str, *names: str) -> list[float]:
    first, last = Totals(before), Totals(after)
    return [last(name) - first(name) for name in names]


def check_sums(before: str, page: str) -> None:
    """What is counted twice, here or by vLLM, is the same.

    Args:
        before: a page of the server without requests.
        page: a later one without requests. No request was aborted in between.
    """
    total = Totals(page)
    assert total("meridian_requests") == total("vllm:num_requests_running") == 0
    # vLLM counts a preemption with the request's next output: an abort may leave it out.
    ours, theirs = _growth(before, page, "meridian_preemptions_total", "vllm:num_preemptions_total")
    assert ours == theirs
    assert total("meridian_preemptions_total") >= total("vllm:num_preemptions_total")
    # Tokens and gaps between them.
    tokens = total("meridian_output_tokens_total")
    assert tokens == total("vllm:generation_tokens_total")
    assert 0 < total("meridian_inter_token_seconds_count") <= tokens
    # Thoughts: begun, ended, measured, judged.
    begun = total("meridian_phase_changes_total", phase="think")
    ended = total("meridian_thoughts_ended_total")
    measured = total("meridian_thoughts_measured_total")
    verdicts = total("meridian_exit_verdicts_total")
    assert begun >= ended >= measured >= verdicts
    assert ended <= total("meridian_think_tokens_total") <= tokens
    assert total("meridian_exit_verdicts_total", reason="natural") == 0
    # Requests that answered.
    answered = total("meridian_phase_changes_total", phase="answer")
    assert total("meridian_time_to_first_answer_token_seconds_count") <= answered
    assert total("meridian_request_phase_seconds_count", phase="answer") <= answered
    # Steps.
    assert total("meridian_steps_total", kind="learnt") <= total("meridian_steps_total", kind="ran")
    if total("meridian_preemptions_total") == 0:
        assert total("meridian_recomputed_tokens_total") == 0
    hits = total("meridian_kv_hit_tokens_total")
    assert hits <= total("vllm:prefix_cache_queries_total")
