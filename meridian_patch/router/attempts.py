"""One request's engines: which may serve its next part, and which have failed it."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from meridian_patch.errors import MeridianError
from meridian_patch.handoff.requests import can_be_handed_off, offload
from meridian_patch.router.engine import Engine, Role
from meridian_patch.router.engine_client import EngineClient, EngineFailed, EngineRefused
from meridian_patch.router.metrics import Metrics
from meridian_patch.router.pool import Pool

logger = logging.getLogger("meridian.route")

Json = dict[str, Any]

# A request that was failed so often may be what is wrong.
_MOST_FAILURES: Final = 4
# Longer than an engine's next check takes.
_WAIT_S: Final = 2.5
_POLL_S: Final = 0.05


class NoEngine(MeridianError):  # noqa: N818 - the name is what happened
    """No healthy engine is left for a request."""


class Services(NamedTuple):
    """What all requests of a router share.

    Attributes:
        pool: the engines.
        client: sends requests to them.
        metrics: the router's own.
        answer_wait_s: seconds after which an answer engine that has sent nothing is given up.
    """

    pool: Pool
    client: EngineClient
    metrics: Metrics
    answer_wait_s: float


class Attempts:
    """The engines that one request uses, one after another.

    Args:
        pool: the engines.
        body: the request as the client sent it.

    Attributes:
        may_move: whether another engine can go on with the request.
    """

    def __init__(self, pool: Pool, body: Json) -> None:
        self._pool = pool
        self._body = body
        self._failed: list[Engine] = []
        # Of these, engines whose connection broke: they may be back.
        self._lost: set[Engine] = set()
        self._num_failures = 0
        self._num_errors = 0
        # The last engine's error, if each one that failed the request sent one.
        self._refusal: EngineRefused | None = None
        self.may_move = can_be_handed_off(body)

    @property
    def is_last(self) -> bool:
        """Whether the request is given up at its next failure: it should wait instead."""
        return self._num_failures >= _MOST_FAILURES - 1

    def first_body(self, engine: Engine) -> Json:
        """The request for the engine that begins it.

        A think engine may hand it off if an answer engine is there. An answer engine that stands in
        for a think engine must not: no other engine would read its KV cache.
        """
        is_offered = self.may_move and engine.role == "think"
        is_offered = is_offered and self._pool.choose("answer", self._failed) is not None
        return offload(self._body) if is_offered else self._body

    async def choose(self, role: Role, holder: Engine | None = None) -> Engine:
        """A healthy engine of this role that has not failed the request, or one of the other role.

        If all have failed it, one whose connection broke may have another try once it is healthy.

        Args:
            role: what the engine is to do.
            holder: the engine that has the request's KV cache, which goes before all of its role.

        Raises:
            EngineRefused: there is none, and all that were tried sent errors: the last one's.
            NoEngine: there is none.
        """
        engine = None if self._num_errors >= _MOST_FAILURES else self._choose(role, holder)
        if engine is None and self._lost and self._num_failures < _MOST_FAILURES:
            engine = await self._choose_again(role, holder)
        if engine is None and self._refusal is not None:
            raise self._refusal
        if engine is None:
            raise NoEngine("no healthy engine is left for this request")
        return engine

    def failed(self, engine: Engine, error: EngineFailed | EngineRefused) -> None:
        """Do not use this engine again for this request; if it is down, nor for others."""
        refusal = error.refusal if isinstance(error, EngineFailed) else None
        is_alike = self._num_failures == 0 or self._refusal is not None
        self._refusal = refusal if is_alike else None
        self._failed.append(engine)
        self._num_failures += 1
        if refusal is not None:
            # What waits at an engine is not the request's fault; an error there may be.
            self._num_errors += refusal.status != HTTPStatus.SERVICE_UNAVAILABLE
            self._pool.check_soon(engine)
        if isinstance(error, EngineFailed) and error.is_down:
            self._lost.add(engine)
            self._pool.suspect(engine, str(error))
        else:
            logger.warning("engine %s failed a request: %s", engine.url, error)

    def _choose(self, role: Role, holder: Engine | None) -> Engine | None:
        roles: tuple[Role, ...] = (role, "answer" if role == "think" else "think")
        for each in roles:
            if holder is not None and holder.role == each and self._may_serve(holder):
                return holder
            engine = self._pool.choose(each, self._failed)
            if engine is not None:
                return engine
        return None

    def _may_serve(self, engine: Engine) -> bool:
        return engine.is_healthy and engine not in self._failed

    async def _choose_again(self, role: Role, holder: Engine | None) -> Engine | None:
        self._failed = [engine for engine in self._failed if engine not in self._lost]
        self._lost.clear()
        clock = asyncio.get_running_loop().time
        deadline = clock() + _WAIT_S
        while (engine := self._choose(role, holder)) is None and clock() < deadline:  # noqa: ASYNC110 - any
            # of several engines may come back.
            await asyncio.sleep(_POLL_S)
        return engine
