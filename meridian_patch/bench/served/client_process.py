"""One client process of a served comparison.

Started as ``python -P -m meridian_patch.bench.served.client_process``.
Reads its share of the trace from its input, says that it is ready, reads when to begin, and writes
one line per request that has ended. When its input ends it writes down what is under way and ends.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress

from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.load import record_line
from meridian_patch.bench.served.workload import TraceRequest


def main() -> None:
    """Play the share that stands on the input."""
    share = sys.stdin.buffer.readline()
    print("ready", flush=True)
    start = sys.stdin.buffer.readline()
    if share and start:
        message = json.loads(share)
        trace = [TraceRequest(**fields) for fields in message["trace"]]
        asyncio.run(_play(Client(**message["client"]), trace, json.loads(start)["begin"]))


async def _play(client: Client, trace: list[TraceRequest], begin: float) -> None:
    records: list[RequestRecord] = []
    told: set[str] = set()

    def tell(record: RequestRecord) -> None:
        told.add(record.request.id)
        print(record_line(record), flush=True)

    playing = asyncio.ensure_future(client.stream(trace, records, begin, on_end=tell))
    # Nothing more comes on the input, so that it is readable when it has ended.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _on_input, playing)
    with suppress(asyncio.CancelledError):
        await playing
    for record in records:
        if record.request.id not in told:
            tell(record)


def _on_input(playing: asyncio.Future[None]) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        playing.cancel()


if __name__ == "__main__":
    main()
