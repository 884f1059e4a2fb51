"""Keeps streaming sessions whose turn ends while they are preempted.

Under asynchronous scheduling the last token of a turn may arrive after its session was preempted.
vLLM 0.32 then loses the session: it leaves the waiting queue together with the turn, and the tokens
of the turn are forgotten, because none of them counts as computed. vLLM 0.33 keeps both, and lets
the session wait behind all others. Preempting more often, as the policy does, makes this more
frequent.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


@contextmanager
def known_as_computed(session: Request) -> Iterator[None]:
    """Within this block all known tokens but the last count as computed.

    Load-bearing: vLLM 0.32 appends the next chunk behind the computed tokens, and drops the others.
    At the end of a turn that is the last token alone, unless the session was preempted.
    """
    computed = session.num_computed_tokens
    if computed >= session.num_tokens - 1:
        yield
        return
    session.num_computed_tokens = session.num_tokens - 1
    try:
        yield
    finally:
        session.num_computed_tokens = computed


def put_back(scheduler: "Scheduler", sessions: Iterable[Request], *, to_front: bool) -> None:
    """Enqueue those of the sessions that go on and wait in no queue.

    Args:
        scheduler: upstream's scheduler.
        sessions: sessions whose turn ended in this step while they did not run.
        to_front: whether one that has its next chunk goes ahead of all, as after a preemption,
            where upstream has put it behind them.
    """
    for session in sessions:
        if session in scheduler.kv_holding_waiting or session.is_finished():
            continue
        is_queued = session in scheduler.waiting
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            if not is_queued:
                scheduler._enqueue_waiting_request(session)
        elif to_front or not is_queued:
            if is_queued:
                scheduler.waiting.remove_request(session)
            scheduler.waiting.prepend_request(session)
