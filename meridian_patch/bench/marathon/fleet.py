"""The servers of a marathon: two engines, each behind a proxy, and their routers."""

import asyncio
import importlib.util
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import aiohttp

from meridian_patch import envs
from meridian_patch.bench.marathon.collector import Collector
from meridian_patch.bench.marathon.faults import Role
from meridian_patch.bench.marathon.processes import Supervised
from meridian_patch.bench.marathon.proxy import Proxy
from meridian_patch.bench.served.server import pick_port, server_environment
from meridian_patch.errors import BenchError

MODEL: Final = "tiny-reasoner"
ROLES: Final[tuple[Role, ...]] = ("think", "answer")
_BIN: Final = Path(sys.executable).parent
SEATS: Final = 64
"""Requests that an engine runs at once."""
_OPTIONS: Final = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--block-size", "32"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "513", "--max-num-seqs", str(SEATS)),
    *("--enforce-eager", "--gpu-memory-utilization", "0.2", "--reasoning-parser", "qwen3"),
    "--disable-uvicorn-access-log",
)
_HEALTHY: Final = re.compile(
    r'^meridian_route_engines\{.*state="healthy"\} ([0-9.]+)$', re.MULTILINE
)


def can_hand_off() -> bool:
    """Whether vLLM's NIXL connector has its package here."""
    return importlib.util.find_spec("nixl") is not None


class Fleet:
    """Starts on entry, is healthy then, and ends on exit.

    Args:
        model: folder of the model.
        folder: takes logs, traces and status files.
        hands_off: think on one engine and answer on the other; otherwise both do both.
        num_routers: that share nothing, each with both engines.

    Attributes:
        engines: by role.
        proxies: between the routers and each engine.
        routers: behind which clients are.
        collector: to which both engines export traces.
    """

    def __init__(self, model: Path, folder: Path, *, hands_off: bool, num_routers: int) -> None:
        self._model = model
        self._folder = folder
        self._hands_off = hands_off
        self._num_routers = num_routers
        self._keepers: list[asyncio.Task[None]] = []
        self.collector = Collector()
        self.engines: dict[Role, Supervised] = {}
        self.proxies: dict[Role, Proxy] = {}
        self.routers: list[Supervised] = []

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.to_thread(self._stop)

    @property
    def servers(self) -> list[Supervised]:
        """Engines and routers."""
        return [*self.engines.values(), *self.routers]

    def supervise(self) -> None:
        """From now on, start again what ends."""
        self._keepers = [asyncio.ensure_future(each.supervise()) for each in self.servers]

    def check_supervisors(self) -> None:
        """Raise what a supervisor raised."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
                raise BenchError("a supervisor of the marathon ended")

    async def num_healthy(self, http: aiohttp.ClientSession) -> int | None:
        """Engines that the first router that answers calls healthy; None if none answers."""
        timeout = aiohttp.ClientTimeout(total=2)
        for router in self.routers:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(f"{router.url}/metrics", timeout=timeout) as reply:
                    return int(sum(map(float, _HEALTHY.findall(await reply.text()))))
        return None

    async def _start(self) -> None:
        await self.collector.start()
        for role in ROLES:
            port = pick_port()
            self.engines[role] = self._engine(role, port)
            self.engines[role].start()
            self.proxies[role] = Proxy(port, seed=len(self.proxies))
            await self.proxies[role].start()
        self.routers = [self._router(number) for number in range(1, self._num_routers + 1)]
        async with aiohttp.ClientSession() as http:
            waits = [engine.wait_until_healthy(http) for engine in self.engines.values()]
            await asyncio.gather(*waits)
            for router in self.routers:
                router.start()
            await asyncio.gather(*(router.wait_until_healthy(http) for router in self.routers))

    def _router(self, number: int) -> Supervised:
        port, name = pick_port(), f"router-{number}"
        command = [str(_BIN / "meridian"), "route", "--port", str(port)]
        for role, proxy in self.proxies.items():
            command += [f"--{role if self._hands_off else 'think'}"]
            command += [f"http://127.0.0.1:{proxy.port}"]
        log = self._folder / f"{name}.log"
        return Supervised(name, command, self._environment(name), log, port)

    def _engine(self, role: Role, port: int) -> Supervised:
        command = [str(_BIN / "meridian"), "serve", str(self._model), *_OPTIONS]
        command += ["--port", str(port), "--otlp-traces-endpoint", self.collector.endpoint]
        if self._hands_off:
            command += ["--role", role, "--offload-threshold-blocks", "0"]
        log = self._folder / f"{role}.log"
        return Supervised(f"{role} engine", command, self._environment(role), log, port)

    def _environment(self, name: str) -> Mapping[str, str]:
        given = {
            key: value
            for key, value in envs.environment().items()
            if not key.startswith(envs.PREFIX) and key != "VLLM_PLUGINS"
        }
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return server_environment(given) | {
            "MERIDIAN_PATCH_STATUS_DIR": str(folder / "status"),
            "MERIDIAN_PATCH_SET_EXIT__TRACE": str(folder / "exit-trace.jsonl"),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            # The servers and their clients share a few cores: the kernel balances them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "UCX_TLS": "tcp,self,sm",
            # Beside the few that vLLM keeps for each layer, oneDNN keeps 1,024 multiplications, one
            # for each number of tokens, 0.27 MiB each: memory would rise until it has them all.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        }

    def _stop(self) -> None:
        for server in self.servers:
            server.stop()
        for proxy in self.proxies.values():
            proxy.close()
        self.collector.close()
