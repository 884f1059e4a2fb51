"""The load of a marathon: clients that ask, wait, cancel, and ask again."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from marathon.records import Asked
from meridian_patch.bench.served.client import chat_body, streamed_chunks
from meridian_patch.errors import BenchError

Json = dict[str, Any]

# As the openai package does: a request is sent again when no response began.
_MAX_RETRIES: Final = 2
_FIRST_PAUSE_S: Final = 0.5
_PATIENCE_S: Final = 120.0
_AFTER_ERROR_S: Final = 1.0
_SHARE_STREAMED: Final = 0.8
_SHARE_CANARIES: Final = 0.2
_SHARE_CANCELLED: Final = 0.1
_LONGEST_UNTIL_CANCEL_S: Final = 3.0
_BURST_EVERY_S: Final = 20.0
_MOST_TOKENS: Final = 600


class _NoResponse(Exception):  # noqa: N818 - the name is what happened
    """No response began: the request may be sent again."""


class _Wrong(Exception):  # noqa: N818 - the name is what happened
    """A response says that something failed."""


class _Cut(Exception):  # noqa: N818 - the name is what happened
    """A response began well and broke off."""


@dataclass(frozen=True)
class Canary:
    """A question whose answer is known.

    Attributes:
        question: what is asked, at temperature 0.
        token_ids: every token that one engine generates, thought and answer.
        text: of thought and answer.
    """

    question: str
    token_ids: tuple[int, ...]
    text: tuple[str, str]


async def know(url: str, model: str, question: str, **sampling: float) -> Canary:
    """Ask one engine, and take what it says for right.

    Args:
        url: of the engine.
        model: served name.
        question: to ask.
        sampling: other fields of the request.

    Raises:
        BenchError: it did not answer.
    """
    body = _body(model, question) | {"stream": True, **sampling}
    async with aiohttp.ClientSession() as http:
        try:
            ids, text = await _streamed(http, url, body)
        except (_NoResponse, _Wrong, _Cut) as error:
            raise BenchError(f"an engine did not answer a canary: {error}") from error
    return Canary(question, tuple(ids), text)


class Load:
    """Keeps a number of requests in flight.

    Args:
        url: of the gateway.
        model: served name.
        canaries: questions whose tokens are known.
        questions: all others.
        concurrency: clients, beside bursts of half as many requests.
        pause_s: how long a client waits between two requests.
        seed: of all choices.

    Attributes:
        asked: all requests so far.
        in_flight: how many of them have not ended.
    """

    def __init__(
        self,
        url: str,
        model: str,
        canaries: Sequence[Canary],
        questions: Sequence[str],
        concurrency: int,
        pause_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._url = url
        self._model = model
        self._canaries = canaries
        self._questions = questions
        self._concurrency = concurrency
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._begin = time.monotonic()
        self.asked: list[Asked] = []
        self.in_flight = 0

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._begin

    async def run(self, length_s: float) -> None:
        """Ask for so long, then wait for what is in flight."""
        self._begin = time.monotonic()
        # A connection of its own for each request: a client that cancels closes it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._keep_asking(http, length_s))
            while (left_s := length_s - self.now_s) > 0:
                await asyncio.sleep(min(_BURST_EVERY_S, left_s))
                if self.now_s < length_s:
                    for _ in range(self._concurrency // 2):
                        group.create_task(self._ask(http))

    async def _keep_asking(self, http: aiohttp.ClientSession, length_s: float) -> None:
        while self.now_s < length_s:
            asked = await self._ask(http)
            is_error = asked.outcome == "error"
            await asyncio.sleep(max(self._pause_s, _AFTER_ERROR_S * is_error))

    async def _ask(self, http: aiohttp.ClientSession) -> Asked:
        draw = self._random.random
        canary = self._random.choice(self._canaries) if draw() < _SHARE_CANARIES else None
        asked = Asked(self.now_s, canary is not None, draw() < _SHARE_STREAMED)
        cancel_s = draw() * _LONGEST_UNTIL_CANCEL_S if draw() < _SHARE_CANCELLED else None
        question = canary.question if canary else self._random.choice(self._questions)
        self.asked.append(asked)
        self.in_flight += 1
        try:
            async with asyncio.timeout(cancel_s or _PATIENCE_S):
                ids, text = await self._answered(http, asked, question)
            asked.outcome = "ok"
            if canary is not None:
                asked.is_equal = (tuple(ids), text) == (canary.token_ids, canary.text)
        except TimeoutError:
            asked.outcome = "error" if cancel_s is None else "cancelled"
            asked.why = "" if cancel_s else f"no end after {_PATIENCE_S:.0f} s"
        except (_NoResponse, _Wrong, _Cut) as error:
            asked.outcome, asked.why, asked.is_cut = "error", str(error), isinstance(error, _Cut)
        finally:
            asked.end_s = self.now_s
            self.in_flight -= 1
        return asked

    async def _answered(
        self, http: aiohttp.ClientSession, asked: Asked, question: str
    ) -> tuple[list[int], tuple[str, str]]:
        body = _body(self._model, question)
        while True:
            try:
                if asked.is_stream:
                    return await _streamed(http, self._url, body | {"stream": True})
                return await _whole(http, self._url, body)
            except _NoResponse:
                if asked.num_retries == _MAX_RETRIES:
                    raise
                await asyncio.sleep(_FIRST_PAUSE_S * 2**asked.num_retries)
                asked.num_retries += 1


def _body(model: str, question: str) -> Json:
    return chat_body(model, [{"role": "user", "content": question}], _MOST_TOKENS)


async def _streamed(
    http: aiohttp.ClientSession, url: str, body: Json
) -> tuple[list[int], tuple[str, str]]:
    ids: list[int] = []
    thought, answer, finish = "", "", None
    async with _Posted(http, url, body) as reply:
        try:
            async for chunk in streamed_chunks(reply):
                if "error" in chunk:
                    raise _Wrong(f"error event: {_message(chunk)}")
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or ()
                    thought += choice["delta"].get("reasoning") or ""
                    answer += choice["delta"].get("content") or ""
                    finish = choice.get("finish_reason") or finish
        except (aiohttp.ClientError, ValueError) as error:
            raise _Cut(f"{type(error).__name__} within the stream") from error
    if finish is None:
        raise _Cut("the stream ended without a finish reason")
    return ids, (thought, answer)


async def _whole(
    http: aiohttp.ClientSession, url: str, body: Json
) -> tuple[list[int], tuple[str, str]]:
    async with _Posted(http, url, body) as reply:
        try:
            choice = json.loads(await reply.read())["choices"][0]
        except aiohttp.ClientError as error:
            raise _Cut(f"{type(error).__name__} within the response") from error
        except (ValueError, LookupError) as error:
            raise _Wrong(f"{type(error).__name__} in the response") from error
    message = choice["message"]
    text = message.get("reasoning") or "", message.get("content") or ""
    return list(choice.get("token_ids") or ()), text


class _Posted:
    """A response that began well; as a context it ends the connection."""

    def __init__(self, http: aiohttp.ClientSession, url: str, body: Json) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._sent = http.post(f"{url}/v1/chat/completions", json=body, timeout=timeout)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            reply = await self._sent.__aenter__()
        except (aiohttp.ClientError, OSError) as error:
            raise _NoResponse(f"{type(error).__name__} before the response") from error
        if reply.status != HTTPStatus.OK:
            text = ""
            with suppress(aiohttp.ClientError):
                text = await reply.text()
            reply.close()
            is_busy = reply.status == HTTPStatus.TOO_MANY_REQUESTS
            has_failed = reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            kind = _NoResponse if is_busy or has_failed else _Wrong
            raise kind(f"HTTP {reply.status}: {text[:200]}")
        return reply

    async def __aexit__(self, *_: object) -> None:
        await self._sent.__aexit__(None, None, None)


def _message(chunk: Json) -> str:
    error = chunk["error"]
    return str(error.get("message") if isinstance(error, dict) else error)[:200]
