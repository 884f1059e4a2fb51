"""One request's engines: which may serve its next part, and which have failed it."""

import logging
from typing import Any, NamedTuple

from meridian_patch.errors import MeridianError
from meridian_patch.handoff.requests import can_be_handed_off, offload
from meridian_patch.router.engine_client import EngineClient, EngineFailed, EngineRefused
from meridian_patch.router.metrics import Metrics
from meridian_patch.router.pool import Engine, Pool, Role

logger = logging.getLogger("meridian.route")

Json = dict[str, Any]


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
        self.may_move = can_be_handed_off(body)

    def first_body(self, engine: Engine) -> Json:
        """The request for the engine that begins it.

        A think engine may hand it off if an answer engine is there. An answer engine that stands in
        for a think engine must not: no other engine would read its KV cache.
        """
        is_offered = self.may_move and engine.role == "think"
        is_offered = is_offered and self._pool.choose("answer", self._failed) is not None
        return offload(self._body) if is_offered else self._body

    def choose(self, role: Role) -> Engine:
        """A healthy engine of this role that has not failed the request, or one of the other role.

        Raises:
            NoEngine: there is none.
        """
        for each in (role, "answer" if role == "think" else "think"):
            engine = self._pool.choose(each, self._failed)
            if engine is not None:
                return engine
        raise NoEngine("no healthy engine is left for this request")

    def failed(self, engine: Engine, error: EngineFailed | EngineRefused) -> None:
        """Do not use this engine again for this request; if it is down, nor for others."""
        self._failed.append(engine)
        if isinstance(error, EngineFailed) and error.is_down:
            self._pool.take_out(engine, str(error))
        else:
            logger.warning("engine %s failed a request: %s", engine.url, error)
