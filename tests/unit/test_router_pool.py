"""The router and an engine whose connections are reset just as they open."""

import asyncio
import logging

import httpx
import pytest

from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of
from meridian_patch.router.engine import LOST_AFTER
from meridian_patch.router.engine_client import EngineClient, EngineFailed
from meridian_patch.router.pool import Pool


class Reset(httpx.AsyncBaseTransport):
    """Fails as anyio does: the socket has no peer any more."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")


def test_a_health_check_fails_as_for_any_broken_connection(caplog):
    (engine,) = engines_of(["http://a"], [])
    engine.is_healthy = True

    async def run() -> None:
        async with httpx.AsyncClient(transport=Reset()) as http:
            pool = Pool([engine], http)
            for _ in range(LOST_AFTER):
                await pool.check_all()

    asyncio.run(run())
    assert not engine.is_healthy
    assert engine._failed_checks == LOST_AFTER
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_may_go_to_another_engine():
    (engine,) = engines_of(["http://a"], [])

    async def run() -> None:
        async with httpx.AsyncClient(transport=Reset()) as http:
            with pytest.raises(EngineFailed) as failed:
                await EngineClient(http).whole(engine, "/v1/completions", {}, {})
            assert failed.value.is_down

    asyncio.run(run())
    assert engine.num_requests == 0


def test_other_endpoints_say_when_to_come_back():
    engines = engines_of(["http://a"], [])

    async def run() -> httpx.Response:
        router = Router(engines, answer_wait_s=5, transport=Reset())
        app = router.app()
        async with app.router.lifespan_context(app):
            engines[0].is_healthy = True
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                return await client.get("/v1/models")

    response = asyncio.run(run())
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
