"""The answer engines of a think engine: which one takes a request, and what it streams back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import vllm
from vllm.logger import init_logger

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.engine.handoff.layout import Reasons
from meridian_patch.handoff.answer_engine import (
    ASKED,
    PAGES,
    TOKENS,
    Same,
    compare,
    key_of,
    served_name,
    tls_of,
)
from meridian_patch.handoff.second_leg import LegLost, Piece, read_event

logger = init_logger("vllm.meridian_patch")

_FIRST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 30.0
# After so long without a request an engine is checked again.
_IDLE_S: Final = 30.0
_CONNECT_S: Final = 2.0
# A line holds one chunk: log-probabilities make it long.
_LONGEST_LINE: Final = 1 << 22
# What an engine says of every request, not of one.
_REFUSES_ALL: Final = frozenset(
    (
        *(HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED),
        HTTPStatus.TOO_MANY_REQUESTS,
    )
)


def same_as(vllm_config: Any) -> Same:
    """What this engine's answer engines must have in common with it."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    # Load-bearing: of a model in an object store, the folder it was copied to, and its address.
    names = (str(model.model), str(model.model_weights))
    values = (str(cache.block_size), str(cache.cache_dtype))
    return Same(vllm.__version__, *values, tuple(filter(None, names)), model.max_model_len)


@dataclass
class AnswerServer:
    """One address.

    Attributes:
        url: base URL.
        num_legs: requests that are there.
        rests_until_s: before this time of ``time.monotonic`` it is asked for nothing.
        num_failures: in a row.
        model: the name under which it serves our model; None until it was checked.
        asked_at_s: when the last request went there.
        check: held by the request that checks it.
        losses: why it lost requests without resting, each reason once in the log.
    """

    url: str
    num_legs: int = 0
    rests_until_s: float = 0.0
    num_failures: int = 0
    model: str | None = None
    asked_at_s: float = 0.0
    check: asyncio.Lock = field(default_factory=asyncio.Lock)
    losses: Reasons = field(default_factory=lambda: Reasons("requests answer where they thought"))

    @property
    def rests(self) -> bool:
        return time.monotonic() < self.rests_until_s

    def failed(self, why: str) -> None:
        """Let it rest, twice as long as the last time; requests that fail alike count once."""
        if self.rests:
            return
        self.num_failures += 1
        self.model = None
        rest_s = min(_FIRST_REST_S * 2 ** (self.num_failures - 1), _LONGEST_REST_S)
        self.rests_until_s = time.monotonic() + rest_s
        logger.error(
            "meridian_patch: answer engine %s rests for %.0f s, and requests answer here: %s",
            *(self.url, rest_s, why),
        )

    def served(self) -> None:
        self.num_failures = 0


class AnswerServers:
    """All addresses of ``handoff.answer_urls``.

    Args:
        config: the addresses, and how they are asked.
        same: what they must have in common with this engine.
        first: index of the address that is tried first where several have as few requests.

    Raises:
        ConfigError: a file that the configuration names cannot be read.
    """

    def __init__(self, config: HandoffConfig, same: Same, first: int = 0) -> None:
        urls = [url.rstrip("/") for url in config.answer_urls]
        first %= max(len(urls), 1)
        self._servers = [AnswerServer(url) for url in urls[first:] + urls[:first]]
        self._same = same
        self._wait_s = config.answer_wait_s
        key = key_of(config)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._ssl = tls_of(config) or True
        self._http: aiohttp.ClientSession | None = None

    def pick(self) -> AnswerServer | None:
        """The address with the fewest requests of ours that does not rest; None: there is none.

        One that is being checked comes last: a request would wait for the check.
        """
        awake = [server for server in self._servers if not server.rests]
        return min(awake, key=lambda each: (each.check.locked(), each.num_legs), default=None)

    @asynccontextmanager
    async def asked(
        self, server: AnswerServer, body_for: Callable[[str], bytes]
    ) -> AsyncIterator["Stream"]:
        """The stream of what an answer engine generates.

        Args:
            server: from ``pick``.
            body_for: the body for a server that has our model under this name.

        Raises:
            LegLost: it cannot be reached, refuses the request, or differs from this engine.
        """
        server.num_legs += 1
        is_asked = False
        try:
            body = body_for(await self._checked(server))
            is_asked = True
            async with self._session().post(f"{server.url}{TOKENS}", data=body) as response:
                if response.status != HTTPStatus.OK:
                    raise await _refusal(server, response)
                yield Stream(response)
                server.served()
        except LegLost as lost:
            if lost.is_engines:
                server.failed(str(lost))
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__} {error}".strip()
            server.failed(why)
            is_connected = is_asked and not isinstance(error, aiohttp.ClientConnectorError)
            raise LegLost(why, may_read=is_connected) from error
        finally:
            server.num_legs -= 1

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connect_s = min(_CONNECT_S, self._wait_s)
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=connect_s, sock_read=self._wait_s
                ),
                headers={"Content-Type": "application/json", **self._headers},
                read_bufsize=_LONGEST_LINE,
            )
        return self._http

    async def _checked(self, server: AnswerServer) -> str:
        async with server.check:
            if server.rests:
                raise LegLost("it rests", may_read=False)
            now_s = time.monotonic()
            # An engine may be another one by now.
            if server.model is None or now_s - server.asked_at_s > _IDLE_S:
                server.model = await self._check(server)
            server.asked_at_s = now_s
            return server.model

    async def _check(self, server: AnswerServer) -> str:
        pages = {path: await self._page("GET", f"{server.url}{path}") for path in PAGES}
        pages[TOKENS] = await self._page("POST", f"{server.url}{TOKENS}", ASKED.encode())
        why = next((fact.why for fact in compare(self._same, pages) if fact.expected), None)
        if why is not None:
            server.failed(why)
            raise LegLost(why, may_read=False)
        return served_name(self._same, pages)

    async def _page(self, method: str, url: str, data: bytes | None = None) -> tuple[int, str]:
        async with self._session().request(method, url, data=data) as reply:
            return reply.status, await reply.text(errors="replace")


async def _refusal(server: AnswerServer, response: aiohttp.ClientResponse) -> LegLost:
    """What a server's refusal means: it rests if it would refuse others, too."""
    text = (await response.text(errors="replace"))[:300]
    why = f"HTTP {response.status} from {TOKENS}: {text}"
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR or response.status in _REFUSES_ALL:
        server.failed(why)
    elif response.status == HTTPStatus.NOT_FOUND:
        # It serves the model by another name now.
        server.model = None
    return LegLost(why, may_read=False)


class Stream:
    """Pieces of an answer as they come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[Sequence[Piece]]:
        """All pieces of a line at a time.

        Raises:
            LegLost: the engine reports an error.
        """
        async for line in self._response.content:
            if pieces := read_event(line):
                yield pieces
