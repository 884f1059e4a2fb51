"""``meridian doctor``: what is wrong with an installation or a running server, and the fix."""

import argparse
import json
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meridian_patch import __version__, envs
from meridian_patch.errors import ConfigError
from meridian_patch.operate.doctor.finding import Finding, State
from meridian_patch.operate.doctor.run import Plan, find_all
from meridian_patch.operate.options import add_api_key, api_key, seconds

# As shells report a program that an interrupt ended.
_INTERRUPTED = 130
# Beside a running server these are shown only where something is wrong.
_LOCAL = frozenset(("environment", "configuration"))
_STYLES = {
    State.OK: "green",
    State.WARN: "yellow",
    State.FAIL: "bold red",
    State.SKIP: "dim",
}


def add_doctor(commands: Any) -> None:
    """Add ``doctor`` to the subcommands of the ``meridian`` command."""
    doctor = commands.add_parser("doctor", help="what is wrong, and what to do about it")
    doctor.add_argument("model", nargs="?", help="model directory, or a cached name")
    doctor.add_argument("--reasoning-parser", help="as given to vLLM")
    doctor.add_argument("--url", help="also ask a running server: http://host:port, or host:port")
    doctor.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="URL",
        help="also check the hand-off from that server to this answer engine; may be given several "
        "times (handoff.answer_urls)",
    )
    add_api_key(doctor)
    doctor.add_argument(
        "--limit-s",
        type=seconds,
        default=120.0,
        help="most seconds without a byte of a reply: each read may take that long (120)",
    )
    doctor.add_argument(
        "--quick", action="store_true", help="do not bind the patches in a process of its own"
    )
    doctor.add_argument("--json", action="store_true", dest="as_json", help="for programs")
    doctor.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.answer and parsed.url is None:
        raise ConfigError("meridian doctor: --answer needs --url, the think server's address")
    plan = Plan(
        model=parsed.model,
        reasoning_parser=parsed.reasoning_parser,
        url=parsed.url,
        api_key=api_key(parsed, parsed.url),
        answer_urls=tuple(parsed.answer),
        limit_s=parsed.limit_s,
        is_quick=parsed.quick,
    )
    try:
        return diagnose(plan, as_json=parsed.as_json)
    except KeyboardInterrupt:
        return _INTERRUPTED


def diagnose(plan: Plan, *, as_json: bool) -> int:
    """Print all findings.

    Returns:
        Exit status: 1 if any finding is a failure.
    """
    findings = find_all(plan, envs.given_environment())
    if as_json:
        told = list(findings)
        print(json.dumps(as_object(told), indent=1))
    else:
        folded = _LOCAL if plan.url is not None else frozenset()
        told = print_findings(Console(highlight=False), findings, folded)
    return 1 if worst(told) is State.FAIL else 0


def as_object(findings: Iterable[Finding]) -> dict[str, Any]:
    """All findings as one JSON object."""
    told = list(findings)
    return {
        "meridian_patch": __version__,
        "state": str(worst(told)),
        "findings": [finding.as_dict() for finding in told],
    }


def worst(findings: Iterable[Finding]) -> State:
    """The worst state of all findings."""
    states = {finding.state for finding in findings}
    return next((each for each in (State.FAIL, State.WARN) if each in states), State.OK)


def print_findings(
    console: Console, findings: Iterable[Finding], folded: Container[str] = frozenset()
) -> list[Finding]:
    """Print findings as they come, by area, and a line that sums them up.

    Args:
        console: where to.
        findings: by area.
        folded: areas of which only what is not in order is printed.
    """
    told: list[Finding] = []
    for finding in findings:
        if not told or told[-1].area != finding.area:
            heading = Text(finding.area, style="bold")
            if finding.area in folded:
                heading.append("  only what is not in order", style="not bold dim")
            console.print(heading)
        told.append(finding)
        if finding.area in folded and finding.state is State.OK:
            continue
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(width=4)
        rows.add_column(overflow="fold")
        text = Text(f"{finding.check}: ").append(finding.found)
        rows.add_row(Text(finding.state, style=_STYLES[finding.state]), text)
        for name, value in (("expected", finding.expected), ("fix", finding.fix)):
            if value:
                rows.add_row("", Text(f"{name}: ", style="bold").append(value, style="not bold"))
        console.print(Padding(rows, (0, 0, 0, 2)))
    count = Counter(finding.state for finding in told)
    parts = [f"{count[state]} {state}" for state in State if count[state]]
    console.print(Text(", ".join(parts), style=_STYLES[worst(told)]))
    return told
