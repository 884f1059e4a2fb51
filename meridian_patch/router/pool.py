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

LOST_AFTER: Final = 2
"""Health checks in a row that an engine must fail until its requests are given up."""

_POLL_TIMEOUT_S: Final = 5.0

# Load-bearing: for a connection that is reset just as it opens, the HTTP client's own layers raise
# an AttributeError: its socket has no peer any more.
BROKEN: Final = (httpx.HTTPError, httpx.InvalidURL, AttributeError)
"""What the HTTP client raises when an engine cannot be reached, or breaks off."""


@dataclass(slots=True, eq=False)
class Engine:
    """An engine's address and state.

    Attributes:
        url: base address, without a slash at its end.
        role: what the router uses it for.
        is_healthy: whether it answered its last health check, and no connection failed since.
        num_requests: requests that the router has there now.
        load: its own phase-weighted load at the last check; 0 if it reports none.
        waits: what waits for a reply of it; all are ended when the engine is lost.
        check_now: set to check it without delay.
    """

    url: str
    role: Role
    is_healthy: bool = False
    num_requests: int = 0
    load: float = 0.0
    waits: set[asyncio.Timeout] = field(default_factory=set, repr=False)
    check_now: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    # Health checks that it failed in a row, and requests there when `load` was read.
    _failed_checks: int = field(default=0, repr=False)
    _num_at_check: int = field(default=0, repr=False)

    @property
    def weight(self) -> float:
        """Load now: as it was at the last check, with what the router sent and ended since."""
        return max(self.load + self.num_requests - self._num_at_check, 0.0)

    def passed(self, load: float) -> None:
        """Note a check that succeeded."""
        self._failed_checks = 0
        self.is_healthy, self.load, self._num_at_check = True, load, self.num_requests

    def failed(self) -> None:
        """Note a check that failed; after some in a row, give up what waits for the engine."""
        self.is_healthy = False
        self._failed_checks += 1
        if self._failed_checks >= LOST_AFTER:
            now = asyncio.get_running_loop().time()
            for wait in self.waits:
                wait.reschedule(now)


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
        tried = set(without)
        fit = [
            engine
            for engine in self.engines
            if engine.role == role and engine.is_healthy and engine not in tried
        ]
        return min(fit, key=lambda engine: engine.weight, default=None)

    def take_out(self, engine: Engine, why: str) -> None:
        """Send no more requests to an engine until its next check succeeds."""
        if engine.is_healthy:
            logger.warning("engine %s is taken out: %s", engine.url, why)
        engine.is_healthy = False

    def suspect(self, engine: Engine, why: str) -> None:
        """As ``take_out``, and check it at once: a broken connection need not be its end."""
        if engine.is_healthy:
            engine.check_now.set()
        self.take_out(engine, why)

    async def check_all(self) -> None:
        """Check every engine once."""
        await asyncio.gather(*(self._check(engine) for engine in self.engines))

    async def watch(self) -> None:
        """Check every engine once per second, and when it is suspected, until cancelled."""
        await asyncio.gather(*(self._watch(engine) for engine in self.engines))

    async def _watch(self, engine: Engine) -> None:
        while True:
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await engine.check_now.wait()
            engine.check_now.clear()
            try:
                await self._check(engine)
            except Exception:
                # Without its checks an engine that was taken out would stay out.
                logger.exception("the check of engine %s failed", engine.url)

    async def _check(self, engine: Engine) -> None:
        try:
            reply = await self._client.get(f"{engine.url}/health", timeout=_POLL_TIMEOUT_S)
            reply.raise_for_status()
        except BROKEN as error:
            self.take_out(engine, f"{type(error).__name__} at its health check")
            engine.failed()
            return
        load = 0.0
        with suppress(*BROKEN, ValueError):
            page = await self._client.get(f"{engine.url}/metrics", timeout=_POLL_TIMEOUT_S)
            load = load_from(page.text)
        if not engine.is_healthy:
            logger.info("engine %s (%s) is healthy", engine.url, engine.role)
        engine.passed(load)
