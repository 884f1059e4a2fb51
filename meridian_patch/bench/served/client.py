"""Sends a trace to a server and notes when each token came.

A later turn of a conversation is sent when its pause after the answer before it is over. Its prompt
holds what the server itself said, so it is known only then.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from meridian_patch.bench.served.workload import ServedRequest, conversations
from meridian_patch.errors import BenchError

# What of earlier thoughts stands in later prompts: nothing, all of it, or there is no thinking.
History = Literal["stripped", "kept", "plain"]
END_MARKER = "</think>"
# More than a chat template adds to one message, in bytes of the tiny reasoner's markers.
_MARKERS_PER_MESSAGE = 6
_ALIVE_POLL_S = 0.5
_RESET_LIMIT_S = 10.0
_ASK_LIMIT_S = 60.0
_LAST_EVENT = b"[DONE]"


@dataclass
class RequestRecord:
    """What one request did, as its client saw it.

    Attributes:
        request: what was asked.
        submit_s: seconds from the start of the trace to the sending.
        token_ids: every generated token, the stop token included.
        token_s: when each of them came, seconds from the start of the trace.
        answer: text of the answer.
        finish_reason: the server's, or None when the stream broke off.
        error: what went wrong, or None.
        thought: text of the thought, where the server separates it from the answer.
        prompt_ids: the prompt's tokens, as the server says them with the first token.
    """

    request: ServedRequest
    submit_s: float
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    answer: str = ""
    finish_reason: str | None = None
    error: str | None = None
    thought: str = ""
    prompt_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """Talks to one server.

    Args:
        url: ``http://host:port`` of the server.
        model: served model name.
        request_limit_s: a request that takes longer counts as failed.
        history: what of earlier thoughts is sent again.
        context_tokens: a conversation ends before a turn that might not fit; None: no such bound.
    """

    url: str
    model: str
    request_limit_s: float = 180.0
    history: History = "stripped"
    context_tokens: int | None = None

    def end_marker(self, text: str = END_MARKER) -> tuple[int, ...]:
        """Token ids of the text that ends thinking, in the served model's own vocabulary."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        reply = json.loads(asyncio.run(self._ask("POST", "/tokenize", body)))
        return tuple(reply["tokens"])

    def metrics_text(self) -> str:
        """The server's ``/metrics`` page."""
        return asyncio.run(self._ask("GET", "/metrics"))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that no seed meets blocks of an earlier one.

        Needs a server with ``VLLM_SERVER_DEV_MODE=1``.
        """
        deadline = time.monotonic() + _RESET_LIMIT_S
        # The server refuses while a request that has just ended still holds blocks.
        while not json.loads(asyncio.run(self._ask("POST", "/reset_prefix_cache")))["success"]:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"the prefix cache of {self.url} was still in use after {_RESET_LIMIT_S:.0f} s;"
                    " something else sends requests to this server"
                )
            time.sleep(_ALIVE_POLL_S)

    def play(
        self,
        trace: Sequence[ServedRequest],
        records: list[RequestRecord],
        check_server: Callable[[], None] = lambda: None,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """Send each request when it is due and wait until all have ended.

        A conversation ends early when a request of it fails; its later turns have no record.

        Args:
            trace: what to send.
            records: is filled as requests start, so that it keeps what there is when the run
                breaks off.
            check_server: called now and then; what it raises ends the run.
            on_end: called with the record of each request that has ended.

        Raises:
            BenchError: from ``check_server``.
        """
        asyncio.run(self.stream(trace, records, time.monotonic(), check_server, on_end))

    async def stream(
        self,
        trace: Sequence[ServedRequest],
        records: list[RequestRecord],
        begin: float,
        check_server: Callable[[], None] = lambda: None,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """As ``play``, for a loop that runs.

        Args:
            trace: what to send.
            records: as for ``play``.
            begin: start of the trace on the monotonic clock, which Linux' processes share.
            check_server: as for ``play``.
            on_end: as for ``play``.
        """
        timeout = aiohttp.ClientTimeout(total=self.request_limit_s)
        # No connection is used twice: the server may close an idle one just as it is reused.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def converse(turns: Sequence[ServedRequest]) -> None:
                messages: list[dict[str, str]] = []
                due = begin
                for request in turns:
                    messages += request.messages
                    if request.follows and not self._fits(messages, request.max_tokens):
                        return
                    await asyncio.sleep(due + request.arrival_s - time.monotonic())
                    record = RequestRecord(request, time.monotonic() - begin)
                    records.append(record)
                    try:
                        await self._stream(session, record, messages, begin)
                    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                        record.error = f"{type(error).__name__}: {error}"
                    on_end(record)
                    if record.error is not None or record.finish_reason is None:
                        return
                    messages.append(self._said(record))
                    due = time.monotonic()

            pending = {asyncio.ensure_future(converse(turns)) for turns in conversations(trace)}
            try:
                while pending:
                    done, pending = await asyncio.wait(pending, timeout=_ALIVE_POLL_S)
                    for task in done:
                        task.result()
                    check_server()
            finally:
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)

    def _fits(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bool:
        """True when the prompt cannot exceed the context: no token is shorter than a byte."""
        if self.context_tokens is None:
            return True
        texts = (message[key] for message in messages for key in message if key != "role")
        prompt = sum(len(text.encode()) for text in texts)
        markers = _MARKERS_PER_MESSAGE * (1 + len(messages))
        return prompt + markers + max_tokens <= self.context_tokens

    def _said(self, record: RequestRecord) -> dict[str, str]:
        """The model's message, as the next prompt of the conversation holds it.

        Thoughts go into the field ``reasoning``, where vLLM's chat templates look for them.
        """
        said = {"role": "assistant", "content": record.answer}
        return said | {"reasoning": record.thought} if self.history == "kept" else said

    async def _stream(
        self,
        session: aiohttp.ClientSession,
        record: RequestRecord,
        messages: Sequence[Mapping[str, str]],
        begin: float,
    ) -> None:
        thinks = self.history != "plain"
        payload = {
            **chat_body(self.model, messages, record.request.max_tokens),
            "stream": True,
            **({} if thinks else {"chat_template_kwargs": {"enable_thinking": False}}),
            **record.request.extra,
        }
        async with session.post(f"{self.url}/v1/chat/completions", json=payload) as reply:
            if not reply.ok:
                record.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
                return
            async for chunk in streamed_chunks(reply):
                _note(record, chunk, time.monotonic() - begin)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        address = self.url + path
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ASK_LIMIT_S)) as session,
                session.request(method, address, json=body) as reply,
            ):
                text = await reply.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchError(
                f"the server does not answer at {address}: {error or type(error).__name__}"
            ) from None
        if not reply.ok:
            raise BenchError(
                f"{method} {address} answered HTTP {reply.status}, expected 200: {text[:200]}"
            )
        return text


def chat_body(model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
    """A chat request whose tokens come back, the same ones from every server: greedy."""
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }


async def streamed_chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, as they come.

    Raises:
        ValueError: an event is no JSON.
        aiohttp.ClientError: the connection broke off.
    """
    async for line in reply.content:
        event = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and event != _LAST_EVENT:
            yield json.loads(event)


def _note(record: RequestRecord, chunk: dict[str, Any], now_s: float) -> None:
    """Add one streamed chunk to the record."""
    if "error" in chunk:
        record.error = str(chunk["error"])
        return
    record.prompt_ids = chunk.get("prompt_token_ids") or record.prompt_ids
    for choice in chunk.get("choices", []):
        ids = choice.get("token_ids") or []
        record.token_ids.extend(ids)
        record.token_s.extend([now_s] * len(ids))
        record.thought += choice["delta"].get("reasoning") or ""
        record.answer += choice["delta"].get("content") or ""
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
