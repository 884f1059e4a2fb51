"""What happened between two scrapes: counts, rates and quantiles. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.samples import Sample

from meridian_patch.operate.scrape import Scrape, ScrapeError

STALL_S: Final = 0.25
"""A reader notices a gap between tokens of more than this, in seconds."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Quantile:
    """A value that a share of the observations do not exceed.

    Attributes:
        seconds: estimated within the bucket that holds it.
        side: ``below``: it is at most this, the first bucket's bound; ``above``: it is more than
            this, the last finite bound.
    """

    seconds: float
    side: Literal["at", "below", "above"] = "at"


@dataclass(frozen=True)
class Latency:
    """Figures of a histogram over a window.

    Attributes:
        count: observations.
        mean_s: of them, in seconds.
        p50: the median.
        p95: exceeded by one of twenty.
        num_stalls: observations of more than `STALL_S`; None: no bucket ends there.
    """

    count: float
    mean_s: float
    p50: Quantile
    p95: Quantile
    num_stalls: float | None


class Window:
    """The time between two scrapes of one server.

    A counter that is lower than before began anew: all it counts belongs to the window.

    Args:
        before: the earlier scrape.
        after: the later one.
    """

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self.after = after
        self.seconds = after.at_s - before.at_s
        self._before = {_key(sample): sample.value for sample in _rising(before)}

    @property
    def is_reset(self) -> bool:
        """Whether a counter is lower than before: the server was started anew."""
        return any(
            sample.value < self._before.get(_key(sample), 0.0) for sample in _rising(self.after)
        )

    def count(self, name: str, **labels: str) -> float | None:
        """By how much counters rose, summed; None: the page has none of that name."""
        samples = self._samples(name, labels)
        return sum(map(self._rise, samples)) if samples else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The same for each value of a label; empty: there is none."""
        sums: dict[str, float] = {}
        for sample in self._samples(name, labels):
            value = sample.labels.get(label)
            if value is not None:
                sums[value] = sums.get(value, 0.0) + self._rise(sample)
        return sums

    def rate(self, name: str) -> float | None:
        """By how much counters rose per second; None: no such counter, or no time passed."""
        count = self.count(name)
        return None if count is None or self.seconds <= 0 else count / self.seconds

    def latency(self, name: str, **labels: str) -> Latency | None:
        """Figures of a histogram; None: nothing was observed, or it is not whole.

        Raises:
            ScrapeError: a bound of a bucket is no number.
        """
        count, total = self.count(f"{name}_count", **labels), self.count(f"{name}_sum", **labels)
        buckets = self._buckets(name, labels)
        if not count or total is None or not buckets or buckets[-1][1] <= 0:
            return None
        short = dict(buckets).get(STALL_S)
        return Latency(
            count,
            max(0.0, total) / count,
            quantile(buckets, 0.5),
            quantile(buckets, 0.95),
            None if short is None else max(0.0, count - short),
        )

    def _samples(self, name: str, labels: Mapping[str, str]) -> list[Sample]:
        """The samples of that name that have these labels."""
        return [
            sample
            for sample in self.after.samples.get(name, ())
            if all(sample.labels.get(label) == value for label, value in labels.items())
        ]

    def _rise(self, sample: Sample) -> float:
        before = self._before.get(_key(sample), 0.0)
        return sample.value if sample.value < before else sample.value - before

    def _buckets(self, name: str, labels: Mapping[str, str]) -> list[tuple[float, float]]:
        """Upper bounds with the observations up to them, rising.

        Raises:
            ScrapeError: a bound is no number.
        """
        rises = self.by(f"{name}_bucket", "le", **labels)
        try:
            return sorted((float(bound), count) for bound, count in rises.items())
        except ValueError as error:
            raise ScrapeError(f"a bound of histogram {name} is no number: {error}") from error


def quantile(buckets: list[tuple[float, float]], share: float) -> Quantile:
    """The value that ``share`` of the observations do not exceed.

    Args:
        buckets: upper bounds and cumulative counts, rising; the last count is above 0.
        share: between 0 and 1.
    """
    wanted = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for index, (upper, count) in enumerate(buckets):
        if count >= wanted and math.isinf(upper):
            break
        if count >= wanted and index == 0:
            # A first bucket may be wide: 0.3 s for all prompts that are computed faster.
            return Quantile(upper, "below")
        if count >= wanted:
            return Quantile(lower + (upper - lower) * (wanted - below) / (count - below))
        lower, below = upper, count
    return Quantile(lower, "above")


def _rising(scrape: Scrape) -> Iterator[Sample]:
    """All samples that only rise while a server runs."""
    for name, samples in scrape.samples.items():
        if name.endswith(("_total", "_count", "_sum", "_bucket")):
            yield from samples


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sorted(sample.labels.items()))
