"""Keeps streaming sessions whose turn ends while they are preempted.

Under asynchronous scheduling the last token of a turn may arrive after its session was preempted.
vLLM 0.32 and 0.33 then lose the session: it leaves the waiting queue together with the turn, and
the tokens of the turn are forgotten, because none of them counts as computed. Preempting more
often, as the policy does, makes this more frequent.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.request import RequestStatus


@contextmanager
def known_as_computed(session: Any) -> Iterator[None]:
    """Within this block all known tokens but the last count as computed.

    Load-bearing: upstream appends the next chunk behind the computed tokens, and drops the others.
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


def put_back(scheduler: Any, sessions: Iterable[Any]) -> None:
    """Enqueue those of the sessions that go on and wait in no queue.

    Args:
        scheduler: upstream's scheduler.
        sessions: sessions whose turn ended in this step while they did not run.
    """
    for session in sessions:
        is_queued = session in scheduler.waiting or session in scheduler.kv_holding_waiting
        if is_queued or session.is_finished():
            continue
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            scheduler._enqueue_waiting_request(session)
        else:
            scheduler.waiting.prepend_request(session)
