"""Shows the reports of patched processes: one short block per process, 80 columns wide."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meridian_patch.config.policy import RULES
from meridian_patch.engine import front_end
from meridian_patch.patches import PATCHES

Report = Mapping[str, Any]

_STYLES = {"off": "yellow", "limits": "yellow", "REFUSED": "bold red"}
_WHOLE_REASONS = (
    ("metrics_off", "metrics of EngineCore"),
    ("kv_tiers_off", "KV tiers"),
)
_OF_API_SERVER = frozenset(patch.name for patch in PATCHES if patch.process == "api_server")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


class Process(NamedTuple):
    """A process with a report."""

    report: Report
    ports: tuple[int, ...] = ()
    """TCP ports that it listens on."""
    age_s: float | None = None
    """Seconds since its start; None: not known."""
    depth: int = 0
    """How many of the processes shown have started it, one another."""

    @property
    def is_server(self) -> bool:
        """Whether its requests come from clients; also if its front end is vLLM's in Rust."""
        is_rust = self.report.get("front_end") == front_end.RUST
        return self.report["role"] == "launcher" and (bool(self.report.get("is_server")) or is_rust)

    @property
    def title(self) -> str:
        """What it is."""
        return "API server" if self.is_server else str(self.report["role"])

    def as_dict(self) -> dict[str, Any]:
        """The report and what was seen, for programs."""
        return {**self.report, "ports": list(self.ports), "age_s": self.age_s}


def is_live(process: Process) -> bool:
    """Whether a process runs with each patch that it reports in force; also if it reports none."""
    patches = process.report.get("patches", ())
    has_ended = process.report.get("has_ended")
    return not has_ended and all("applied" in patch["outcome"] for patch in patches)


def print_blocks(console: Console, processes: Sequence[Process], *, verbose: bool) -> None:
    """Print one block per process.

    Args:
        console: where to; it decides about colours and width.
        processes: each behind the one that started it.
        verbose: each patch with what was checked, and the command line.
    """
    for process in processes:
        indent = 2 * process.depth
        console.print(Padding(_headline(process), (0, 0, 0, indent), expand=False))
        if process.report.get("has_ended"):
            continue
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(min_width=9)
        rows.add_column(overflow="fold")
        lines = [*_facts(process.report), *(_details(process.report) if verbose else ())]
        for name, value in lines:
            rows.add_row(Text(name, style=_STYLES.get(name, "dim")), Text(value))
        console.print(Padding(rows, (0, 0, 0, indent + 2)))


def _headline(process: Process) -> Text:
    report, age_s = process.report, process.age_s
    pid = f"pid {report['pid']}"
    if report.get("has_ended"):
        rest = Text(f"  {pid}  has ENDED, its server goes on: see its log", style="not bold")
        return Text(process.title, style="bold red").append(rest)
    ports = ", ".join(map(str, process.ports)) if process.is_server else ""
    version = report.get("vllm_version")
    parts = (
        pid,
        f"port {ports}" if ports else None,
        f"vLLM {version}" if version else None,
        report.get("mode"),
        None if age_s is None else f"up {duration(age_s)}",
    )
    title = Text(process.title, style="bold")
    return title.append("  " + "  ".join(filter(None, parts)), style="not bold")


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """What a block says, as name and value."""
    yield from _patches(report)
    if "scheduler" in report:
        base = report.get("scheduler_base")
        yield "scheduler", report["scheduler"] + (f" on vLLM's {base}" if base else "")
        yield "policy", _policy(report)
        family = report.get("family")
        phases = f"family {family}" if family else "single-phase"
        yield "model", f"{report.get('model', '?')}, {phases}"
        modes = f"early exit {report.get('exit', '?')}, KV tiers {report.get('kv_tiers', '?')}"
        yield "modes", modes
        if report.get("metrics"):
            yield "metrics", str(report["metrics"])
    for why in _off(report):
        yield "off", why
    if report.get("limited_by"):
        yield "limits", str(report["limited_by"])


def _patches(report: Report) -> Iterator[tuple[str, str]]:
    patches = report.get("patches")
    if patches is None:
        yield "patches", "none are rebound in this process"
        return
    live = sum("applied" in patch["outcome"] for patch in patches)
    idle = sum(patch["patch"] in _OF_API_SERVER for patch in patches)
    is_idle = report.get("front_end") == front_end.RUST and idle
    note = f"; {idle} are of vLLM's Python front end, which does not run" if is_idle else ""
    yield "patches", f"{live} of {len(patches)} live{note}"
    for patch in patches:
        if "applied" in patch["outcome"]:
            continue
        broken = [check["detail"] for check in patch.get("checks", ()) if not check["ok"]]
        outcome = str(patch["outcome"]).replace("_", " ")
        yield "REFUSED", f"{patch['patch']}: {outcome}" + "".join(f"; {each}" for each in broken)


def _policy(report: Report) -> str:
    name, rules = str(report.get("policy", "?")), report.get("rules")
    if rules is None:
        return name
    off = [rule for rule in RULES if rule not in rules]
    shown = f"{name}: {', '.join(rules) or 'no rule on'}"
    return f"{shown} (not on: {', '.join(off)})" if off and rules else shown


def _off(report: Report) -> Iterator[str]:
    """What does not work in a process, and why."""
    if "scheduler" in report and report.get("front_end") == front_end.RUST:
        yield f"vLLM's front end in Rust has no patches: {front_end.MISSING}"
    if report.get("parts_off"):
        parts = ", ".join(report["parts_off"])
        yield f"{parts}: failed in 10 of 100 steps, off until the next start; see the log"
    if "scheduler" in report and not report.get("family"):
        yield "phases: the model's think boundaries are unknown; run meridian doctor MODEL"
    for name, what in _WHOLE_REASONS:
        if report.get(name):
            yield f"{what}: {report[name]}"
    for rule, why in (report.get("rules_off") or {}).items():
        yield f"rule {rule}: {why}"
    for name, what in (("exit_signals", "early exit's signals"), ("probes", "probes")):
        if report.get(name):
            yield f"{what}: {str(report[name]).partition(': ')[2] or report[name]}"
    if report.get("unpublished"):
        yield f"status: {report['unpublished']}"


def _details(report: Report) -> Iterator[tuple[str, str]]:
    for patch in report.get("patches", ()):
        checks = patch.get("checks", ())
        seen = "".join(
            f"\n{'ok' if check['ok'] else 'NOT OK'}  {check['name']}: {check['detail']}"
            for check in checks
        )
        yield "patch", f"{patch['patch']}: {patch['outcome']}{seen}"
        stale = [each for each in patch.get("stale", ()) if not each.get("is_base")]
        for each in stale:
            yield "stale", f"{each['module']}.{each['attribute']} still holds vLLM's own class"
    for key in ("boundaries", "config_digest", "parent_pid", "command"):
        if report.get(key) is not None:
            yield key.replace("_", " "), str(report[key])


def duration(seconds: float) -> str:
    """A length of time in its two largest units, for example ``2 h 5 min``."""
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
