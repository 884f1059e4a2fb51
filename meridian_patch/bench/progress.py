"""Progress bars: what is under way, how much of it is done, and for how long."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bars(console: Console, *, transient: bool = False) -> Progress:
    """A bar per task; seldom redrawn, because drawing takes time from what is measured.

    Args:
        console: shows them.
        transient: remove them at the end.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,
        transient=transient,
    )
