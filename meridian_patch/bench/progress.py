"""Progress bars: what is under way, how much of it is done, and for how long."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


def progress_bars(console: Console, *, transient: bool = False) -> Progress:
    """A bar per task; seldom redrawn, because drawing takes time from what is measured.

    Where nothing can be redrawn, as in a log, each task is a line when it begins.

    Args:
        console: shows them.
        transient: remove them at the end, and say nothing in a log.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    kind = Progress if console.is_terminal or transient else _Lines
    return kind(*columns, console=console, refresh_per_second=2, transient=transient)


class _Lines(Progress):
    """Says what begins, beside what `Progress` prints when all has ended."""

    def start_task(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if not task.started:
            self.console.print(f"{task.description} ...", markup=False, highlight=False)
        super().start_task(task_id)
