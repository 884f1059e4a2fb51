"""Writes the report of a served comparison: a table, an HTML page with plots, and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isinf
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.figure_table import FIGURES, HARM, LATE_SHARE, STALL_S, Kind
from meridian_patch.bench.machine import Machine
from meridian_patch.bench.report import data_url, write_json, write_page
from meridian_patch.bench.served import plots
from meridian_patch.bench.served.arms import NOOP, STOCK_AGAIN
from meridian_patch.bench.served.fidelity import Fidelity
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import (
    ArmRun,
    ArmSummary,
    Ratio,
    SeedRun,
    chance_factor,
    compared_arms,
    counted_seeds,
    harm_over_stock,
    is_certified,
    misses_over_stock,
    ratio_to_stock,
    shown_kinds,
    summarise,
)
from meridian_patch.bench.statistics import Spread, plain_interval
from meridian_patch.emulation.ledger import MOST_LATE, NOT_CERTIFIED

FORMAT_VERSION = 3
PAGE_NAME, DATA_NAME, PICTURE_NAME = "report.html", "results.json", "answers.png"
WORST_GAP = "answer_gap_max_s"
HEADLINES = (
    "answer_pauses_s",
    WORST_GAP,
    "answer_stalls",
    "ttfat_mean_s",
    "think_tokens_mean",
    "accuracy",
    "computed_again_tokens",
)
BORROWED_NOTE = (
    "* counted in the noop arm (our scheduler class deciding as stock does): stock counts "
    "preemptions, but not in which phase the victim was"
)
CHANCE_NOTE = (
    "by chance: how far two stock servers were apart, at least a twentieth except for accuracy; a "
    "ratio within it, or whose own interval holds 1, shows nothing"
)
_BORROWED = ("answer_preemptions", "think_preemptions")


@dataclass(frozen=True)
class Origin:
    """How the figures were obtained.

    Attributes:
        date: ISO 8601, with the time zone.
        command: as typed.
        machine: at the start.
        settings: of every server.
        workload: in words.
        load: how the servers were driven.
        token_s: seconds per token of one request alone, where pauses are in tokens.
    """

    date: str
    command: str
    machine: Machine
    settings: ServerSettings
    workload: str
    load: Load = field(default_factory=Load)
    token_s: float | None = None

    @property
    def caption(self) -> str:
        """One line for below a plot."""
        return f"{self.machine.how} · {self.date} · {self.machine} · {self.command}"


def write_report(
    folder: Path, runs: Sequence[ArmRun], origin: Origin, fidelity: Sequence[Fidelity] = ()
) -> Path:
    """Write the page, the same as JSON, and the picture of the answers on its own.

    Args:
        folder: takes them.
        runs: one per arm.
        origin: how they were obtained.
        fidelity: figures of emulated servers against those of a replay.

    Returns:
        Path of the page.
    """
    arms = [summarise(run) for run in runs]
    document = report_data(arms, origin)
    if fidelity:
        document["fidelity"] = [asdict(each) | {"error": each.error} for each in fidelity]
    picture = picture_of(runs, origin)
    if picture is not None:
        (folder / PICTURE_NAME).write_bytes(picture)
    write_json(folder / DATA_NAME, document)
    page = folder / PAGE_NAME
    _write_page(page, arms, runs, origin)
    return page


def report_data(arms: Sequence[ArmSummary], origin: Origin) -> dict[str, Any]:
    """The report as plain data; times in seconds."""
    return {
        "version": FORMAT_VERSION,
        "how": origin.machine.how,
        "date": origin.date,
        "command": origin.command,
        "machine": asdict(origin.machine),
        "settings": _settings_data(origin.settings),
        "is_certified": is_certified(arms) if origin.settings.device else None,
        "load": asdict(origin.load),
        "workload": origin.workload,
        "token_s": origin.token_s,
        "arms": {arm.name: _arm_data(arm) for arm in arms},
        "over_stock": {arm.name: _ratio_data(arms, arm.name) for arm in arms if arm.name != STOCK},
    }


def _settings_data(settings: ServerSettings) -> dict[str, Any]:
    device = settings.device
    emulated = None if device is None else device.cost.model_dump(exclude_none=True)
    plain = asdict(replace(settings, device=None))
    return plain | {"model": str(settings.model), "device": emulated}


def _arm_data(arm: ArmSummary) -> dict[str, Any]:
    return {
        "start_s": arm.start_s,
        "is_partial": arm.is_partial,
        "error": arm.error,
        "over_seeds": {name: asdict(spread) for name, spread in arm.spreads.items()},
        "by_seed": {str(seed): figures for seed, figures in arm.seeds.items()},
    }


def _ratio_data(arms: Sequence[ArmSummary], arm: str) -> dict[str, Any]:
    """Ratios by figure; empty where nothing was played on both."""
    ratios = {kind.name: ratio_to_stock(arms, arm, kind.name) for kind in shown_kinds(arms)}
    ratios[HARM] = harm_over_stock(arms, arm)
    ratios["avoidable_misses"] = misses_over_stock(arms, arm)
    return {name: _plain(ratio) for name, ratio in ratios.items() if ratio is not None}


def _plain(ratio: Ratio) -> dict[str, Any]:
    return asdict(ratio) | {"interval": plain_interval(ratio.interval)}


def _write_page(
    path: Path, arms: Sequence[ArmSummary], runs: Sequence[ArmRun], origin: Origin
) -> None:
    rows = build_rows(arms)
    short_titles, headlines = build_headlines(arms)
    worst = {name: ratio_to_stock(arms, name, WORST_GAP) for name in compared_arms(arms)}
    kinds = (FIGURES[row.name] for row in headlines)
    write_page(
        path,
        "meridian_patch.bench.served",
        how=origin.machine.how,
        origin=origin,
        arms=arms,
        title=table_title(arms),
        titles=column_titles(arms),
        rows=rows,
        short_titles=short_titles,
        headlines=headlines,
        more=[kind.label for kind in kinds if kind.better == "more"],
        silence=silence_in_words(arms),
        emulated=emulation_in_words(arms),
        is_certified=is_certified(arms),
        chance_note=CHANCE_NOTE if is_played_twice(arms) else "",
        note=BORROWED_NOTE if has_borrowed(rows) else "",
        worst={name: ratio.by_seed for name, ratio in worst.items() if ratio},
        plots=_plots(runs, origin.caption),
        seeds=max((len(arm.seeds) for arm in arms), default=0),
        has_turns=any(arm.has_turns for arm in arms),
    )


def _plots(runs: Sequence[ArmRun], caption: str) -> list[dict[str, str]]:
    """Plots of one seed of each arm; none when no arm played one."""
    shown = _median_seed(runs)
    if not shown:
        return []
    pair = _differing(shown)
    return [
        {
            "title": "Who waited, and when",
            "text": "One line per request, the same line in each panel. Requests wait for their "
            "turn or because they were preempted; a halt within an answer is what its reader sees. "
            "This and the next plots are of the median seed by the time that the first arm's "
            "answers stood still.",
            "data": data_url(plots.requests_over_time(pair, caption)),
        },
        {
            "title": "Answer gaps over the run",
            "text": "Each point is a gap between two tokens of an answer, at the time it ended. "
            "Above the dashed line it counts as a stall.",
            "data": data_url(plots.gap_timeline(shown, caption)),
        },
        {
            "title": "Distributions",
            "text": "Left, further left is better; right, further left and lower is better.",
            "data": data_url(plots.distributions(shown, caption)),
        },
    ]


def picture_of(runs: Sequence[ArmRun], origin: Origin) -> bytes | None:
    """Who waited and when: stock and the first arm beside it, as PNG; None without any run."""
    shown = dict(list(_differing(_median_seed(runs)).items())[:2])
    if not shown:
        return None
    seed = next(iter(shown.values())).seed
    caption = f"seed {seed}, the median by the time that answers of the first arm stood still"
    return plots.requests_over_time(shown, f"{caption} · {origin.caption}")


def _median_seed(runs: Sequence[ArmRun]) -> dict[str, SeedRun]:
    """Of each arm the median seed by the time that answers of the first one stood still.

    Of an even number the lower one.
    """
    seeds = [{seed.seed: seed for seed in counted_seeds(run) if seed.records} for run in runs]
    played = next((found for found in seeds if found), {})
    if not played:
        return {}
    ordered = sorted(played, key=lambda one: played[one].figures().get("answer_pauses_s") or 0.0)
    median = ordered[(len(ordered) - 1) // 2]
    pairs = zip(runs, seeds, strict=True)
    return {run.name: found[median] for run, found in pairs if median in found}


def _differing(shown: Mapping[str, SeedRun]) -> Mapping[str, SeedRun]:
    """Stock and the arms that decide otherwise; all arms where there is no such arm."""
    return {name: run for name, run in shown.items() if name not in (NOOP, STOCK_AGAIN)} or shown


@dataclass(frozen=True)
class Cell:
    """One value as text.

    Attributes:
        middle: the value, or the median over seeds.
        span: lowest and highest, empty for a single value.
        mark: footnote mark, or empty.
        is_chance: two servers of the same code differ by as much.
    """

    middle: str
    span: str = ""
    mark: str = ""
    is_chance: bool = False

    def __str__(self) -> str:
        return " ".join(part for part in (self._first, self._bracketed, self.mark) if part)

    @property
    def short(self) -> Text:
        """Without the span; grey where it is chance."""
        text = f"{self._first} {self.mark}" if self.mark else self._first
        return Text(text, style="bright_black" if self.is_chance else "")

    @property
    def stacked(self) -> Text:
        """The span below the value, for narrow columns; grey where it is chance."""
        return self.short.append(f"\n{self.span}") if self.span else self.short

    @property
    def _first(self) -> str:
        return f"same ({self.middle})" if self.is_chance else self.middle

    @property
    def _bracketed(self) -> str:
        return f"({self.span})" if self.span else ""


_ABSENT = Cell("-")


@dataclass(frozen=True)
class FigureRow:
    """One figure: a cell per arm, then what is chance, then a ratio per arm compared with stock.

    What is chance is said where stock was played a second time.
    """

    name: str
    label: str
    cells: tuple[Cell, ...]
    ratios: tuple[Cell, ...]


def build_rows(arms: Sequence[ArmSummary]) -> list[FigureRow]:
    """Rows for the arms.

    Stock does not count by phase: its cells hold noop's values, marked ``*``.
    """
    by_name = {arm.name: arm for arm in arms}
    compared = compared_arms(arms)
    rows = [
        FigureRow(
            kind.name,
            kind.title,
            tuple(_arm_cell(kind, arm, by_name.get(NOOP)) for arm in arms),
            _ratio_cells(arms, kind.name),
        )
        for kind in shown_kinds(arms)
    ]
    none = tuple(_ABSENT for _ in arms)
    by_chance = (_ABSENT,) if is_played_twice(arms) else ()
    misses = [misses_over_stock(arms, name) for name in compared]
    if any(misses):
        cells = tuple(_ratio_cell(ratio, 1.0) for ratio in misses)
        label = "avoidable misses, stock = 1"
        rows.insert(1, FigureRow("avoidable_misses", label, none, by_chance + cells))
    if compared:
        harm = tuple(
            _ratio_cell(harm_over_stock(arms, name), FIGURES[HARM].scale) for name in compared
        )
        rows.append(FigureRow(HARM, "harm p99 in TTFAT, %", none, by_chance + harm))
    return rows


def column_titles(arms: Sequence[ArmSummary]) -> list[str]:
    """Column titles, the label column left out."""
    names = [f"{arm.name} (partial)" if arm.is_partial else arm.name for arm in arms]
    by_chance = ["by chance"] if is_played_twice(arms) else []
    return [*names, *by_chance, *(f"{name} / {STOCK}" for name in compared_arms(arms))]


def _ratio_cells(arms: Sequence[ArmSummary], name: str) -> tuple[Cell, ...]:
    """What is chance, where stock was played twice, then the ratios of the arms compared."""
    factor = chance_factor(arms, name)
    ratios = [ratio_to_stock(arms, arm, name) for arm in compared_arms(arms)]
    if factor is None:
        return tuple(_ratio_cell(ratio, 1.0) for ratio in ratios)
    spread = "any" if isinf(factor) else f"{_number(1 / factor)}..{_number(factor)}"
    return (Cell(spread), *(_ratio_cell(ratio, 1.0, factor) for ratio in ratios))


def table_title(arms: Sequence[ArmSummary]) -> str:
    """What the cells hold, as the end of a title; empty for a single seed."""
    seeds = max((len(arm.seeds) for arm in arms), default=0)
    if seeds <= 1:
        return ""
    ratio = "; ratio: of the sums over seeds (harm, misses: mean), 95 % bootstrap interval"
    return f", {seeds} seeds: median, lowest..highest{ratio if compared_arms(arms) else ''}"


def has_borrowed(rows: Sequence[FigureRow]) -> bool:
    """True when a cell needs ``BORROWED_NOTE``."""
    return any(cell.mark for row in rows for cell in row.cells)


def terminal_table(arms: Sequence[ArmSummary], title: str) -> Table:
    """The table for a terminal: every figure, with its spread over seeds."""
    rows = build_rows(arms)
    note = BORROWED_NOTE if has_borrowed(rows) else None
    table = _empty_table(title, note, is_certified=is_certified(arms))
    for name in column_titles(arms):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.label, *(cell.stacked for cell in (*row.cells, *row.ratios)))
    return table


def build_headlines(arms: Sequence[ArmSummary]) -> tuple[list[str], list[FigureRow]]:
    """Column titles and rows of what a first look is for, without the second stock."""
    shown = [number for number, arm in enumerate(arms) if arm.name != STOCK_AGAIN]
    titles = column_titles(arms)
    rows = {row.name: row for row in build_rows(arms)}
    headlines = [
        replace(rows[name], cells=tuple(rows[name].cells[number] for number in shown))
        for name in HEADLINES
        if name in rows
    ]
    return [*(titles[number] for number in shown), *titles[len(arms) :]], headlines


def headline_table(arms: Sequence[ArmSummary], title: str) -> Table:
    """The headlines for a terminal, without their spreads."""
    note = CHANCE_NOTE if is_played_twice(arms) else None
    table = _empty_table(title, note, is_certified=is_certified(arms))
    titles, rows = build_headlines(arms)
    for name in titles:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.label, *(cell.short for cell in (*row.cells, *row.ratios)))
    return table


def is_played_twice(arms: Sequence[ArmSummary]) -> bool:
    """True where a second stock server says what is chance."""
    return {STOCK, STOCK_AGAIN} <= {arm.name for arm in arms}


def silence_in_words(arms: Sequence[ArmSummary]) -> str:
    """That the machine itself stood still, for longer than what counts as a stall; or nothing."""
    longest = max(
        (arm.spreads["silence_max_s"].high for arm in arms if "silence_max_s" in arm.spreads),
        default=0.0,
    )
    if longest <= STALL_S:
        return ""
    return (
        f"The machine itself stood still for up to {longest:.1f} s, in which no stream got a "
        "token: gaps and stalls of this run are in part its doing. Run this again when nothing "
        "else runs."
    )


def emulation_in_words(arms: Sequence[ArmSummary]) -> str:
    """Whether the machine kept up with the device that it emulated; nothing without one."""
    shares = {arm.name: arm.spreads[LATE_SHARE] for arm in arms if LATE_SHARE in arm.spreads}
    if not shares:
        return ""
    late = ", ".join(f"{name} {spread.high:.2%}" for name, spread in shares.items())
    verdict = "certified" if is_certified(arms) else NOT_CERTIFIED
    return (
        f"Emulated device, {verdict}: of its time at most so much was late ({late}; up to "
        f"{MOST_LATE:.0%} counts as none)."
    )


def _empty_table(title: str, note: str | None, *, is_certified: bool = True) -> Table:
    table = Table(
        title=title,
        # Figures that do not count are grey.
        style="" if is_certified else "bright_black",
        caption=note,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("", no_wrap=True)
    return table


def _arm_cell(kind: Kind, arm: ArmSummary, noop: ArmSummary | None) -> Cell:
    spread = arm.spreads.get(kind.name)
    if spread is None and noop and arm.name == STOCK and kind.name in _BORROWED:
        return _spread_cell(noop.spreads.get(kind.name), kind.scale, mark="*")
    return _spread_cell(spread, kind.scale)


def _ratio_cell(ratio: Ratio | None, scale: float, chance: float = 0.0) -> Cell:
    """A ratio and its interval; ``chance``: a factor by which it may differ from 1 by chance."""
    if ratio is None:
        return _ABSENT
    span = "..".join(_number(end * scale) for end in ratio.interval or ())
    is_chance = chance > 0 and ratio.is_chance(chance)
    return Cell(_number(ratio.value * scale), span, is_chance=is_chance)


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
