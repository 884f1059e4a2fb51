"""Servers as child processes that are started again when they end, as a supervisor does."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp

from meridian_patch.bench.child import Child, log_tail
from meridian_patch.errors import BenchError

_POLL_S: Final = 0.25
_START_LIMIT_S: Final = 240.0
_TERMINATE_S: Final = 20.0
_MIB: Final = 2**20
# Load-bearing: vLLM names its processes, and Linux keeps 15 characters.
_ENGINE_CORE: Final = "VLLM::EngineCor"


class Supervised(Child):
    """A server that is started again when it ends.

    Args:
        name: for the report.
        command: of the server.
        env: complete environment.
        log: takes what it prints.
        port: on which it answers ``/health``.

    Attributes:
        num_orphans: processes that outlived a server that was killed.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, port: int
    ) -> None:
        self.name = name
        self.port = port
        super().__init__(command, env, log, _TERMINATE_S)
        self.num_orphans = 0
        self._has_started = asyncio.Event()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; it is not healthy yet."""
        super().start()
        self._has_started.set()

    async def wait_for_another(self, old: int) -> None:
        """Wait until its leader is another process than this one."""
        while self.pid == old:
            self._has_started.clear()
            await self._has_started.wait()

    async def wait_until_healthy(self, http: aiohttp.ClientSession) -> None:
        """Wait for its first health check that succeeds, and let it run on all cores then.

        Raises:
            BenchError: it ended, or took too long.
        """
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                while not await self.is_healthy(http):
                    if self.code is not None:
                        raise BenchError(f"{self.name} ended. {log_tail(self.log)}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchError(
                f"{self.name} was not healthy after {_START_LIMIT_S:.0f} s. {log_tail(self.log)}"
            ) from None
        self._use_all_cores()

    async def is_healthy(self, http: aiohttp.ClientSession) -> bool:
        """Whether it answers its health check now."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            timeout = aiohttp.ClientTimeout(total=2)
            async with http.get(f"{self.url}/health", timeout=timeout) as reply:
                return reply.status == HTTPStatus.OK
        return False

    async def supervise(self) -> None:
        """Start it again whenever it has ended, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self.code is not None:
                self.num_orphans += len(list(processes_of(self.pid)))
                self.stop()
                self.start()

    def kill(self) -> None:
        """Kill all of its processes at once, as when its machine is lost."""
        self.send_signal(signal.SIGKILL)

    def kill_leader(self) -> None:
        """Kill the process that serves HTTP, and leave the others."""
        os.kill(self.pid, signal.SIGKILL)

    def signal_cores(self, number: signal.Signals) -> None:
        """Send a signal to its EngineCores."""
        for core in self.cores():
            with suppress(ProcessLookupError):
                os.kill(core, number)

    def cores(self) -> list[int]:
        """Process ids of its EngineCores."""
        return [process for process in processes_of(self.pid) if _is_core(process)]

    def _use_all_cores(self) -> None:
        # Load-bearing: on a CPU, vLLM's NIXL connector binds each EngineCore to the last core.
        cores = os.sched_getaffinity(0)
        for process in processes_of(self.pid):
            for thread in Path(f"/proc/{process}/task").glob("[0-9]*"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)

    def limit_files(self, most_bytes: int | None) -> None:
        """Let none of its processes write beyond this offset of a file; None: without a limit.

        A write beyond it fails, as on a full disk. This needs no right beyond the owner's.
        """
        for process in processes_of(self.pid):
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
                soft = hard if most_bytes is None else most_bytes
                resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))

    def core_mib(self) -> dict[str, float]:
        """Resident memory of each of its EngineCores, by ``NAME-PID``."""
        found = {f"{self.name}-{core}": _memory_mib(core) for core in self.cores()}
        return {name: mib for name, mib in found.items() if mib is not None}

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and all that it started."""
        if self._process is not None:
            # What was stopped would not see that it is to end.
            self.send_signal(signal.SIGCONT)
        super().stop(number)


def processes_of(group: int) -> Iterator[int]:
    """The processes of a group that run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(folder.name)) == group and not _is_ended(folder):
                yield int(folder.name)


def _is_core(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip() == _ENGINE_CORE
    return False


def _memory_mib(process: int) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{process}/statm").read_text()
        # A process that is about to end has given its memory back.
        return int(text.split()[1]) * resource.getpagesize() / _MIB or None
    return None


def _is_ended(folder: Path) -> bool:
    """Whether a process has ended and is kept for its parent alone."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
