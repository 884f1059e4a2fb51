"""Progress of long commands, on a terminal and in a log."""

from io import StringIO

import pytest
from rich.console import Console

from meridian_patch.bench.progress import progress_bars


def test_a_task_that_begins_later_is_said_then():
    page = StringIO()
    bars = progress_bars(Console(file=page, width=80))
    later = bars.add_task("probes", start=False, total=None)
    assert page.getvalue() == ""
    bars.start_task(later)
    bars.start_task(later)
    assert page.getvalue() == "probes ...\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"is_terminal": False, "transient": False}, "seed 1, stock ...\n"),
        ({"is_terminal": False, "transient": True}, ""),
        ({"is_terminal": True, "transient": False}, ""),
    ],
)
def test_a_log_says_what_begins_before_all_has_ended(options, said):
    page = StringIO()
    console = Console(file=page, force_terminal=options["is_terminal"], width=80)
    bars = progress_bars(console, transient=options["transient"])
    bars.add_task("seed 1, stock", total=2)
    assert page.getvalue() == said
