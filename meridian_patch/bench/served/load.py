"""Plays a trace from several client processes at once and gathers what each noted.

A single event loop that reads every stream of a busy server falls behind and measures itself.

A client process is this module, started with ``python -P -m``. It reads its share of the trace from
its input, writes that it is ready, reads when to begin, and writes one line per request that has
ended. When its input ends it writes down the requests under way and ends.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from meridian_patch.bench.served.client import END_MARKER, Client, History, RequestRecord
from meridian_patch.bench.served.workload import ServedRequest, conversations
from meridian_patch.errors import BenchError

PROCESS_MODULE = "meridian_patch.bench.served.load"
_READY_LIMIT_S = 60.0
_LEAD_S = 0.2
_POLL_S = 0.5
_STOP_LIMIT_S = 10.0
# Beyond the limit of the last request: a client that has not ended by then hangs.
_GRACE_S = 30.0
# One line of a client holds all token times of one request.
_LINE_LIMIT_BYTES = 1 << 28


@dataclass(frozen=True)
class Load:
    """How all servers of a comparison are driven.

    Attributes:
        processes: that share the sending.
        request_limit_s: a request that takes longer counts as failed.
        end_marker: text that ends thinking; empty when there is no thinking.
        history: what of earlier thoughts stands in later prompts.
    """

    processes: int = 2
    request_limit_s: float = 180.0
    end_marker: str = END_MARKER
    history: History = "stripped"


def deal(trace: Sequence[ServedRequest], processes: int) -> list[Sequence[ServedRequest]]:
    """Split a trace into shares of whole conversations, at most one share per process."""
    found = conversations(trace)
    return [
        [request for turns in found[first::processes] for request in turns]
        for first in range(min(processes, len(found)))
    ]


def play_in_processes(
    client: Client,
    trace: Sequence[ServedRequest],
    processes: int,
    records: list[RequestRecord],
    check_server: Callable[[], None],
    on_request: Callable[[], None],
) -> None:
    """Send each request when it is due and wait until all have ended.

    Turns of a conversation that ended early are not sent and have no record.

    Args:
        client: settings of each process's client.
        trace: what to send.
        processes: that share the sending.
        records: is filled as requests end; with those under way when the run breaks off.
        check_server: called now and then; what it raises ends the run.
        on_request: called when a request has ended.

    Raises:
        BenchError: from ``check_server``, or a client process failed or hung.
    """
    by_id = {request.id: request for request in trace}

    def on_line(line: bytes) -> None:
        fields = json.loads(line)
        records.append(RequestRecord(by_id[fields.pop("id")], **fields))
        on_request()

    # The latest end: each turn waits for the one before it, and takes as long as it may.
    limits_s = [
        sum(request.arrival_s + client.request_limit_s for request in turns)
        for turns in conversations(trace)
    ]
    shares = deal(trace, processes)
    asyncio.run(_play(client, shares, max(limits_s, default=0.0), on_line, check_server))


async def _play(
    client: Client,
    shares: Sequence[Sequence[ServedRequest]],
    limit_s: float,
    on_line: Callable[[bytes], None],
    check_server: Callable[[], None],
) -> None:
    workers: list[asyncio.subprocess.Process] = []
    readers: set[asyncio.Future[None]] = set()
    try:
        for share in shares:
            # One by one: those that have started are ended when the next one cannot.
            workers.append(await _start(client, share))  # noqa: PERF401
        for worker in workers:
            await _wait_until_ready(worker)
        begin = time.monotonic() + _LEAD_S
        for worker in workers:
            _send(worker, {"begin": begin})
        readers = {asyncio.ensure_future(_read(worker, on_line)) for worker in workers}
        deadline = begin + limit_s + _GRACE_S
        pending = readers
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_POLL_S)
            for reader in done:
                reader.result()
            check_server()
            if time.monotonic() > deadline:
                raise BenchError(f"{len(pending)} client processes hang long after their requests")
        codes = [await worker.wait() for worker in workers]
        if any(codes):
            raise BenchError(
                f"client processes ended with exit codes {codes}, expected 0; see the message above"
            )
    finally:
        await _stop(workers, readers)


async def _start(client: Client, share: Sequence[ServedRequest]) -> asyncio.subprocess.Process:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", PROCESS_MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT_BYTES,
        # Its own group: Ctrl-C reaches us alone, and we ask the clients for what they have.
        process_group=0,
    )
    _send(worker, {"client": asdict(client), "trace": [asdict(request) for request in share]})
    return worker


async def _wait_until_ready(worker: asyncio.subprocess.Process) -> None:
    assert worker.stdout is not None
    try:
        line = await asyncio.wait_for(worker.stdout.readline(), _READY_LIMIT_S)
    except TimeoutError:
        line = b""
    if not line:
        raise BenchError("a client process did not start; see its message above")


async def _read(worker: asyncio.subprocess.Process, on_line: Callable[[bytes], None]) -> None:
    assert worker.stdout is not None
    while line := await worker.stdout.readline():
        on_line(line)


async def _stop(
    workers: Sequence[asyncio.subprocess.Process], readers: set[asyncio.Future[None]]
) -> None:
    """End all clients: close their input, on which they report the requests under way and end."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
    if readers:
        await asyncio.wait(readers, timeout=_STOP_LIMIT_S)
    for worker in workers:
        try:
            await asyncio.wait_for(worker.wait(), _STOP_LIMIT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()


def _send(worker: asyncio.subprocess.Process, message: Mapping[str, object]) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Play the share read from the input, as a client process."""
    share = sys.stdin.buffer.readline()
    print("ready", flush=True)
    start = sys.stdin.buffer.readline()
    if share and start:
        message = json.loads(share)
        trace = [ServedRequest(**fields) for fields in message["trace"]]
        asyncio.run(_play_share(Client(**message["client"]), trace, json.loads(start)["begin"]))


async def _play_share(client: Client, trace: Sequence[ServedRequest], begin: float) -> None:
    records: list[RequestRecord] = []
    written: set[str] = set()

    def write(record: RequestRecord) -> None:
        written.add(record.request.id)
        fields = {name: value for name, value in vars(record).items() if name != "request"}
        print(json.dumps({"id": record.request.id, **fields}), flush=True)

    playing = asyncio.ensure_future(client.stream(trace, records, begin, on_end=write))
    # Nothing more comes on the input, so that it is readable when it has ended.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _on_input, playing)
    with suppress(asyncio.CancelledError):
        await playing
    for record in records:
        if record.request.id not in written:
            write(record)


def _on_input(playing: asyncio.Future[None]) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        playing.cancel()


if __name__ == "__main__":
    main()
