"""What is known of a metric: its name, its labels, and what its value means."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. Every sample also carries ``model_name`` and ``engine``.

    Attributes:
        event: name under which ``PhaseCounters`` counts it.
        name: as registered with Prometheus, which appends ``_total`` to counters.
        kind: Prometheus type.
        label: the one further label.
        values: every value that the label may have; counters and histograms are exported as 0 from
            the start.
        buckets: upper bounds of a histogram, in its unit, without infinity.
        unit: what is counted.
        help: the HELP text, one sentence without markup.
        operator: what the value means for an operator and what to do, in Markdown.
    """

    event: str
    name: str
    kind: Kind = Kind.COUNTER
    label: str
    values: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    unit: str
    help: str
    operator: str

    @property
    def exported_name(self) -> str:
        """The name on ``/metrics``."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def sample_name(self) -> str:
        """The name of a sample on ``/metrics``; a histogram has none of its own name."""
        return f"{self.name}_count" if self.kind is Kind.HISTOGRAM else self.exported_name
