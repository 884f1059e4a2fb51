"""The table of a served comparison: one row per figure, one column per arm, and the ratio."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from meridian_patch.bench.metrics import FIGURE_KINDS, FigureKind
from meridian_patch.bench.summary import ArmSummary, Spread, seed_ratios

ABSENT = "-"
BORROWED_NOTE = (
    "* counted in the noop arm (our scheduler class deciding as stock does): stock counts "
    "preemptions, but not in which phase the victim was"
)
_BORROWED = ("answer_preemptions", "think_preemptions")


@dataclass(frozen=True)
class Row:
    """One figure as text: a cell per arm, then patched over stock."""

    label: str
    cells: tuple[str, ...]
    ratio: str


def build_rows(arms: Sequence[ArmSummary]) -> list[Row]:
    """Rows for the arms; the stock cells that stock cannot count come from noop, marked ``*``."""
    by_name = {arm.name: arm for arm in arms}
    rows = []
    for kind in FIGURE_KINDS:
        cells = []
        for arm in arms:
            spread = arm.spreads.get(kind.name)
            noop = by_name.get("noop")
            if arm.name == "stock" and kind.name in _BORROWED and spread is None and noop:
                borrowed = noop.spreads.get(kind.name)
                cells.append(f"{_show(kind, borrowed)} *" if borrowed else ABSENT)
            else:
                cells.append(_show(kind, spread))
        rows.append(Row(kind.label + _unit(kind), tuple(cells), _ratio(kind, by_name)))
    return rows


def column_titles(arms: Sequence[ArmSummary]) -> list[str]:
    """Column titles, the label column left out."""
    names = [f"{arm.name} (partial)" if arm.is_partial else arm.name for arm in arms]
    return [*names, "patched / stock"]


def has_borrowed(rows: Sequence[Row]) -> bool:
    """True when a cell needs ``BORROWED_NOTE``."""
    return any(cell.endswith("*") for row in rows for cell in row.cells)


def terminal_table(arms: Sequence[ArmSummary], title: str) -> Table:
    """The table for a terminal."""
    rows = build_rows(arms)
    note = BORROWED_NOTE if has_borrowed(rows) else None
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in column_titles(arms):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.label, *row.cells, row.ratio)
    return table


def _unit(kind: FigureKind) -> str:
    return f", {kind.unit}" if kind.unit else ""


def _show(kind: FigureKind, spread: Spread | None) -> str:
    if spread is None:
        return ABSENT
    scale = {"ms": 1000.0, "%": 100.0}.get(kind.unit, 1.0)
    text = _number(spread.median * scale)
    if spread.count == 1:
        return text
    return f"{text} ({_number(spread.low * scale)}..{_number(spread.high * scale)})"


def _ratio(kind: FigureKind, by_name: dict[str, ArmSummary]) -> str:
    if "stock" not in by_name or "patched" not in by_name:
        return ABSENT
    ratios = seed_ratios(by_name["patched"], by_name["stock"], kind.name)
    spread = Spread.of(list(ratios.values()))
    if spread is None:
        return ABSENT
    if spread.count == 1:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.low:.2f}..{spread.high:.2f})"


def _number(value: float) -> str:
    if value and abs(value) < 10:  # noqa: PLR2004 - below ten one decimal says something
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:,.0f}"
