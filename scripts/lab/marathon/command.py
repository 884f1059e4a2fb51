"""``scripts/marathon``: think servers and their answer engine under load, while parts fail.

The load is requests of the tiny reasoner, streamed and whole, in bursts, a tenth of them cancelled.
A fifth are canaries, whose tokens must be those of one engine. The verdict is the exit code.
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from marathon.faults import SHAPES, Kind, plan_faults
from marathon.fleet import find_gateway
from marathon.records import Settings
from marathon.report import write_report
from marathon.run import run_marathon
from meridian_patch.bench.interrupts import EXIT_FAILED, run_program
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.options import read_positive, read_whole
from meridian_patch.bench.served.plan import packaged_model
from meridian_patch.errors import BenchError

_SCRIPT = "scripts/marathon"
_KINDS: tuple[Kind, ...] = get_args(Kind)


def main(argv: list[str] | None = None) -> None:
    """Run; exits with 1 when a demand was not met and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    run_program("marathon", lambda: _run(arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    faults = "; ".join(f"{kind}: {shape.title}" for kind, shape in SHAPES.items())
    parser = argparse.ArgumentParser(prog=_SCRIPT, description=__doc__, epilog=f"Faults: {faults}.")
    parser.add_argument("--minutes", default="30", help="of load (%(default)s)")
    parser.add_argument(
        "--concurrency",
        default="64",
        help="requests in flight, beside bursts of half as many (%(default)s)",
    )
    parser.add_argument(
        "--pause-s",
        default="0",
        help="that a client waits between two requests; with 0 the load takes all of a small "
        "machine, and an engine that starts again takes minutes (%(default)s)",
    )
    parser.add_argument(
        "--faults",
        default=",".join(_KINDS),
        help="to inject, in rounds, in this order; an empty list for none (%(default)s)",
    )
    parser.add_argument("--seed", default="1", help="of all choices (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the report (out/marathon/DATE)"
    )
    return parser.parse_args(list(arguments))


def _run(arguments: list[str]) -> int:
    options = parse(arguments)
    settings = read_settings(options)
    find_gateway()
    machine = describe_machine()
    folder: Path = (
        options.out or Path("out/marathon") / f"{datetime.now().astimezone():%Y-%m-%d-%H%M%S}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    result = asyncio.run(
        run_marathon(settings, folder, lambda text: print(f"marathon: {text}", flush=True))
    )
    origin = f"`{shlex.join([_SCRIPT, *arguments])}`, `{machine.how}`, {machine}."
    checks = write_report(folder, settings, result, origin)
    for check in checks:
        mark = "met    " if check.is_met else "NOT MET"
        print(f"marathon: {mark} {check.name}: {check.value} (limit {check.bar})")
    print(f"marathon: {folder / 'report.md'}")
    return 0 if all(check.is_met for check in checks) else EXIT_FAILED


def read_settings(options: argparse.Namespace) -> Settings:
    """What the options say.

    Raises:
        BenchError: a wrong value.
    """
    length_s = read_positive("--minutes", options.minutes) * 60
    return Settings(
        packaged_model(),
        length_s,
        read_whole("--concurrency", options.concurrency),
        read_seconds("--pause-s", options.pause_s),
        plan_faults(length_s, _kinds(options.faults)),
        read_whole("--seed", options.seed),
    )


def read_seconds(option: str, text: str) -> float:
    """Seconds, 0 or more."""
    return 0.0 if text == "0" else read_positive(option, text)


def _kinds(text: str) -> list[Kind]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    kinds = [kind for name in names for kind in _KINDS if kind == name]
    if len(kinds) != len(names):
        raise BenchError(f"--faults is {text!r}, expected some of {', '.join(_KINDS)}")
    return kinds


if __name__ == "__main__":
    main()
