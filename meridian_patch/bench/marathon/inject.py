"""Injects the faults of a marathon."""

import asyncio
import signal
from collections.abc import Callable
from itertools import cycle

import aiohttp

from meridian_patch.bench.marathon.collector import scrape_slowly
from meridian_patch.bench.marathon.faults import Fault
from meridian_patch.bench.marathon.fleet import Fleet
from meridian_patch.bench.marathon.processes import Supervised
from meridian_patch.bench.marathon.records import Injected
from meridian_patch.bench.marathon.warm_up import WarmUp

_SLOW_REPLY_S = 15.0
_RESET_EVERY_S = 1.0
# Of the connections that are open, each time.
_RESET_SHARE = 0.15


class Injector:
    """Strikes a fleet.

    Args:
        fleet: that is under load.
        http: asks for the health of what was killed.
        now: seconds since the load began.
        warm_up: asks engines that are back.

    Attributes:
        injected: faults so far.
    """

    def __init__(
        self,
        fleet: Fleet,
        http: aiohttp.ClientSession,
        now: Callable[[], float],
        warm_up: WarmUp,
    ) -> None:
        self._fleet = fleet
        self._http = http
        self._now = now
        self._warm_up = warm_up
        self.injected: list[Injected] = []
        self._routers = cycle(fleet.routers)

    async def inject(self, fault: Fault) -> None:
        """Run a fault to its end; for a process that was killed, until it is healthy again."""
        injected = Injected(fault, self._now())
        self.injected.append(injected)
        engine = self._fleet.engines[fault.role]
        length_s = fault.shape.fault_s
        match fault.kind:
            case "peer":
                engine.kill()
                await self._wait_until_back(engine, injected)
                self._warm_up.start(fault.role, engine, self._now)
            case "router":
                router = next(self._routers)
                router.kill()
                await self._wait_until_back(router, injected)
            case "api-server":
                before = engine.num_orphans
                engine.kill_leader()
                await self._wait_until_back(engine, injected)
                injected.note = f"{engine.num_orphans - before} processes outlived it"
                self._warm_up.start(fault.role, engine, self._now)
            case "frozen":
                engine.signal_cores(signal.SIGSTOP)
                await asyncio.sleep(length_s)
                engine.signal_cores(signal.SIGCONT)
            case "disk":
                engine.limit_files(0)
                await asyncio.sleep(length_s)
                engine.limit_files(None)
            case "collector":
                await self._slow_down(length_s)
                injected.note = f"{self._fleet.collector.num_exports} exports so far"
            case "resets":
                await self._reset(length_s, injected)

    async def _wait_until_back(self, server: Supervised, injected: Injected) -> None:
        injected.must_return = True
        old = server.pid
        await server.wait_for_another(old)
        await server.wait_until_healthy(self._http)
        injected.back_s = self._now()

    async def _slow_down(self, length_s: float) -> None:
        self._fleet.collector.delay_s = _SLOW_REPLY_S
        try:
            ports = [server.port for server in self._fleet.servers]
            await asyncio.gather(*(scrape_slowly(port, length_s) for port in ports))
        finally:
            self._fleet.collector.delay_s = 0.0

    async def _reset(self, length_s: float, injected: Injected) -> None:
        proxies = self._fleet.proxies.values()
        before = sum(proxy.num_reset for proxy in proxies)
        for _ in range(int(length_s / _RESET_EVERY_S)):
            for proxy in proxies:
                proxy.reset(_RESET_SHARE)
            await asyncio.sleep(_RESET_EVERY_S)
        injected.note = f"{sum(proxy.num_reset for proxy in proxies) - before} connections reset"
