"""Lists the requests that a scheduled step begins or resumes."""

from collections.abc import Sequence
from typing import Any


def started_requests(output: Any) -> Sequence[str]:
    """Ids of the requests that a ``SchedulerOutput`` begins or resumes, probes included.

    Load-bearing: a request that was preempted and resumes is in ``resumed_req_ids`` under model
    runner V1. Under V2 the scheduler lists it among the new requests, and ``resumed_req_ids`` is
    empty.
    """
    new, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
    # Fast path: most steps begin none.
    return [*(each.req_id for each in new), *resumed] if new or resumed else ()
