"""One scrape of ``/metrics``, and sums over its samples."""

from dataclasses import dataclass
from itertools import chain
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from meridian_patch.errors import MeridianError
from meridian_patch.operate.text import printable

RUNNING: Final = "vllm:num_requests_running"
"""On every page of a vLLM server, unless it was started with ``--disable-log-stats``."""


class ScrapeError(MeridianError):
    """A text is no whole page of metrics."""


@dataclass(frozen=True)
class Scrape:
    """The samples of one page.

    Attributes:
        at_s: when it was read, in seconds of any clock.
        samples: by the name that they have on the page.
    """

    at_s: float
    samples: dict[str, list[Sample]]

    def has(self, name: str) -> bool:
        """Whether the page has samples of that name."""
        return name in self.samples

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over all engines and models of the samples with these labels; None: no such."""
        values = [
            sample.value
            for sample in self.samples.get(name, ())
            if all(sample.labels.get(label) == value for label, value in labels.items())
        ]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The same for each value of a label; empty: there is no such sample."""
        sums: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            value = sample.labels.get(label)
            if value is not None:
                sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def label(self, name: str, label: str) -> str | None:
        """The first sample's value of a label."""
        samples = self.samples.get(name)
        return samples[0].labels.get(label) if samples else None


def parse(text: str, at_s: float) -> Scrape:
    """Read a page.

    Args:
        text: in Prometheus' text format.
        at_s: when it was read.

    Raises:
        ScrapeError: it is no such text, or it is cut off.
    """
    if not text.strip():
        raise ScrapeError("the page of metrics is empty")
    if not text.endswith("\n"):
        raise ScrapeError("the page of metrics is cut off: its last line has no end")
    samples: dict[str, list[Sample]] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ScrapeError(f"this is no page of metrics: {printable(str(error))}") from error
    for sample in chain.from_iterable(family.samples for family in families):
        labels = {name: printable(value) for name, value in sample.labels.items()}
        samples.setdefault(sample.name, []).append(sample._replace(labels=labels))
    if not samples:
        raise ScrapeError("the page of metrics holds no samples")
    return Scrape(at_s, samples)
