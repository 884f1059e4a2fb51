"""Plays a trace from several client processes at once and gathers what each noted.

A single event loop that reads every stream of a busy server falls behind and measures itself.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from meridian_patch.bench.served.client import END_MARKER, Client, RequestRecord
from meridian_patch.bench.served.workload import TraceRequest
from meridian_patch.errors import BenchError

PROCESS_MODULE = "meridian_patch.bench.served.client_process"
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
    """

    processes: int = 2
    request_limit_s: float = 180.0
    end_marker: str = END_MARKER


def deal(trace: Sequence[TraceRequest], processes: int) -> list[Sequence[TraceRequest]]:
    """The trace dealt out in turn, a share per process that has any."""
    return [trace[first::processes] for first in range(min(processes, len(trace)))]


def play_in_processes(
    client: Client,
    trace: Sequence[TraceRequest],
    processes: int,
    records: list[RequestRecord],
    check_server: Callable[[], None],
    on_request: Callable[[], None],
) -> None:
    """Send each request when it is due and wait until all have ended.

    Args:
        client: whom to talk to, and for how long at most.
        trace: what to send.
        processes: that share the sending.
        records: is filled as requests end; with those under way when the run breaks off.
        check_server: called now and then; what it raises ends the run.
        on_request: called when a request has ended.

    Raises:
        BenchError: from ``check_server``, or a client process did not do its part.
    """
    by_id = {request.id: request for request in trace}

    def on_line(line: bytes) -> None:
        fields = json.loads(line)
        records.append(RequestRecord(by_id[fields.pop("id")], **fields))
        on_request()

    asyncio.run(_play(client, deal(trace, processes), on_line, check_server))
    if len(records) < len(trace):
        raise BenchError(
            f"the client processes reported {len(records)} of {len(trace)} requests; one of them "
            "broke off, see its message above"
        )


def record_line(record: RequestRecord) -> str:
    """What a client process writes of a request."""
    fields = {name: value for name, value in vars(record).items() if name != "request"}
    return json.dumps({"id": record.request.id, **fields})


async def _play(
    client: Client,
    shares: Sequence[Sequence[TraceRequest]],
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
        last_s = max(share[-1].arrival_s for share in shares)
        deadline = begin + last_s + client.request_limit_s + _GRACE_S
        pending = readers
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_POLL_S)
            for reader in done:
                reader.result()
            check_server()
            if time.monotonic() > deadline:
                raise BenchError(f"{len(pending)} client processes hang long after their requests")
    finally:
        await _stop(workers, readers)


async def _start(client: Client, share: Sequence[TraceRequest]) -> asyncio.subprocess.Process:
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
    """End all clients; one whose input ends writes down what is under way and ends."""
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
