"""Finds engines whose EngineCore hangs while their API server answers health checks."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import httpx

from meridian_patch.router.engine import BROKEN, Engine
from meridian_patch.router.silence import Progress, Silence

logger = logging.getLogger("meridian.route")

HUNG_AFTER_S: Final = 10.0
"""Seconds without a sign of life after which an engine hangs, unless the command line says more."""

# A token of every vocabulary; without a name, vLLM takes the model that it serves.
_ONE_TOKEN: Final = {"prompt": [0], "max_tokens": 1}


class HungWatch:
    """Judges engines at their checks.

    An engine that is silent is asked for one token before it is judged: what is slow in its API
    server alone, such as a download of an image, delays no other request. The question stays open
    while the engine hangs, so that its EngineCore has something to do when it goes on.

    Args:
        engines: all engines of the router.
        client: asks them.
        limit_s: seconds without a sign of life after which one hangs; 0: never.
    """

    def __init__(
        self, engines: Sequence[Engine], client: httpx.AsyncClient, limit_s: float
    ) -> None:
        self._engines = engines
        self._client = client
        self._limit_s = limit_s
        self._asked: dict[Engine, asyncio.Task[None]] = {}

    def is_hung(self, engine: Engine, progress: Progress) -> bool:
        """Judge an engine that answered its health check; give up what waits for one that hangs.

        The last healthy engine is never out: without it, requests could only be refused.

        Args:
            engine: to judge.
            progress: what it reports of its steps.
        """
        now = asyncio.get_running_loop().time()
        engine.silence.report(progress, now, is_waiting=engine.is_waited_for)
        verdict = engine.silence.verdict(now, self._limit_s)
        if verdict == "fine":
            return False
        self._ask(engine)
        if verdict == "ask":
            return False
        others = any(each.is_healthy for each in self._engines if each is not engine)
        if others:
            if not engine.silence.is_hung:
                logger.warning(
                    "engine %s hangs: requests wait, and for %g s it sent no byte and reported no "
                    "step",
                    engine.url,
                    self._limit_s,
                )
            # Each time: a request whose client was slow to read may begin to wait only now.
            engine.hangs()
        return engine.silence.is_hung

    def forget(self, engine: Engine) -> None:
        """Note that an engine is down: what comes back is judged anew."""
        engine.silence = Silence()
        task = self._asked.pop(engine, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End all open questions."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask(self, engine: Engine) -> None:
        task = self._asked.get(engine)
        if task is None or task.done():
            self._asked[engine] = asyncio.create_task(self._ask_for_a_token(engine))

    async def _ask_for_a_token(self, engine: Engine) -> None:
        try:
            reply = await self._client.post(
                f"{engine.url}/v1/completions", json=_ONE_TOKEN, timeout=None
            )
        except BROKEN:
            return
        # An engine that refuses the question, as one with an API key does, has shown nothing. If
        # it was out already, it is tried again: no other sign may ever come.
        if reply.is_success or engine.silence.is_hung:
            engine.heard()
            engine.check_now.set()
