"""Pauses of conversations in the time of tokens: they are alike for fast and slow machines."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.workload import Mix, ServedRequest, make_trace
from meridian_patch.errors import BenchError

# One request with a long thought, of no trace that is compared.
_ALONE = Mix(requests=1, rate_per_s=1.0, history_share=0.0, hard_share=1.0, max_tokens=192)
_SEED = 1_000_007


def token_time_s(clients: Iterable[Client]) -> float:
    """Seconds from token to token of a request alone, on the fastest of these servers.

    The fastest, because the machine may be slowed down by others at any moment.

    Raises:
        BenchError: no server gave two tokens.
    """
    times_s = [_median_gap_s(client) for client in clients]
    known_s = [time_s for time_s in times_s if time_s is not None]
    if not known_s:
        raise BenchError(
            "no server gave two tokens to a request alone, so that pauses in tokens have no "
            "length; give them in seconds with --pause"
        )
    return min(known_s)


def paced(trace: Sequence[ServedRequest], token_s: float) -> list[ServedRequest]:
    """The trace with the pauses before later turns in seconds.

    Args:
        trace: its first turns come at seconds, and its pauses are in tokens.
        token_s: seconds per token.
    """
    return [
        replace(request, arrival_s=round(request.arrival_s * token_s, 6))
        if request.follows
        else request
        for request in trace
    ]


def _median_gap_s(client: Client) -> float | None:
    records: list[RequestRecord] = []
    client.play(make_trace(_ALONE, _SEED), records)
    gaps = [after - before for record in records for before, after in pairwise(record.token_s)]
    return median(gaps) if gaps else None
