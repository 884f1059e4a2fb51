"""Progress bars: what is under way, how much of it is done, and for how long."""

from typing import Any

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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    kind = Progress if console.is_terminal or transient else _Lines
    return kind(*columns, console=console, refresh_per_second=2, transient=transient)


class _Lines(Progress):
    """Says what begins, beside what `Progress` prints when all has ended."""

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        self.console.print(f"{description} ...", markup=False, highlight=False)
        return super().add_task(description, *args, **options)
