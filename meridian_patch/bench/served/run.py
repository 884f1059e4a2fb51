"""Runs a served comparison: servers that differ in one thing, the same traces, in turn.

The servers of all arms are up at once, and one at a time is under load; an idle one sleeps. Every
seed is played on all arms before the next one, on another arm first each time, so that each arm
has each place in the order and what changes on the machine meets all arms alike. Servers of the
same settings differ for as long as they live: they can be started anew for each seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, TaskID

from meridian_patch import envs
from meridian_patch.bench.interrupts import EXIT_FAILED, EXIT_INTERRUPTED
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.progress import progress_bars
from meridian_patch.bench.served.arms import ServedArm, arm_environment
from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.fidelity import Fidelity, compare, fidelity_table
from meridian_patch.bench.served.load import Load, play_in_processes
from meridian_patch.bench.served.metrics import difference, read_counters
from meridian_patch.bench.served.pace import paced, token_time_s
from meridian_patch.bench.served.report import (
    Origin,
    emulation_in_words,
    headline_table,
    silence_in_words,
    table_title,
    terminal_table,
    write_report,
)
from meridian_patch.bench.served.server import ServerProcess, ServerSettings, pick_port
from meridian_patch.bench.served.summary import ArmRun, SeedRun, summarise
from meridian_patch.bench.served.workload import Mix, ServedRequest, make_trace, write_trace
from meridian_patch.emulation import ledger
from meridian_patch.emulation.options import device_environment
from meridian_patch.engine.device import accelerator_name
from meridian_patch.errors import BenchError

Item = TypeVar("Item")
_WARM_UP = Mix(requests=6, rate_per_s=6.0, max_tokens=64)
_WARM_UP_SEED = 1_000_003


@dataclass(frozen=True)
class Comparison:
    """Servers, traces and options of one comparison.

    Attributes:
        arms: in the order of the tables.
        settings: of every server.
        traces: seed to trace; one pair of runs each.
        workload: the traces in words.
        load: how the servers are driven.
        port: of the first server, the next ones follow; 0 for any free ones.
        folder: takes logs, traces and reports.
        command: as typed.
        restarts: each seed has servers of its own, and logs.
        starts_together: the servers start beside each other; not where they profile one GPU.
        headlines_only: the table printed has the most important figures; the page has all.
        pauses_in_tokens: pauses before later turns are in tokens of a request alone.
        has_fidelity: what the emulated servers did is replayed and compared.
    """

    arms: Sequence[ServedArm]
    settings: ServerSettings
    traces: Mapping[int, Sequence[ServedRequest]]
    workload: str
    load: Load
    port: int
    folder: Path
    command: str
    restarts: bool = False
    starts_together: bool = False
    headlines_only: bool = False
    pauses_in_tokens: bool = False
    has_fidelity: bool = False


@dataclass(frozen=True)
class RunningArm:
    """An arm whose server is up.

    Attributes:
        run: takes what the arm does.
        end_marker: token ids that end thinking; empty when there is no thinking.
        block_size: tokens per block of its KV cache; None where vLLM chose it.
        device_report: in which its emulated device says how late it was.
        tokens: of that device that one token stands for.
    """

    run: ArmRun
    server: ServerProcess
    client: Client
    end_marker: tuple[int, ...]
    block_size: int | None
    device_report: Path | None = None
    tokens: int = 1

    def counters(self) -> dict[str, float]:
        """The server's counters, and those of the device that it runs on."""
        found = read_counters(self.client.metrics_text())
        if self.device_report is None:
            return found
        return found | ledger.read_counters(self.device_report)


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
    if not comparison.pauses_in_tokens:
        _write_traces(folder, comparison.traces)
    # Before vLLM is imported, which leaves variables of its own behind.
    base_env = dict(envs.environment())
    device = comparison.settings.device
    machine = replace(
        describe_machine(),
        accelerator=accelerator_name(),
        emulates=str(device) if device else None,
    )
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = Origin(
        date, comparison.command, machine, comparison.settings, comparison.workload, comparison.load
    )
    console.print(f"{origin.machine}\n{comparison.workload}", highlight=False)
    runs = [ArmRun(arm.name) for arm in comparison.arms]
    code = 0
    with progress_bars(console) as progress:
        player = _Player(comparison, runs, ports, base_env, progress)
        try:
            player.play()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    if _print_failed_requests(runs, console) or any(run.error for run in runs):
        code = code or EXIT_FAILED
    played = [run for run in runs if run.seeds or run.error]
    if not any(run.seeds for run in played):
        return code
    arms = [summarise(run) for run in played]
    title = f"{machine.how}{table_title(arms)}"
    table = headline_table if comparison.headlines_only else terminal_table
    console.print(table(arms, title))
    if player.token_s is not None:
        pace = f"One request alone gets a token every {player.token_s * 1000:.2f} ms here."
        console.print(pace, highlight=False)
        origin = replace(origin, workload=f"{origin.workload} {pace}", token_s=player.token_s)
    if emulation_in_words(arms):
        console.print(emulation_in_words(arms), highlight=False)
    words = silence_in_words(arms)
    if words:
        _print_red(words, console)
    fidelity = []
    if comparison.has_fidelity:
        fidelity = _fidelity(comparison, runs, base_env)
        console.print(fidelity_table(fidelity, machine.how))
    page = write_report(folder, played, origin, fidelity)
    console.print(f"report: {page}", highlight=False)
    return code


def _fidelity(
    comparison: Comparison, runs: Sequence[ArmRun], base_env: Mapping[str, str]
) -> list[Fidelity]:
    """What each arm did, against its replay."""
    found = []
    for arm, run in zip(comparison.arms, runs, strict=True):
        env = arm_environment(arm.environment, base_env)
        found += compare(run, env, arm.settings(comparison.settings))
    return found


def check_ports(first: int, arms: int) -> list[int]:
    """A port per arm from ``first`` on; 0: any free ones.

    Raises:
        BenchError: one of them is taken.
    """
    return [pick_port(first + number) if first else 0 for number in range(arms)]


def rotated(items: Sequence[Item], pair: int) -> list[Item]:
    """The items in the order of a pair; each pair begins with another item."""
    first = pair % max(1, len(items))
    return [*items[first:], *items[:first]]


@contextmanager
def start_arm(
    run: ArmRun,
    arm: ServedArm,
    settings: ServerSettings,
    base_env: Mapping[str, str],
    load: Load,
    *,
    log_path: Path,
    port: int = 0,
) -> Iterator[RunningArm]:
    """Start an arm's server, warm it up, and end it on exit.

    Args and errors as of ``launch_arm`` and of what it gives.
    """
    with launch_arm(run, arm, settings, base_env, load, log_path=log_path, port=port) as ready:
        yield ready()


@contextmanager
def launch_arm(
    run: ArmRun,
    arm: ServedArm,
    settings: ServerSettings,
    base_env: Mapping[str, str],
    load: Load,
    *,
    log_path: Path,
    port: int = 0,
) -> Iterator[Callable[[], RunningArm]]:
    """Launch an arm's server, and end it on exit.

    What is given waits until the server is up, and warms it up. It raises BenchError where the
    server did not start, or serves something unexpected.

    Args:
        run: takes what the arm does.
        arm: whose server it is.
        settings: shared by all arms.
        base_env: environment that the server inherits.
        load: shared by all arms.
        log_path: takes the server's output.
        port: 0 for any free one.

    Raises:
        BenchError: the port is taken.
    """

    def on_wait(waited_s: float) -> None:
        run.start_s = waited_s

    def ready() -> RunningArm:
        server.wait_until_healthy()
        client = Client(
            server.url,
            settings.served_name,
            load.request_limit_s,
            load.history,
            settings.max_model_len,
        )
        end_marker = client.end_marker(load.end_marker) if load.end_marker else ()
        client.play(make_trace(_WARM_UP, _WARM_UP_SEED), [], server.check_alive)
        _check_is_patched(run.name, envs.activation(env), client.metrics_text())
        tokens = settings.device.tokens if settings.device else 1
        return RunningArm(run, server, client, end_marker, settings.block_size, report, tokens)

    settings = arm.settings(settings)
    env = arm_environment(arm.environment, base_env)
    report = log_path.with_suffix(".device.json") if settings.device else None
    if settings.device:
        env |= device_environment(settings.device, report)
    with ServerProcess(settings, env, log_path, pick_port(port), on_wait=on_wait) as server:
        yield ready


def play_seed(
    arm: RunningArm,
    seed: int,
    trace: Sequence[ServedRequest],
    processes: int,
    on_request: Callable[[], None],
) -> None:
    """Empty an arm's prefix cache and play one trace.

    Args:
        arm: its run is filled as the trace goes on, and keeps what there is when it breaks off.
        seed: of the trace.
        trace: what to send.
        processes: that share the sending.
        on_request: called when a request has ended.

    Raises:
        BenchError: the server died, or a client did.
    """
    seed_run = SeedRun(seed, arm.end_marker, block_size=arm.block_size, tokens=arm.tokens)
    arm.run.seeds.append(seed_run)
    arm.server.check_alive()
    arm.client.reset_prefix_cache()
    before = arm.counters()
    play_in_processes(
        arm.client, trace, processes, seed_run.records, arm.server.check_alive, on_request
    )
    seed_run.counters = difference(before, arm.counters())
    seed_run.is_complete = True


def describe_failures(records: Sequence[RequestRecord]) -> str | None:
    """How many requests failed, and why the first did; None when all ended as they should."""
    failed = [record for record in records if record.finish_reason is None]
    if not failed:
        return None
    reason = failed[0].error or "the stream ended without a finish reason"
    return (
        f"{len(failed)} of {len(records)} requests failed; the first, "
        f"{failed[0].request.id}: {reason}"
    )


def _check_is_patched(arm: str, should_be: bool | None, page: str) -> None:
    """Refuse a server that is stock where it should be patched, or the other way round."""
    is_ours = "meridian_" in page
    if is_ours != should_be:
        state = "exports" if is_ours else "does not export"
        raise BenchError(
            f"the server of arm {arm} {state} meridian_ metrics: it runs "
            f"{'patched' if is_ours else 'stock'}. Run 'meridian status' to see what is loaded"
        )


@dataclass
class _Player:
    """Starts the servers of a comparison and plays its traces on them.

    Attributes:
        comparison: what is played.
        runs: one per arm, in the order of the arms; they take what the arms do.
        ports: of the arms' servers.
        base_env: environment that the servers inherit.
        progress: shows what is under way.
        token_s: seconds per token of one request alone on the fastest server, where pauses are in
            tokens.
    """

    comparison: Comparison
    runs: Sequence[ArmRun]
    ports: Sequence[int]
    base_env: Mapping[str, str]
    progress: Progress
    token_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._traces = self.comparison.traces

    def play(self) -> None:
        """Play all pairs; an arm that fails is left out from then on."""
        pairs = list(enumerate(self.comparison.traces))
        # Pairs that are played on the same servers.
        rounds = [[pair] for pair in pairs] if self.comparison.restarts else [pairs]
        for pairs_of_round in rounds:
            with ExitStack() as up:
                running = self._start(up, *pairs_of_round[0])
                if self.comparison.pauses_in_tokens and self.token_s is None:
                    running = self._measure_pace(running)
                for pair, seed in pairs_of_round:
                    self._play_pair(rotated(running, pair), seed)
                    running = [served for served in running if served.run.error is None]

    def _start(self, up: ExitStack, pair: int, seed: int) -> list[RunningArm]:
        """Servers of all arms that have not failed, in the order of the arms."""
        log = f"-{seed}.log" if self.comparison.restarts else ".log"
        numbers = [n for n in rotated(range(len(self.runs)), pair) if self.runs[n].error is None]
        waves = [numbers] if self.comparison.starts_together else [[n] for n in numbers]
        started: dict[int, RunningArm] = {}
        for wave in waves:
            launched: dict[int, Callable[[], RunningArm]] = {}
            for number in wave:
                with self._guarded(self.runs[number]):
                    launched[number] = up.enter_context(self._launch(number, log))
            for number, ready in launched.items():
                run = self.runs[number]
                with self._work(run, f"{run.name}: starting the server") as task:
                    started[number] = ready()
                self.progress.remove_task(task)
        return [started[number] for number in sorted(started)]

    def _launch(self, number: int, log: str) -> AbstractContextManager[Callable[[], RunningArm]]:
        run, comparison = self.runs[number], self.comparison
        return launch_arm(
            run,
            comparison.arms[number],
            comparison.settings,
            self.base_env,
            comparison.load,
            log_path=comparison.folder / f"server-{run.name}{log}",
            port=self.ports[number],
        )

    def _measure_pace(self, running: Sequence[RunningArm]) -> list[RunningArm]:
        """Turn pauses into seconds. The fastest server counts: others may slow a machine down.

        Returns:
            The arms that did not fail.
        """
        times_s = []
        for served in running:
            with self._work(served.run, f"{served.run.name}: one request alone") as task:
                times_s.append(token_time_s(served.client, served.server.check_alive))
                self.progress.remove_task(task)
        if times_s:
            self.token_s = min(times_s)
            traces = self.comparison.traces.items()
            self._traces = {seed: paced(trace, self.token_s) for seed, trace in traces}
            _write_traces(self.comparison.folder, self._traces)
        return [served for served in running if served.run.error is None]

    def _play_pair(self, running: Sequence[RunningArm], seed: int) -> None:
        trace = self._traces[seed]
        for served in running:
            with self._work(served.run, f"seed {seed}, {served.run.name}", len(trace)) as task:
                advance = partial(self.progress.advance, task)
                play_seed(served, seed, trace, self.comparison.load.processes, advance)

    @contextmanager
    def _work(self, run: ArmRun, words: str, total: int | None = None) -> Iterator[TaskID]:
        """Show progress of work on an arm, under ``_guarded``."""
        with self._guarded(run):
            yield self.progress.add_task(words, total=total)

    @contextmanager
    def _guarded(self, run: ArmRun) -> Iterator[None]:
        """A failure ends this arm, Ctrl-C the comparison."""
        try:
            yield
        except BenchError as error:
            run.error = str(error)
        except KeyboardInterrupt:
            run.error = "interrupted"
            raise
        finally:
            if run.error is not None:
                _print_red(f"{run.name}: {run.error}", self.progress.console)


def _write_traces(folder: Path, traces: Mapping[int, Sequence[ServedRequest]]) -> None:
    for seed, trace in traces.items():
        write_trace(folder / f"trace-{seed}.jsonl", trace)


def _print_red(text: str, console: Console) -> None:
    # No markup: a log's lines hold brackets.
    console.print(text, style="red", highlight=False, markup=False)


def _print_failed_requests(runs: Sequence[ArmRun], console: Console) -> bool:
    """Print how many requests of complete runs failed; True when any did."""
    found = False
    for run in runs:
        complete = [seed for seed in run.seeds if seed.is_complete]
        words = describe_failures([record for seed in complete for record in seed.records])
        if words is not None:
            found = True
            _print_red(f"{run.name}: {words}", console)
    return found


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
