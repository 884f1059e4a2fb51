"""Streams a trace from a served model and notes when each token came."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from meridian_patch.bench.workload import TraceRequest
from meridian_patch.errors import BenchError

END_MARKER = "</think>"
_ALIVE_POLL_S = 0.5


@dataclass
class RequestRecord:
    """What one request did, as its reader saw it.

    Attributes:
        request: what was asked.
        submit_s: seconds from the start of the trace to the sending.
        token_ids: every generated token, the stop token included.
        token_s: when each of them came, seconds from the start of the trace.
        answer: text of the answer.
        finish_reason: the server's, or None when the stream broke off.
        error: what went wrong, or None.
    """

    request: TraceRequest
    submit_s: float
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    answer: str = ""
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Client:
    """Talks to one server.

    Args:
        url: ``http://host:port`` of the server.
        model: served model name.
        request_limit_s: a request that takes longer counts as failed.
    """

    url: str
    model: str
    request_limit_s: float = 180.0

    def end_marker(self) -> tuple[int, ...]:
        """Token ids of ``</think>`` in the served model's own vocabulary."""
        return asyncio.run(self._end_marker())

    def metrics_text(self) -> str:
        """The server's ``/metrics`` page."""
        return asyncio.run(self._metrics_text())

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that no seed meets blocks of an earlier one."""
        asyncio.run(self._reset_prefix_cache())

    def play(
        self,
        trace: Sequence[TraceRequest],
        records: list[RequestRecord],
        check_server: Callable[[], None] = lambda: None,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """Send each request when it is due and wait until all have ended.

        Args:
            trace: what to send.
            records: is filled as requests start, so that it keeps what there is when the run
                breaks off.
            check_server: called now and then; what it raises ends the run.
            on_end: called with the record of each request that has ended.

        Raises:
            BenchError: from ``check_server``.
        """
        asyncio.run(self._play(trace, records, check_server, on_end))

    async def _play(
        self,
        trace: Sequence[TraceRequest],
        records: list[RequestRecord],
        check_server: Callable[[], None],
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=self.request_limit_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            begin = time.perf_counter()

            async def run_one(request: TraceRequest) -> None:
                await asyncio.sleep(begin + request.arrival_s - time.perf_counter())
                record = RequestRecord(request, time.perf_counter() - begin)
                records.append(record)
                try:
                    await self._stream(session, record, begin)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    record.error = f"{type(error).__name__}: {error}"
                on_end(record)

            async def watch() -> None:
                while True:
                    check_server()
                    await asyncio.sleep(_ALIVE_POLL_S)

            watcher = asyncio.ensure_future(watch())
            requests = asyncio.gather(*(run_one(request) for request in trace))
            await asyncio.wait((watcher, requests), return_when=asyncio.FIRST_COMPLETED)
            if not requests.done():
                requests.cancel()
                await watcher
            watcher.cancel()
            await requests
        # A server that died in the last moment broke its streams before the watcher looked.
        check_server()

    async def _stream(
        self, session: aiohttp.ClientSession, record: RequestRecord, begin: float
    ) -> None:
        payload = {
            "model": self.model,
            "messages": record.request.messages,
            "max_tokens": record.request.max_tokens,
            # Greedy: every arm has the very same tokens to compute.
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        async with session.post(f"{self.url}/v1/chat/completions", json=payload) as reply:
            if not reply.ok:
                record.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
                return
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    _note(record, json.loads(line[6:]), time.perf_counter() - begin)

    async def _end_marker(self) -> tuple[int, ...]:
        body = {"model": self.model, "prompt": END_MARKER, "add_special_tokens": False}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/tokenize", json=body) as reply,
        ):
            if not reply.ok:
                raise BenchError(
                    f"{self.url}/tokenize answered HTTP {reply.status}; the boundary between "
                    f"thinking and answer needs the token ids of {END_MARKER}"
                )
            return tuple((await reply.json())["tokens"])

    async def _metrics_text(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            if not reply.ok:
                raise BenchError(f"{self.url}/metrics answered HTTP {reply.status}, expected 200")
            return await reply.text()

    async def _reset_prefix_cache(self) -> None:
        address = f"{self.url}/reset_prefix_cache"
        async with aiohttp.ClientSession() as session, session.post(address) as reply:
            if not reply.ok:
                raise BenchError(
                    f"{address} answered HTTP {reply.status}; start the server with "
                    "VLLM_SERVER_DEV_MODE=1"
                )


def _note(record: RequestRecord, chunk: dict[str, Any], now_s: float) -> None:
    """Add one streamed chunk to the record."""
    if "error" in chunk:
        record.error = str(chunk["error"])
        return
    for choice in chunk.get("choices", []):
        ids = choice.get("token_ids") or []
        record.token_ids.extend(ids)
        record.token_s.extend([now_s] * len(ids))
        record.answer += choice["delta"].get("content") or ""
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
