"""The demo: stock and patched vLLM in turn, on the same trace, under the same KV pressure.

``python -P -m meridian_patch.demo.run`` starts real servers on the tiny reasoner, streams a trace
from each, prints one table and writes ``report.html`` and ``report.json``.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meridian_patch import envs
from meridian_patch.bench.arms import ARM_ENVIRONMENTS, ArmRun, Watcher, run_arm
from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.report import Origin, write_report
from meridian_patch.bench.server import ServerSettings, pick_port
from meridian_patch.bench.summary import summarise
from meridian_patch.bench.table import terminal_table
from meridian_patch.bench.workload import Mix, TraceRequest, make_trace, read_trace, write_trace
from meridian_patch.errors import BenchError, MeridianError

FIRST_SEED = 1
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_MODULE = "meridian_patch.demo.run"

Traces = Mapping[int, Sequence[TraceRequest]]


def main(argv: list[str] | None = None) -> None:
    """Run the demo; exits with 1 when an arm failed and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    end_like_ctrl_c()
    try:
        sys.exit(_run(_parse(arguments), shlex.join(["python", "-P", "-m", _MODULE, *arguments])))
    except MeridianError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def packaged_model() -> Path:
    """Directory of the tiny reasoner that ships with the package."""
    return Path(str(files("meridian_patch.demo").joinpath("tiny-reasoner")))


def _run(args: argparse.Namespace, command: str) -> int:
    console = Console()
    settings = _settings(args)
    pick_port(args.port)
    traces, workload = _traces(args)
    _check_lengths(traces, settings)
    folder: Path = args.out
    folder.mkdir(parents=True, exist_ok=True)
    for seed, trace in traces.items():
        write_trace(folder / f"trace-{seed}.jsonl", trace)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = Origin(now, command, describe_machine(), settings, workload)
    console.print(f"{origin.machine}\n{workload}", highlight=False)
    runs = [ArmRun(name) for name in args.arms]
    code = _play(runs, settings, traces, args, console)
    played = [run for run in runs if run.seeds or run.error]
    if not any(run.seeds for run in played):
        return code
    title = f"{args.seeds} seeds: median, and lowest..highest" if args.seeds > 1 else ""
    console.print(terminal_table([summarise(run) for run in played], title))
    console.print(f"report: {write_report(folder, played, origin)}", highlight=False)
    return code


def _play(
    runs: Sequence[ArmRun],
    settings: ServerSettings,
    traces: Traces,
    args: argparse.Namespace,
    console: Console,
) -> int:
    """Play all arms; what breaks one off is said, kept in its run, and becomes the exit code."""
    code = 0
    total = sum(len(trace) for trace in traces.values())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Seldom redrawn: the client shares this process.
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        for run in runs:
            task = progress.add_task(f"{run.name}: starting the server", total=total)
            watcher = Watcher(
                on_seed=lambda seed, task=task, name=run.name: progress.update(  # type: ignore[misc]
                    task, description=f"{name}: seed {seed}"
                ),
                on_request=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
            log = args.out / f"server-{run.name}.log"
            try:
                run_arm(run, settings, envs.environment(), traces, log, args.port, watcher)
            except BenchError as error:
                run.error = str(error)
                code = EXIT_FAILED
                progress.console.print(f"{run.name}: {error}", style="red", highlight=False)
            except KeyboardInterrupt:
                run.error = "interrupted"
                progress.console.print(f"{run.name}: interrupted", style="red")
                return EXIT_INTERRUPTED
            else:
                progress.update(task, description=f"{run.name}: done")
    return code


def _settings(args: argparse.Namespace) -> ServerSettings:
    model: Path = args.model or packaged_model()
    if not (model / "config.json").is_file():
        raise BenchError(
            f"model directory {model} holds no config.json; give --model DIR, a directory as "
            "written by transformers' save_pretrained"
        )
    settings = ServerSettings(model.resolve(), args.blocks)
    needed = -(-settings.max_model_len // settings.block_size) + 1
    if args.blocks < needed:
        raise BenchError(
            f"--blocks is {args.blocks}, expected at least {needed}: one request of "
            f"{settings.max_model_len} tokens must fit into the KV pool"
        )
    return settings


def _traces(args: argparse.Namespace) -> tuple[dict[int, Sequence[TraceRequest]], str]:
    """Traces by seed, and what they are in words."""
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    if args.trace is not None:
        trace = read_trace(args.trace)
        return dict.fromkeys(seeds, trace), f"{len(trace)} requests from {args.trace}."
    mix = Mix(requests=args.requests, rate_per_s=args.rate)
    words = (
        f"{mix.requests} arithmetic problems per seed, {mix.rate_per_s:g} per second in bursts "
        f"(Gamma, shape {mix.burstiness:g}), {mix.hard_share:.0%} of them hard, "
        f"{mix.history_share:.0%} with earlier turns."
    )
    return {seed: make_trace(mix, seed) for seed in seeds}, words


def _check_lengths(traces: Traces, settings: ServerSettings) -> None:
    """Refuse a trace with a request that no server would take."""
    for trace in traces.values():
        for request in trace:
            if request.max_tokens >= settings.max_model_len:
                raise BenchError(
                    f"request {request.id}: max_tokens is {request.max_tokens}, expected less "
                    f"than {settings.max_model_len}, the servers' context"
                )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -P -m {_MODULE}", description=__doc__)
    whole = "a whole number above 0"
    parser.add_argument("--seeds", type=_count, default=1, help=f"traces per arm, {whole}")
    parser.add_argument("--requests", type=_count, default=160, help=f"per trace, {whole}")
    parser.add_argument("--rate", type=_rate, default=8.0, help="mean arrivals per second")
    parser.add_argument("--blocks", type=_count, default=96, help="KV pool of each server")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the report")
    parser.add_argument("--model", type=Path, help="model directory (default: the packaged one)")
    parser.add_argument("--arms", type=_arms, default=list(ARM_ENVIRONMENTS), help="comma list")
    parser.add_argument("--trace", type=Path, help="JSON lines to play in place of drawn problems")
    parser.add_argument("--port", type=int, default=0, help="of the servers; 0: any free one")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _arms(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ARM_ENVIRONMENTS:
            known = ", ".join(ARM_ENVIRONMENTS)
            raise argparse.ArgumentTypeError(f"unknown arm {name!r}; known: {known}")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an arm twice")
    return names


if __name__ == "__main__":
    main()
