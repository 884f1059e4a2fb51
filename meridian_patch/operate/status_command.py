"""``meridian status``: which patched processes of this user live, and what is live in them."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from meridian_patch.engine.status import read_all
from meridian_patch.operate.status_view import Report, is_live, print_blocks


def run(*, as_json: bool, verbose: bool) -> int:
    """Print the reports.

    Args:
        as_json: all that the processes published, as one JSON list.
        verbose: each patch with its checks, and the command line.

    Returns:
        Exit status: 0 if there is a process and all patches of all processes are in force.

    Raises:
        MeridianError: a file is not a report of this user.
    """
    reports = read_all()
    if as_json:
        print(json.dumps(reports, indent=1))
    elif reports:
        print_blocks(Console(highlight=False), reports, _ages_s(reports), verbose=verbose)
    else:
        print("no patched vLLM process of this user is running")
    return 0 if reports and all(map(is_live, reports)) else 1


def _ages_s(reports: Iterable[Report]) -> dict[int, float]:
    """Seconds since each process started; a process whose start is not known is left out."""
    ages = {}
    # Load-bearing: `started` is field 22 of /proc/PID/stat, in clock ticks since the boot.
    ticks = os.sysconf("SC_CLK_TCK")
    for report in reports:
        with suppress(KeyError, TypeError, ValueError, OSError):
            uptime_s = float(Path("/proc/uptime").read_text().split()[0])
            ages[report["pid"]] = max(0.0, uptime_s - int(report["started"]) / ticks)
    return ages
