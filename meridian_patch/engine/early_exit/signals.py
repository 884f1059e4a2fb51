"""The messages between scheduler and worker about signals; imports no large module.

The scheduler sets a plan on a ``SchedulerOutput``; the worker sets signals on the
``ModelRunnerOutput`` of the same step. Load-bearing: both classes are plain dataclasses, whose
extra attributes survive pickling.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple


class MeasuredSignals(NamedTuple):
    """What was measured in one step, in a form that is fast to send to another process.

    Attributes:
        names: request ids.
        counts: number of rows of each, in order: 1 plus its draft tokens; None: 1 each.
        values: [n_rows, 4] float32, with the rows of a request next to each other:
            ``[entropy in nats, log-sum-exp, max probability, probability of the boundary id]`` of
            softmax(raw logits); four NaN if the row of logits contains a NaN.
        refusal: why this worker measures nothing from now on; None: it measures.
    """

    names: Sequence[str]
    counts: Sequence[int] | None
    values: Any
    refusal: str | None = None

    def spans(self) -> dict[str, tuple[int, int]]:
        """The first row of each request, and the end of its rows (exclusive).

        Under speculation the scheduler uses one row per accepted token. A request in the middle of
        its prompt has a row but no token.
        """
        ends = list(accumulate(self.counts or [1] * len(self.names), initial=0))
        return dict(zip(self.names, pairwise(ends), strict=True))

    def by_request(self) -> dict[str, Any]:
        """The rows of each request: views of ``values``, [1 or more, 4]."""
        return {name: self.values[start:end] for name, (start, end) in self.spans().items()}


class MeasurePlan(NamedTuple):
    """What the worker measures in one step.

    Attributes:
        request_ids: requests to measure; those that are not in the step are ignored.
        boundary_id: first token id of the boundary that ends thinking.
    """

    request_ids: tuple[str, ...]
    boundary_id: int
