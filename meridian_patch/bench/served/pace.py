"""Pauses of conversations in the time of tokens: they are alike for fast and slow machines."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.workload import Mix, ServedRequest, make_trace
from meridian_patch.errors import BenchError

# One request with a long thought, of no trace that is compared.
_ALONE = Mix(requests=1, rate_per_s=1.0, history_share=0.0, hard_share=1.0, max_tokens=192)
_SEED = 1_000_007


def token_time_s(client: Client, check_server: Callable[[], None]) -> float:
    """Seconds per token of one request alone, of up to 192 tokens.

    Args:
        client: of the server.
        check_server: called now and then; what it raises ends the measurement.

    Raises:
        BenchError: from ``check_server``, or no two tokens came at different times.
    """
    records: list[RequestRecord] = []
    client.play(make_trace(_ALONE, _SEED), records, check_server)
    [record] = records
    # Several tokens may come at one time: a server can stream them in pieces.
    if record.error is None and record.token_s and record.token_s[-1] > record.token_s[0]:
        return (record.token_s[-1] - record.token_s[0]) / (len(record.token_s) - 1)
    reason = record.error or f"it gave {len(record.token_s)} tokens at one time"
    raise BenchError(
        f"the server did not show how long a token takes, for pauses in tokens: {reason}; give "
        "pauses in seconds with --pause"
    )


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
