"""Runs a comparison: progress, failures, Ctrl-C, and what is shown at the end."""

import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from meridian_patch.bench.progress import progress_bars
from meridian_patch.bench.simulated.grid import (
    RunKey,
    Saturation,
    find_points,
    plan_jobs,
    point_title,
    run_name,
    saturation_text,
)
from meridian_patch.bench.simulated.report import Results, write_results
from meridian_patch.bench.simulated.run import ReplayRun, Workers
from meridian_patch.bench.simulated.summary import NOTE, by_point, point_table, summarise
from meridian_patch.bench.simulated.trace import write_trace
from meridian_patch.errors import BenchError


def make_folder(folder: Path) -> None:
    """Make the folder of the results, before hours are spent on them.

    Raises:
        BenchError: no file can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BenchError(
            f"--out: cannot write to {folder} ({error.strerror}); give another folder"
        ) from error


def play(results: Results, processes: int, console: Console, trace_out: Path | None = None) -> None:
    """Run all replays and enter them; on Ctrl-C the replays that have ended are kept.

    Args:
        results: takes runs, failures and saturations.
        processes: number of worker processes.
        console: shows progress and failures.
        trace_out: file for the trace of the first replay.

    Raises:
        BenchError: a pool cannot hold the longest request, or saturated stock failed.
    """
    try:
        with progress_bars(console) as progress, Workers(processes) as workers:
            _play(results, workers, progress, trace_out)
    except KeyboardInterrupt:
        results.is_interrupted = True
        console.print("interrupted", style="red")


def show(results: Results, folder: Path, console: Console) -> None:
    """Print the tables and write page, data and plots of the replays that succeeded."""
    if not results.runs:
        console.print("no replay ended, so nothing was written", style="red")
        return
    rows = summarise(results.runs, results.limits)
    for found in results.saturations:
        console.print(saturation_text(found), highlight=False)
    console.print(results.provenance)
    for point, of_point in by_point(rows).items():
        title = f"\n{point_title(point)}, {len(of_point[0].seeds)} seeds"
        console.print(title, style="bold", highlight=False)
        console.print(point_table(of_point))
    console.print(NOTE)
    for path in write_results(folder, results, rows):
        console.print(str(path), highlight=False)


def _play(results: Results, workers: Workers, progress: Progress, trace_out: Path | None) -> None:
    plan = results.plan
    if plan.num_saturations:
        measuring = progress.add_task("saturated stock", total=plan.num_saturations)

    def on_saturated(saturation: Saturation) -> None:
        results.saturations.append(saturation)
        progress.advance(measuring)

    jobs = plan_jobs(plan, find_points(plan, workers, on_saturated))
    if trace_out is not None:
        write_trace(trace_out, next(iter(jobs.values())).trace())
    replaying = progress.add_task("replays", total=len(jobs))
    ended: dict[RunKey, ReplayRun] = {}
    try:
        for key, run in workers.run(jobs):
            progress.advance(replaying)
            if isinstance(run, ReplayRun):
                ended[key] = run
                continue
            results.failures[run_name(key)] = run
            text = f"{run_name(key)} failed: {run}"
            progress.console.print(text, style="red", highlight=False)
    finally:
        # In the order of the plan, not in the order in which they ended.
        results.runs = {key: ended[key] for key in jobs if key in ended}
