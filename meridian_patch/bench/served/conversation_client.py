"""Users who talk to a served model: each asks, reads the stream, pauses, and asks again."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.conversation_figures import read_pool_use
from meridian_patch.bench.served.conversation_script import (
    Conversation,
    Exchange,
    ServedHistory,
    build_messages,
    most_prompt_tokens,
)
from meridian_patch.bench.served.workload import TraceRequest

_ALIVE_POLL_S = 0.5
_POOL_POLL_S = 1.0


@dataclass(frozen=True)
class TurnsClient(Client):
    """Holds conversations with one server.

    Args:
        max_tokens: of one request, thought and answer together.
        max_model_len: a conversation ends before a request that might not fit into it.
    """

    max_tokens: int = 800
    max_model_len: int = 4096

    def converse(
        self,
        conversations: Sequence[Conversation],
        history: ServedHistory,
        records: list[RequestRecord],
        pool_use: list[float],
        check_server: Callable[[], None] = lambda: None,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """Hold all conversations and wait until they have ended.

        A conversation ends early when a request fails.

        Args:
            conversations: what to say.
            history: what of the thoughts is said again.
            records: is filled as requests start, so that it keeps what there is when the run
                breaks off.
            pool_use: is filled with the share of KV blocks that live requests use, once a second.
            check_server: called now and then; what it raises ends the run.
            on_end: called with the record of each request that has ended.

        Raises:
            BenchError: from ``check_server``.
        """
        asyncio.run(self._converse(conversations, history, records, pool_use, check_server, on_end))

    async def _converse(
        self,
        conversations: Sequence[Conversation],
        history: ServedHistory,
        records: list[RequestRecord],
        pool_use: list[float],
        check_server: Callable[[], None],
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=self.request_limit_s)
        # No connection is used twice: the server may close an idle one just as it is reused.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            begin = time.monotonic()
            thinks = history is not ServedHistory.PLAIN
            template = {"chat_template_kwargs": {"enable_thinking": thinks}}

            async def ask(conversation: Conversation) -> None:
                past: list[Exchange] = []
                due = begin + conversation.arrival_s
                for number, turn in enumerate(conversation.turns):
                    messages = build_messages(conversation.system, past, turn.question, history)
                    if most_prompt_tokens(messages) + self.max_tokens > self.max_model_len:
                        return
                    await asyncio.sleep(due + turn.pause_s - time.monotonic())
                    sent_s = time.monotonic() - begin
                    request = TraceRequest(
                        f"{conversation.id}-{number}",
                        sent_s,
                        tuple(messages),
                        turn.expected,
                        self.max_tokens,
                    )
                    record = RequestRecord(request, sent_s)
                    records.append(record)
                    try:
                        await self._stream(session, record, begin, template)
                    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                        record.error = f"{type(error).__name__}: {error}"
                    on_end(record)
                    if record.error is not None or record.finish_reason is None:
                        return
                    past.append(Exchange(turn.question, record.thought, record.answer))
                    due = time.monotonic()

            watch = asyncio.ensure_future(self._watch_pool(session, pool_use))
            pending = {asyncio.ensure_future(ask(each)) for each in conversations}
            try:
                while pending:
                    done, pending = await asyncio.wait(pending, timeout=_ALIVE_POLL_S)
                    for task in done:
                        task.result()
                    check_server()
            finally:
                for task in (watch, *pending):
                    task.cancel()
                await asyncio.gather(watch, *pending, return_exceptions=True)

    async def _watch_pool(self, session: aiohttp.ClientSession, pool_use: list[float]) -> None:
        while True:
            await asyncio.sleep(_POOL_POLL_S)
            # A server that is gone is noticed elsewhere.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{self.url}/metrics") as reply:
                    use = read_pool_use(await reply.text())
                if use is not None:
                    pool_use.append(use)
