"""The engines behind the router: which of them are healthy, and which has the least load."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import httpx

from meridian_patch.router.engine import BROKEN, Engine, Role
from meridian_patch.router.hung import HUNG_AFTER_S, HungWatch
from meridian_patch.router.load import load_from, progress_from

logger = logging.getLogger("meridian.route")

POLL_S: Final = 1.0
"""Seconds between two health checks of an engine."""

_POLL_TIMEOUT_S: Final = 5.0
# Between two checks of an engine that says with each reply that it cannot serve it.
_RECHECK_S: Final = 0.2


class Pool:
    """All engines of one router.

    Args:
        engines: those that think, and those that answer.
        client: used for health checks.
        hung_after_s: seconds without a sign of life after which an engine hangs; 0: never.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        client: httpx.AsyncClient,
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self.engines = tuple(engines)
        self._client = client
        self._hung = HungWatch(self.engines, client, hung_after_s)
        self._checked_at: dict[Engine, float] = {}

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

    def check_soon(self, engine: Engine) -> None:
        """Check an engine that reported an error at once, unless it was checked just now.

        Its check tells whether it is down; until then it may have other requests.
        """
        if time.monotonic() - self._checked_at.get(engine, 0.0) >= _RECHECK_S:
            engine.check_now.set()

    async def check_all(self) -> None:
        """Check every engine once."""
        await asyncio.gather(*(self._check(engine) for engine in self.engines))

    async def watch(self) -> None:
        """Check every engine once per second, and when it is suspected, until cancelled."""
        try:
            await asyncio.gather(*(self._watch(engine) for engine in self.engines))
        finally:
            await self._hung.close()

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
        self._checked_at[engine] = time.monotonic()
        try:
            reply = await self._client.get(f"{engine.url}/health", timeout=_POLL_TIMEOUT_S)
            reply.raise_for_status()
        except BROKEN as error:
            self.take_out(engine, f"{type(error).__name__} at its health check")
            engine.failed()
            self._hung.forget(engine)
            return
        page = ""
        with suppress(*BROKEN):
            reply = await self._client.get(f"{engine.url}/metrics", timeout=_POLL_TIMEOUT_S)
            page = reply.text
        load = None
        with suppress(ValueError):
            load = load_from(page)
        if self._hung.is_hung(engine, progress_from(page)):
            engine.is_healthy = False
            return
        if not engine.is_healthy:
            logger.info("engine %s (%s) is healthy", engine.url, engine.role)
        engine.passed(load)
