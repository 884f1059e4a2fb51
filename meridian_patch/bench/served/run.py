"""Runs a served comparison: servers that differ in one thing, the same traces, in turn.

The servers of all arms are up at once, and one at a time is under load; an idle one sleeps. Every
seed is played on all arms before the next one, in the order ABBA, so that whatever changes on the
machine in the meantime meets all arms alike. Servers of the same settings differ for as long as
they live: they can be started anew for each seed, another one first each time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from meridian_patch import envs
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.progress import progress_bars
from meridian_patch.bench.served.arms import (
    Arm,
    ArmRun,
    RunningArm,
    SeedRun,
    arm_environment,
    play_seed,
    start_arm,
)
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.report import Origin, write_report
from meridian_patch.bench.served.server import ServerSettings, pick_port
from meridian_patch.bench.served.summary import summarise
from meridian_patch.bench.served.table import table_title, terminal_table
from meridian_patch.bench.served.workload import TraceRequest, write_trace
from meridian_patch.engine.device import accelerator_name
from meridian_patch.errors import BenchError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
        arms: in the order of the tables.
        settings: of every server.
        traces: seed to trace; one pair of runs each.
        workload: the traces in words.
        load: how the servers are driven.
        port: of the first server, the next ones follow; 0 for any free ones.
        folder: takes logs, traces and reports.
        data_name: file name of the results as JSON.
        command: as typed.
        restarts: each seed has servers of its own, and logs.
    """

    arms: Sequence[Arm]
    settings: ServerSettings
    traces: Mapping[int, Sequence[TraceRequest]]
    workload: str
    load: Load
    port: int
    folder: Path
    data_name: str
    command: str
    restarts: bool = False


def run_comparison(comparison: Comparison, console: Console) -> int:
    """Run, print the table and write the reports, also when an arm fails.

    Returns:
        Exit code: 1 when an arm or a request failed, 130 on Ctrl-C.

    Raises:
        BenchError: the comparison cannot begin.
    """
    ports = check_ports(comparison.port, len(comparison.arms))
    _check_lengths(comparison)
    folder = comparison.folder
    folder.mkdir(parents=True, exist_ok=True)
    for seed, trace in comparison.traces.items():
        write_trace(folder / f"trace-{seed}.jsonl", trace)
    # Before vLLM is imported, which leaves variables of its own behind.
    base_env = dict(envs.environment())
    machine = replace(describe_machine(), accelerator=accelerator_name())
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = Origin(
        date, comparison.command, machine, comparison.settings, comparison.workload, comparison.load
    )
    console.print(f"{origin.machine}\n{comparison.workload}", highlight=False)
    runs = [ArmRun(arm.name) for arm in comparison.arms]
    code = _play(comparison, runs, ports, base_env, console)
    if _tell_failed_requests(runs, console):
        code = code or EXIT_FAILED
    played = [run for run in runs if run.seeds or run.error]
    if not any(run.seeds for run in played):
        return code
    arms = [summarise(run) for run in played]
    console.print(terminal_table(arms, f"{machine.how}{table_title(arms)}"))
    page = write_report(folder, played, origin, comparison.data_name)
    console.print(f"report: {page}", highlight=False)
    return code


def check_ports(first: int, arms: int) -> list[int]:
    """A port per arm from ``first`` on; 0: any free ones.

    Raises:
        BenchError: one of them is taken.
    """
    return [pick_port(first + number) if first else 0 for number in range(arms)]


def abba(arms: Sequence[RunningArm], pair: int) -> Sequence[RunningArm]:
    """The arms in the order in which a pair runs: forth, then back, and so on."""
    return arms if pair % 2 == 0 else arms[::-1]


def rotated(numbers: Sequence[int], pair: int) -> list[int]:
    """Another one first for each pair."""
    first = pair % len(numbers)
    return [*numbers[first:], *numbers[:first]]


def _play(
    comparison: Comparison,
    runs: Sequence[ArmRun],
    ports: Sequence[int],
    base_env: Mapping[str, str],
    console: Console,
) -> int:
    """Start servers and play; what breaks an arm off is said, kept, and ends that arm."""
    runner = _Runner(comparison, runs, ports, base_env)
    pairs = list(enumerate(comparison.traces))
    # Those that meet the same servers.
    rounds = [[pair] for pair in pairs] if comparison.restarts else [pairs]
    with progress_bars(console) as progress:
        try:
            for pairs_of_round in rounds:
                with ExitStack() as up:
                    running = runner.start(up, *pairs_of_round[0], progress)
                    for number, seed in pairs_of_round:
                        running = runner.play(running, number, seed, progress)
        except KeyboardInterrupt:
            runner.interrupted(progress.console)
            return EXIT_INTERRUPTED
    return EXIT_FAILED if any(run.error for run in runs) else 0


class _Runner:
    """Starts the servers of a comparison and plays its traces on them."""

    def __init__(
        self,
        comparison: Comparison,
        runs: Sequence[ArmRun],
        ports: Sequence[int],
        base_env: Mapping[str, str],
    ) -> None:
        self._comparison = comparison
        self._runs = runs
        self._ports = ports
        self._base_env = base_env
        # What an interruption would interrupt.
        self._busy: ArmRun | None = None

    def start(self, up: ExitStack, pair: int, seed: int, progress: Progress) -> list[RunningArm]:
        """Servers of all arms that have not failed, in the order of the arms."""
        log = f"-{seed}.log" if self._comparison.restarts else ".log"
        arms = self._comparison.arms
        started: dict[int, RunningArm] = {}
        for number in rotated(range(len(arms)), pair):
            run = self._runs[number]
            if run.error is not None:
                continue
            self._busy = run
            task = progress.add_task(f"{run.name}: starting the server", total=None)
            try:
                server = start_arm(
                    run,
                    self._comparison.settings,
                    arm_environment(arms[number], self._base_env),
                    self._comparison.folder / f"server-{run.name}{log}",
                    self._comparison.load,
                    self._ports[number],
                )
                started[number] = up.enter_context(server)
            except BenchError as error:
                _end_arm(run, error, progress.console)
            progress.remove_task(task)
        self._busy = None
        return [started[number] for number in sorted(started)]

    def play(
        self, running: Sequence[RunningArm], pair: int, seed: int, progress: Progress
    ) -> list[RunningArm]:
        """One seed on each arm; those that are left."""
        trace = self._comparison.traces[seed]
        for served in abba(running, pair):
            self._busy = served.run
            task = progress.add_task(f"seed {seed}, {served.run.name}", total=len(trace))
            advance = partial(progress.advance, task)
            try:
                play_seed(served, seed, trace, self._comparison.load.processes, advance)
            except BenchError as error:
                _end_arm(served.run, error, progress.console)
        self._busy = None
        return [served for served in running if served.run.error is None]

    def interrupted(self, console: Console) -> None:
        """Ctrl-C came."""
        if self._busy is not None:
            self._busy.error = "interrupted"
            console.print(f"{self._busy.name}: interrupted", style="red")


def _end_arm(run: ArmRun, error: BenchError, console: Console) -> None:
    run.error = str(error)
    # No markup: a log's lines hold brackets.
    console.print(f"{run.name}: {error}", style="red", highlight=False, markup=False)


def _tell_failed_requests(runs: Sequence[ArmRun], console: Console) -> bool:
    """Say how many requests of complete runs failed; True when any did."""
    found = False
    for run in runs:
        records = [record for seed in _complete(run) for record in seed.records]
        failed = [record for record in records if record.finish_reason is None]
        if failed:
            found = True
            first = failed[0]
            reason = first.error or "the stream ended without a finish reason"
            console.print(
                f"{run.name}: {len(failed)} of {len(records)} requests failed; the first, "
                f"{first.request.id}: {reason}",
                style="red",
                highlight=False,
                markup=False,
            )
    return found


def _complete(run: ArmRun) -> Iterator[SeedRun]:
    return (seed for seed in run.seeds if seed.is_complete)


def _check_lengths(comparison: Comparison) -> None:
    """Refuse a trace with a request that no server would take."""
    context = comparison.settings.max_model_len
    if context is None:
        return
    for trace in comparison.traces.values():
        for request in trace:
            if request.max_tokens >= context:
                raise BenchError(
                    f"request {request.id}: max_tokens is {request.max_tokens}, expected less "
                    f"than {context}, the servers' context"
                )
