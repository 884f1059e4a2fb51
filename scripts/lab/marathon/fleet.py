"""The servers of a marathon: two think servers behind a gateway, and their answer engine."""

import asyncio
import importlib.util
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import aiohttp

from marathon.faults import Engine
from marathon.network import Collector, Proxy
from marathon.processes import Supervised
from meridian_patch import envs
from meridian_patch.bench.served.server import HOST, pick_port, server_environment
from meridian_patch.errors import BenchError

MODEL: Final = "tiny-reasoner"
SEATS: Final = 64
"""Requests that an engine runs at once."""

_THINKS: Final[tuple[Engine, ...]] = ("think-1", "think-2")
_BIN: Final = Path(sys.executable).parent
_GATEWAY: Final = "vllm-router"
_OPTIONS: Final = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--block-size", "32"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "513", "--max-num-seqs", str(SEATS)),
    *("--enforce-eager", "--gpu-memory-utilization", "0.2", "--reasoning-parser", "qwen3"),
    *("--offload-threshold-blocks", "0", "--disable-uvicorn-access-log"),
)
# With its defaults a think server that is back would get no request for up to a minute.
_GATEWAY_OPTIONS: Final = (
    *("--policy", "round_robin", "--cb-timeout-duration-secs", "5"),
    *("--health-check-interval-secs", "2"),
)
_HANDOFFS: Final = re.compile(
    r'^meridian_handoffs_total\{.*outcome="(\w+)".*\} ([0-9.e+]+)$', re.MULTILINE
)
_SCRAPE_S: Final = 10.0


def find_gateway() -> str:
    """The program of the gateway, beside this interpreter or on the path.

    Raises:
        BenchError: it is missing, or the package that moves the KV cache is.
    """
    found = shutil.which(_GATEWAY, path=str(_BIN)) or shutil.which(_GATEWAY)
    if found is None or importlib.util.find_spec("nixl") is None:
        missing = "the program vllm-router" if found is None else "the package nixl"
        raise BenchError(
            f"{missing} is missing, which the marathon needs; 'scripts/setup --nightly' installs it"
        )
    return found


class Fleet:
    """Starts on entry, is healthy then, and ends on exit.

    Args:
        model: folder of the model.
        folder: takes logs, traces and status files.

    Attributes:
        engines: think servers and answer engine.
        gateway: behind which clients are.
        proxy: between think servers and answer engine.
        collector: to which all engines export traces.

    Raises:
        BenchError: a part is missing.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._keepers: list[asyncio.Task[None]] = []
        self._ports: dict[Engine, int] = {name: pick_port() for name in ("answer", *_THINKS)}
        self.collector = Collector()
        self.proxy = Proxy(self._ports["answer"])
        self.engines: dict[Engine, Supervised] = {}
        self.gateway = self._make_gateway()

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
        """Engines and gateway."""
        return [*self.engines.values(), self.gateway]

    def supervise(self) -> None:
        """From now on, start again what ends."""
        self._keepers = [asyncio.ensure_future(each.supervise()) for each in self.servers]

    def check_supervisors(self) -> None:
        """Raise what a supervisor raised."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
                raise BenchError("a supervisor of the marathon ended")

    async def num_healthy(self, http: aiohttp.ClientSession) -> int:
        """Engines that answer their health check now."""
        return sum(
            await asyncio.gather(*(engine.is_healthy(http) for engine in self.engines.values()))
        )

    async def handoffs(self, http: aiohttp.ClientSession) -> dict[str, int]:
        """What became of requests after their thought, by outcome, as think servers count it."""
        handoffs: Counter[str] = Counter()
        timeout = aiohttp.ClientTimeout(total=_SCRAPE_S)
        for name in _THINKS:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(f"{self.engines[name].url}/metrics", timeout=timeout) as reply:
                    for outcome, number in _HANDOFFS.findall(await reply.text()):
                        handoffs[outcome] += int(float(number))
        return dict(handoffs)

    async def _start(self) -> None:
        await self.collector.start()
        await self.proxy.start()
        self.engines = {name: self._make_engine(name) for name in self._ports}
        async with aiohttp.ClientSession() as http:
            for engine in self.engines.values():
                engine.start()
                await engine.wait_until_healthy(http)
            # Ports that were free before the engines started may be taken.
            self.gateway = self._make_gateway()
            self.gateway.start()
            await self.gateway.wait_until_healthy(http)

    def _make_engine(self, name: Engine) -> Supervised:
        port = self._ports[name]
        command = [str(_BIN / "meridian"), "serve", str(self._model), *_OPTIONS, "--role"]
        if name == "answer":
            command += ["answer"]
        else:
            command += ["think", "--answer", f"http://{HOST}:{self.proxy.port}"]
        command += ["--port", str(port), "--otlp-traces-endpoint", self.collector.endpoint]
        log = self._folder / f"{name}.log"
        return Supervised(name, command, self._environment(name), log, port)

    def _make_gateway(self) -> Supervised:
        port = pick_port()
        thinks = [f"http://{HOST}:{self._ports[name]}" for name in _THINKS]
        command = [find_gateway(), "--worker-urls", *thinks, *_GATEWAY_OPTIONS]
        command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(pick_port())]
        log = self._folder / f"{_GATEWAY}.log"
        return Supervised(_GATEWAY, command, self._environment(_GATEWAY), log, port)

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
        self.proxy.close()
        self.collector.close()
