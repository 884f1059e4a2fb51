"""One comparison from plan to report: progress, failures, and what Ctrl-C leaves."""

import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from meridian_patch.bench.progress import progress_bars
from meridian_patch.bench.simulated.cost import CostModel
from meridian_patch.bench.simulated.figures import Limits, summarise
from meridian_patch.bench.simulated.grid import (
    Plan,
    RunKey,
    Saturation,
    find_places,
    place_title,
    plan_jobs,
    run_name,
    saturation_text,
)
from meridian_patch.bench.simulated.report import Origin, write_lab_report
from meridian_patch.bench.simulated.run import HOW, LabRun
from meridian_patch.bench.simulated.tables import NOTE, by_place, place_table
from meridian_patch.bench.simulated.trace import write_trace
from meridian_patch.bench.simulated.workers import Workers
from meridian_patch.errors import BenchError


@dataclass
class Session:
    """What is asked for, and what has come of it so far."""

    plan: Plan
    cost: CostModel
    limits: Limits
    folder: Path
    trace_out: Path | None
    is_sweep: bool
    saturations: list[Saturation] = field(default_factory=list)
    runs: dict[RunKey, LabRun] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            BenchError: nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise BenchError(
                f"--out: cannot write to {self.folder} ({error.strerror}); give another folder"
            ) from error

    def play(self, processes: int, console: Console) -> None:
        """Run everything; on Ctrl-C what has ended is kept.

        Raises:
            BenchError: a pool cannot hold the longest request, or saturated stock failed.
        """
        try:
            with (
                progress_bars(console) as progress,
                Workers(processes) as workers,
            ):
                self._play(workers, progress)
        except KeyboardInterrupt:
            self.is_interrupted = True
            console.print("interrupted", style="red")

    def report(self, console: Console) -> None:
        """Print the tables and write page, data and plots of what has ended."""
        if not self.runs:
            console.print("no replay ended, so nothing was written", style="red")
            return
        rows = summarise(self.runs, self.limits)
        for found in self.saturations:
            console.print(saturation_text(found), highlight=False)
        console.print(f"{HOW}, cost model {self.cost.name} ({self.cost.provenance})")
        for place, of_place in by_place(rows).items():
            title = f"\n{place_title(place)}, {len(of_place[0].seeds)} seeds"
            console.print(title, style="bold", highlight=False)
            console.print(place_table(of_place))
        console.print(NOTE)
        origin = Origin(
            datetime.now().astimezone().isoformat(timespec="seconds"),
            shlex.join(["meridian", *sys.argv[1:]]),
            self.cost,
            self.plan,
            self.limits,
            self.saturations,
            self.is_interrupted or bool(self.failures),
            self.failures,
        )
        for path in write_lab_report(self.folder, rows, self.runs, origin, is_sweep=self.is_sweep):
            console.print(str(path), highlight=False)

    def _play(self, workers: Workers, progress: Progress) -> None:
        if self.plan.num_saturations:
            measuring = progress.add_task("saturated stock", total=self.plan.num_saturations)

        def on_saturated(saturation: Saturation) -> None:
            self.saturations.append(saturation)
            progress.advance(measuring)

        jobs = plan_jobs(self.plan, find_places(self.plan, workers, on_saturated))
        if self.trace_out is not None:
            write_trace(self.trace_out, next(iter(jobs.values())).trace())
        replaying = progress.add_task("replays", total=len(jobs))
        ended: dict[RunKey, LabRun] = {}
        try:
            for key, run in workers.run(jobs):
                progress.advance(replaying)
                if isinstance(run, LabRun):
                    ended[key] = run
                    continue
                self.failures[run_name(key)] = run
                text = f"{run_name(key)} failed: {run}"
                progress.console.print(text, style="red", highlight=False)
        finally:
            # In the order asked for, not in the order ended.
            self.runs = {key: ended[key] for key in jobs if key in ended}
