"""The engines behind the router: which of them are healthy, and which has the least load."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import httpx

from meridian_patch.router.load import load_from

logger = logging.getLogger("meridian.route")

Role = Literal["think", "answer"]

POLL_S: Final = 1.0
"""Seconds between two health checks of an engine."""

_POLL_TIMEOUT_S: Final = 5.0


@dataclass(slots=True)
class Engine:
    """An engine's address and state.

    Attributes:
        url: base address, without a slash at its end.
        role: what the router uses it for.
        is_healthy: whether it answered its last health check, and no request failed since.
        num_requests: requests that the router has there now.
        load: its own phase-weighted load at the last check; 0 if it reports none.
    """

    url: str
    role: Role
    is_healthy: bool = False
    num_requests: int = 0
    load: float = 0.0
    # Requests that the router had there when `load` was read.
    _num_at_check: int = field(default=0, repr=False)

    @property
    def weight(self) -> float:
        """Load now: as it was at the last check, with what the router sent and ended since."""
        return max(self.load + self.num_requests - self._num_at_check, 0.0)

    def checked(self, load: float) -> None:
        """Note a successful check."""
        self.is_healthy, self.load, self._num_at_check = True, load, self.num_requests


class Pool:
    """All engines of one router.

    Args:
        engines: those that think, and those that answer.
        client: used for health checks.
    """

    def __init__(self, engines: Sequence[Engine], client: httpx.AsyncClient) -> None:
        self.engines = tuple(engines)
        self._client = client

    def choose(self, role: Role, without: Iterable[Engine] = ()) -> Engine | None:
        """The healthy engine of this role with the least load; None if there is none.

        Args:
            role: what the engine is to do.
            without: engines that failed this request already.
        """
        tried = {engine.url for engine in without}
        fit = [
            engine
            for engine in self.engines
            if engine.role == role and engine.is_healthy and engine.url not in tried
        ]
        return min(fit, key=lambda engine: engine.weight, default=None)

    def failed(self, engine: Engine, why: str) -> None:
        """A request failed on an engine: it gets no more until its next check succeeds."""
        if engine.is_healthy:
            logger.warning("engine %s is taken out: %s", engine.url, why)
        engine.is_healthy = False

    async def check_all(self) -> None:
        """Check every engine once."""
        await asyncio.gather(*(self._check(engine) for engine in self.engines))

    async def watch(self) -> None:
        """Check every engine once per second, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.check_all()

    async def _check(self, engine: Engine) -> None:
        try:
            reply = await self._client.get(f"{engine.url}/health", timeout=_POLL_TIMEOUT_S)
            reply.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self.failed(engine, f"{type(error).__name__} at its health check")
            return
        load = 0.0
        with suppress(httpx.HTTPError, ValueError):
            page = await self._client.get(f"{engine.url}/metrics", timeout=_POLL_TIMEOUT_S)
            load = load_from(page.text)
        if not engine.is_healthy:
            logger.info("engine %s (%s) is healthy", engine.url, engine.role)
        engine.checked(load)
