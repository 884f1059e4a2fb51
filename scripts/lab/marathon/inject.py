"""Injects the faults of a marathon."""

import asyncio
import signal
from collections.abc import Callable

import aiohttp

from marathon.faults import Fault
from marathon.fleet import Fleet
from marathon.network import scrape_slowly
from marathon.processes import Supervised
from marathon.records import Injected
from marathon.warm_up import WarmUp

_SLOW_REPLY_S = 15.0
_RESET_EVERY_S = 1.0
# Of the connections that are open, each time.
_RESET_SHARE = 0.3


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

    async def inject(self, fault: Fault) -> None:
        """Run a fault to its end; for a process that was killed, until it is healthy again."""
        injected = Injected(fault, self._now())
        self.injected.append(injected)
        engine = self._fleet.engines[fault.engine]
        length_s = fault.shape.fault_s
        match fault.kind:
            case "peer":
                engine.kill()
                await self._wait_until_back(engine, injected)
            case "api-server":
                before = engine.num_orphans
                engine.kill_leader()
                await self._wait_until_back(engine, injected)
                injected.note = f"{engine.num_orphans - before} processes outlived it"
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

    async def _wait_until_back(self, engine: Supervised, injected: Injected) -> None:
        injected.must_return = True
        await engine.wait_for_another(engine.pid)
        await engine.wait_until_healthy(self._http)
        injected.back_s = self._now()
        self._warm_up.start(engine, self._now)

    async def _slow_down(self, length_s: float) -> None:
        self._fleet.collector.delay_s = _SLOW_REPLY_S
        try:
            ports = [engine.port for engine in self._fleet.engines.values()]
            await asyncio.gather(*(scrape_slowly(port, length_s) for port in ports))
        finally:
            self._fleet.collector.delay_s = 0.0

    async def _reset(self, length_s: float, injected: Injected) -> None:
        proxy = self._fleet.proxy
        before = proxy.num_reset
        for _ in range(int(length_s / _RESET_EVERY_S)):
            proxy.reset(_RESET_SHARE)
            await asyncio.sleep(_RESET_EVERY_S)
        injected.note = f"{proxy.num_reset - before} connections reset"
