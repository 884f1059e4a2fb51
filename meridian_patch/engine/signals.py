"""What scheduler and worker say to each other about signals; imports nothing heavy.

The scheduler sets :data:`PLAN_FIELD` on a ``SchedulerOutput``; the worker answers with
:data:`SIGNALS_FIELD` on the ``ModelRunnerOutput`` of the same step.
"""

from typing import Final, NamedTuple

# Load-bearing: both classes are plain dataclasses, whose extra attributes survive pickling.
PLAN_FIELD: Final = "meridian_plan"
SIGNALS_FIELD: Final = "meridian_signals"

Signals = dict[str, list[list[float]]]
"""By request id, the rows sampled from in this step, in order: 1, or 1 + the draft tokens.

Each row is ``[entropy in nats, log-sum-exp, max probability, probability of the boundary id]`` of
softmax(raw logits), four NaN where the logits hold one. Under speculation the scheduler keeps as
many rows as tokens were accepted; a request in the middle of its prompt has a row and no token.
"""


class MeasurePlan(NamedTuple):
    """What the worker measures in one step.

    Attributes:
        request_ids: whose rows; one that is not in the step is passed over.
        boundary_id: first token id of the boundary that ends thinking.
    """

    request_ids: tuple[str, ...]
    boundary_id: int
