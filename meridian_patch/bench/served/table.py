"""The table of a served comparison: one row per figure, one column per arm, and the ratio."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from meridian_patch.bench.served.arms import NOOP, STOCK
from meridian_patch.bench.served.metrics import FIGURE_KINDS, FigureKind
from meridian_patch.bench.served.summary import (
    ArmSummary,
    Ratio,
    Spread,
    compared_arms,
    harm_over_stock,
    ratio_to_stock,
)

BORROWED_NOTE = (
    "* counted in the noop arm (our scheduler class deciding as stock does): stock counts "
    "preemptions, but not in which phase the victim was"
)
_BORROWED = ("answer_preemptions", "think_preemptions")


@dataclass(frozen=True)
class Cell:
    """One value as text.

    Attributes:
        middle: the value, or the median over seeds.
        span: lowest and highest, empty for a single value.
        mark: footnote mark, or empty.
    """

    middle: str
    span: str = ""
    mark: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.middle, self._bracketed, self.mark) if part)

    @property
    def stacked(self) -> str:
        """The span below the value, for narrow columns."""
        first = f"{self.middle} {self.mark}" if self.mark else self.middle
        return f"{first}\n{self.span}" if self.span else first

    @property
    def _bracketed(self) -> str:
        return f"({self.span})" if self.span else ""


@dataclass(frozen=True)
class Row:
    """One figure: a cell per arm, then one per arm that is compared with stock."""

    label: str
    cells: tuple[Cell, ...]
    ratios: tuple[Cell, ...]


def build_rows(arms: Sequence[ArmSummary]) -> list[Row]:
    """Rows for the arms; the stock cells that stock cannot count come from noop, marked ``*``."""
    by_name = {arm.name: arm for arm in arms}
    compared = compared_arms(arms)
    rows = [
        Row(
            f"{kind.label}, {kind.unit}" if kind.unit else kind.label,
            tuple(_arm_cell(kind, arm, by_name.get(NOOP)) for arm in arms),
            tuple(_mean_cell(ratio_to_stock(arms, name, kind.name), 1.0) for name in compared),
        )
        for kind in FIGURE_KINDS
    ]
    if compared:
        harm = tuple(_mean_cell(harm_over_stock(arms, name), _SCALES["%"]) for name in compared)
        rows.append(Row("harm p99 in TTFAT, %", tuple(_ABSENT for _ in arms), harm))
    return rows


def column_titles(arms: Sequence[ArmSummary]) -> list[str]:
    """Column titles, the label column left out."""
    names = [f"{arm.name} (partial)" if arm.is_partial else arm.name for arm in arms]
    return [*names, *(f"{name} / {STOCK}" for name in compared_arms(arms))]


def table_title(arms: Sequence[ArmSummary]) -> str:
    """What the cells hold, to follow the provenance; empty for a single seed."""
    seeds = max((len(arm.seeds) for arm in arms), default=0)
    if seeds <= 1:
        return ""
    ratio = "; ratio: mean of the pairs' ratios, 95 % bootstrap interval"
    return f", {seeds} seeds: median, lowest..highest{ratio if compared_arms(arms) else ''}"


def has_borrowed(rows: Sequence[Row]) -> bool:
    """True when a cell needs ``BORROWED_NOTE``."""
    return any(cell.mark for row in rows for cell in row.cells)


def terminal_table(arms: Sequence[ArmSummary], title: str) -> Table:
    """The table for a terminal."""
    rows = build_rows(arms)
    note = BORROWED_NOTE if has_borrowed(rows) else None
    table = Table(
        title=title,
        caption=note,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("", no_wrap=True)
    for name in column_titles(arms):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.label, *(cell.stacked for cell in (*row.cells, *row.ratios)))
    return table


def _arm_cell(kind: FigureKind, arm: ArmSummary, noop: ArmSummary | None) -> Cell:
    spread = arm.spreads.get(kind.name)
    if spread is None and noop and arm.name == STOCK and kind.name in _BORROWED:
        return _spread_cell(noop.spreads.get(kind.name), _SCALES.get(kind.unit, 1.0), mark="*")
    return _spread_cell(spread, _SCALES.get(kind.unit, 1.0))


def _mean_cell(ratio: Ratio | None, scale: float) -> Cell:
    if ratio is None:
        return _ABSENT
    span = "..".join(_number(end * scale) for end in ratio.interval or ())
    return Cell(_number(ratio.mean * scale), span)


def _spread_cell(spread: Spread | None, scale: float, mark: str = "") -> Cell:
    if spread is None:
        return _ABSENT
    middle, low, high = (_number(v * scale) for v in (spread.median, spread.low, spread.high))
    return Cell(middle, f"{low}..{high}" if spread.count > 1 else "", mark)


def _number(value: float) -> str:
    """Three digits, or the whole number when it has more."""
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004 - digits
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


# Values are kept in seconds and shares.
_SCALES = {"ms": 1000.0, "%": 100.0}
_ABSENT = Cell("-")
