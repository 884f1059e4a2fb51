"""The answer engines of a think engine: which one takes a request, and what it streams back."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import vllm
from vllm.logger import init_logger

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.engine.handoff.layout import Reasons
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.second_leg import PATH, LegLost, Piece, read_event

logger = init_logger("vllm.meridian_patch")

_FIRST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 30.0
_CONNECT_S: Final = 2.0
# A line holds one chunk: log-probabilities make it long.
_LONGEST_LINE: Final = 1 << 22
# Whole labels: others end in the same words.
_CACHE_INFO: Final = re.compile(r'[{,](block_size|cache_dtype)="([^"]*)"')
# What an engine says of every request, not of one.
_REFUSES_ALL: Final = frozenset(
    (
        *(HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED),
        HTTPStatus.TOO_MANY_REQUESTS,
    )
)
_HUB: Final = "models--"


class Same(NamedTuple):
    """What an answer engine must have in common with the think engine.

    Attributes:
        version: vLLM's.
        block_size: tokens per KV block.
        cache_dtype: vLLM's ``cache_config.cache_dtype``.
        models: paths and names under which the engine loaded its model.
        length: vLLM's ``max_model_len``; an answer engine's is as large or larger.
    """

    version: str
    block_size: str
    cache_dtype: str
    models: tuple[str, ...]
    length: int

    def has_model(self, root: str) -> bool:
        """Whether a server that was started with this model has ours."""
        # Load-bearing: offline, vLLM replaces a name by its folder in the hub's cache.
        hub = _HUB + root.replace("/", "--")
        return any(each == root or hub in Path(each).parts for each in self.models)


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
        check: held by the request that checks it.
        losses: why it lost requests without resting, each reason once in the log.
    """

    url: str
    num_legs: int = 0
    rests_until_s: float = 0.0
    num_failures: int = 0
    model: str | None = None
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
        self._headers = _authorization(config)
        self._ssl = _ssl_context(config)
        self._http: aiohttp.ClientSession | None = None

    def pick(self) -> AnswerServer | None:
        """The address with the fewest requests of ours that does not rest; None: there is none."""
        awake = [server for server in self._servers if not server.rests]
        return min(awake, key=lambda server: server.num_legs, default=None)

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
            async with self._session().post(f"{server.url}{PATH}", data=body) as response:
                if response.status != HTTPStatus.OK:
                    raise await _refusal(server, response)
                yield Stream(response)
                server.served()
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
            if server.model is None:
                server.model = await self._check(server)
            return server.model

    async def _check(self, server: AnswerServer) -> str:
        version = await self._json(server, "/version")
        models = await self._json(server, "/v1/models")
        async with self._session().get(f"{server.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        # Load-bearing: with nothing in the body it is refused, where the endpoint is there at all.
        async with self._session().post(f"{server.url}{PATH}", data=b"{}") as reply:
            has_endpoint = reply.status != HTTPStatus.NOT_FOUND
        infos = [line for line in lines if line.startswith("vllm:cache_config_info{")]
        info = dict(_CACHE_INFO.findall(infos[0])) if infos else {}
        listed = [each for each in models.get("data", ()) if isinstance(each, dict)]
        ours = [each for each in listed if self._same.has_model(str(each.get("root")))]
        length = max((each.get("max_model_len") or 0 for each in ours), default=0)
        found = {
            "version": (version.get("version"), self._same.version),
            "block_size": (info.get("block_size", "not in /metrics"), self._same.block_size),
            "cache_dtype": (info.get("cache_dtype", "not in /metrics"), self._same.cache_dtype),
        }
        why = next(
            (f"its {name} is {theirs!r}, expected {our!r} as here"
             for name, (theirs, our) in found.items() if theirs != our), "",
        )  # fmt: skip
        if not ours:
            roots = ", ".join(repr(each.get("root")) for each in listed)
            why = f"its model is {roots or 'none'}, expected {self._same.models[0]!r} as here"
        elif not why and length < self._same.length:
            why = f"its max_model_len is {length}, expected at least {self._same.length} as here"
        elif not why and not has_endpoint:
            why = f"it has no {PATH}, expected a server of --role answer or --enable-scale-out"
        if why:
            server.failed(why)
            raise LegLost(why, may_read=False)
        return str(ours[0]["id"])

    async def _json(self, server: AnswerServer, path: str) -> Mapping[str, Any]:
        async with self._session().get(f"{server.url}{path}") as reply:
            text = await reply.text(errors="replace")
        try:
            value = json.loads(text) if reply.status == HTTPStatus.OK else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            why = f"{path} is HTTP {reply.status} {text[:80]!r}, expected a vLLM server's"
            server.failed(why)
            raise LegLost(why, may_read=False)
        return value


async def _refusal(server: AnswerServer, response: aiohttp.ClientResponse) -> LegLost:
    """What a server's refusal means: it rests if it would refuse others, too."""
    text = (await response.text(errors="replace"))[:300]
    why = f"HTTP {response.status} from {PATH}: {text}"
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR or response.status in _REFUSES_ALL:
        server.failed(why)
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


def _authorization(config: HandoffConfig) -> dict[str, str]:
    if config.api_key_file is None:
        return {}
    try:
        key = config.api_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"handoff.api_key_file {config.api_key_file}: {error}, expected a file that holds the "
            "key of the answer engines"
        ) from error
    return {"Authorization": f"Bearer {key}"}


def _ssl_context(config: HandoffConfig) -> ssl.SSLContext | bool:
    if config.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(config.ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"handoff.ca_file {config.ca_file}: {error}, expected certificates in PEM"
        ) from error
