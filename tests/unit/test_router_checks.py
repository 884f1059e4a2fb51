"""What the router makes of an engine's checks: its load, and requests that wait while it hangs."""

import asyncio

import httpx
import pytest

from meridian_patch.router.command import engines_of
from meridian_patch.router.engine_client import EngineFailed, within
from meridian_patch.router.hung import HungWatch
from meridian_patch.router.pool import Pool

PAGE = 'vllm:num_requests_running{engine="0"} %d\n'


class Engines(httpx.AsyncBaseTransport):
    """Two engines of which one has 60 requests, and may stop reporting them."""

    def __init__(self) -> None:
        self.page: str | None = PAGE % 60

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/metrics":
            return httpx.Response(200)
        page = self.page if request.url.host == "busy" else PAGE % 3
        if page is None:
            raise httpx.ReadTimeout("its API server is slow")
        return httpx.Response(200, text=page)


@pytest.mark.parametrize("page", (None, "", "vllm:num_requests_running 1.2.3\n"))
def test_an_engine_whose_load_cannot_be_read_is_not_idle(page: str | None) -> None:
    async def run() -> None:
        engines = engines_of(["http://busy", "http://calm"], [])
        stub = Engines()
        async with httpx.AsyncClient(transport=stub) as http:
            pool = Pool(engines, http)
            busy, calm = engines
            busy.num_requests, calm.num_requests = 60, 3
            await pool.check_all()
            stub.page = page
            await pool.check_all()
            assert pool.choose("think") is calm
            busy.num_requests -= 58
            assert busy.weight == 2, "what ended since counts"

    asyncio.run(run())


def test_engines_that_report_no_load_share_the_requests() -> None:
    async def run() -> list[int]:
        engines = engines_of(["http://a", "http://b"], [])
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=""))
        async with httpx.AsyncClient(transport=transport) as http:
            pool = Pool(engines, http)
            for _ in range(20):
                await pool.check_all()
                pool.choose("think").num_requests += 1
        return [engine.num_requests for engine in engines]

    assert asyncio.run(run()) == [10, 10]


def test_a_wait_that_begins_after_the_verdict_is_given_up_too(caplog) -> None:
    async def run() -> None:
        hangs, other = engines_of(["http://a", "http://b"], [])
        hangs.passed(0)
        other.passed(0)

        async def never(_: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()

        async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as http:
            watch = HungWatch([hangs, other], http, 0.01)
            hangs.silence.report(("same",), 0.0, is_waiting=False)
            for _ in range(3):
                late = asyncio.create_task(within(hangs, asyncio.Event().wait()))
                await asyncio.sleep(0.03)
                assert watch.is_hung(hangs, ("same",))
                with pytest.raises(EngineFailed):
                    async with asyncio.timeout(1):
                        await late
            await watch.close()

    asyncio.run(run())
    assert sum("hangs" in record.message for record in caplog.records) == 1
