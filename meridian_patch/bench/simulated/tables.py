"""Tables of lab replays: which figures are shown, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.table import Table

from meridian_patch.bench.simulated.arms import STOCK
from meridian_patch.bench.simulated.figures import GOODPUT, HARM, Figure, Row
from meridian_patch.bench.simulated.grid import Place


@dataclass(frozen=True)
class Kind:
    """How a figure is shown.

    Attributes:
        is_ratio: arms are given over stock; otherwise in the figure's own unit, as stock is.
        is_brief: stands in the table on the terminal too.
        words: definition, where the label does not say it all.
    """

    name: str
    label: str
    scale: float = 1.0
    digits: int = 2
    is_ratio: bool = True
    is_brief: bool = False
    words: str = ""


_MS = 1000.0
KINDS = (
    Kind("ttft_mean_s", "TTFT mean, s", words="submit to first token of any kind"),
    Kind("ttft_p99_s", "TTFT p99, s"),
    Kind("ttfat_mean_s", "TTFAT mean, s", is_brief=True, words="submit to first answer token"),
    Kind("ttfat_p50_s", "TTFAT p50, s"),
    Kind("ttfat_p95_s", "TTFAT p95, s"),
    Kind("ttfat_p99_s", "TTFAT p99, s", is_brief=True),
    Kind(
        "slowdown_mean",
        "TTFAT slowdown mean",
        words="TTFAT over that of the same request alone on the engine with nothing cached",
    ),
    Kind("slowdown_p99", "TTFAT slowdown p99", is_brief=True),
    Kind(
        HARM,
        "harm p99, %",
        100.0,
        1,
        is_ratio=False,
        is_brief=True,
        words="p99 over requests of (arm - stock) / stock, TTFAT of the same request",
    ),
    Kind("ttot_p99_s", "TTOT p99, ms", _MS, 1, words="boundary to first answer token"),
    Kind("ttot_max_s", "TTOT max, ms", _MS, 1),
    Kind(
        "think_tpot_mean_s", "think TPOT mean, ms", _MS, 1, words="per think token, first excluded"
    ),
    Kind("think_tpot_p99_s", "think TPOT p99, ms", _MS, 1),
    Kind("answer_itl_p50_s", "answer ITL p50, ms", _MS, 1, words="gaps between answer tokens"),
    Kind("answer_itl_p99_s", "answer ITL p99, ms", _MS, 1, is_brief=True),
    Kind("answer_itl_p999_s", "answer ITL p99.9, ms", _MS, 1),
    Kind("answer_gap_max_s", "answer gap max, ms", _MS, 1, is_brief=True),
    Kind(
        "answer_itl_p99_over_decode_only",
        "answer ITL p99 / decode step",
        is_ratio=False,
        is_brief=True,
        words="over the p99 time of the same run's steps that compute no prompt",
    ),
    Kind("answer_gap_max_over_decode_only", "answer gap max / decode step", is_ratio=False),
    Kind("decode_only_step_p99_s", "decode-only step p99, ms", _MS, 1),
    Kind(
        "answer_stalls",
        "answer stalls",
        digits=1,
        is_ratio=False,
        is_brief=True,
        words="answer gaps over 250 ms",
    ),
    Kind(
        "qoe_mean", "QoE mean", digits=4, is_ratio=False, words="Andes' integral at 50 ms a token"
    ),
    Kind("qoe_low_share", "QoE < 0.95, % of requests", 100.0, 1, is_ratio=False, is_brief=True),
    Kind("e2e_mean_s", "e2e mean, s"),
    Kind("e2e_p99_s", "e2e p99, s"),
    Kind(
        "tokens_per_s",
        "tokens/s",
        digits=1,
        is_brief=True,
        words="output tokens from the first arrival to the last token",
    ),
    Kind(
        "steady_tokens_per_s",
        "steady tokens/s",
        digits=1,
        words="from 10 % to 80 % of all output tokens",
    ),
    Kind(
        GOODPUT,
        "goodput, requests/s",
        digits=3,
        is_brief=True,
        words="requests within the limits on TTFAT slowdown and own answer ITL p99",
    ),
    Kind("preemptions", "preemptions", digits=1, is_brief=True),
    Kind("preemptions_prefill", "... in prefill", digits=1, is_ratio=False),
    Kind("preemptions_think", "... thinking", digits=1, is_ratio=False),
    Kind("preemptions_answer", "... answering", digits=1, is_ratio=False),
    Kind("preempted_answers", "preempted answers", digits=1, is_ratio=False, is_brief=True),
    Kind("preemptions_max", "preemptions of one request, most", digits=1, is_ratio=False),
    Kind("recomputed_tokens", "recomputed tokens", digits=0, is_brief=True),
    Kind("recomputed_tokens_think", "... thinking", digits=0, is_ratio=False),
    Kind("recomputed_tokens_answer", "... answering", digits=0, is_ratio=False),
    Kind("hit_tokens", "prefix-hit tokens", digits=0, words="at first admission"),
    Kind(
        "first_wait_max_s",
        "longest first wait, s",
        is_brief=True,
        words="from a request's arrival to the first step that it is part of",
    ),
    Kind(
        "longest_pause_s",
        "longest pause, s",
        is_brief=True,
        words="longest time after its first step in which a request was part of none",
    ),
)
NOTE = "Mean over seeds; x: over stock. In brackets: 95 % bootstrap over seeds, paired by seed."


@dataclass(frozen=True)
class Cells:
    """One line of a table as text."""

    label: str
    cells: Sequence[str]
    words: str = ""


def by_place(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    """Rows of each place, places in the order of their first row."""
    ordered = sorted(rows, key=lambda row: [r.place for r in rows].index(row.place))
    return {place: list(group) for place, group in groupby(ordered, key=lambda row: row.place)}


def place_cells(rows: Sequence[Row], *, is_brief: bool) -> list[Cells]:
    """The lines of one place's table, a cell per arm; figures that no arm has are left out."""
    lines = []
    if len({row.seeds for row in rows}) > 1:
        lines.append(Cells("seeds that ended", [str(len(row.seeds)) for row in rows]))
    for kind in KINDS:
        if is_brief and not kind.is_brief:
            continue
        cells = [_cell(kind, row, is_brief=is_brief) for row in rows]
        if any(cell != "-" for cell in cells):
            lines.append(Cells(kind.label, cells, kind.words))
    return lines


def place_table(rows: Sequence[Row]) -> Table:
    """The brief table of one place, for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.arm, justify="right")
    for line in place_cells(rows, is_brief=True):
        table.add_row(line.label, *line.cells)
    return table


def _cell(kind: Kind, row: Row, *, is_brief: bool) -> str:
    figure = row.figures.get(kind.name, Figure(None))
    value = _text(figure.value, figure.interval, kind.scale, kind.digits)
    if row.arm == STOCK or not kind.is_ratio or figure.value is None:
        return value
    if figure.over_stock is None:
        return value
    ratio = _text(figure.over_stock, figure.over_stock_interval, 1.0, 3)
    if is_brief:
        return f"x {ratio}"
    return f"{figure.value * kind.scale:,.{kind.digits}f} · x {ratio}"


def _text(
    value: float | None, interval: tuple[float, float] | None, scale: float, digits: int
) -> str:
    if value is None:
        return "-"
    text = f"{value * scale:,.{digits}f}"
    if interval is None or interval[0] == interval[1]:
        return text
    low, high = (f"{bound * scale:,.{digits}f}" for bound in interval)
    return f"{text} [{low}..{high}]"
