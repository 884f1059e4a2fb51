"""Writes the page of arms: tables, targets and the picture that one looks at first."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from arms import picture, targets
from arms.campaign import OURS, SHORT_POOL, TUNING_SEEDS, UNSEEN_SEEDS, Point, label
from arms.goodput import SHARE, Goodput
from arms.registry import ARMS
from arms.replays import LONGEST_SHARE, MAX_DECODE_STEPS, MAX_SLOWDOWN
from arms.summary import COLUMNS, Summary, text
from meridian_patch.bench.arms import STOCK
from meridian_patch.replay.cost import DEFAULT_COST, load_cost

_HOW = (
    "`simulated`: every arm arranges the queues of vLLM 0.32's real scheduler and KV cache "
    "manager; no model is run. Asynchronous scheduling; what a preemption loses is computed "
    "again. The arms know the step times, ours learns them. Ours has early exit observing, as it "
    "ships."
)
_WELL = (
    'Served well ("ok"): the first answer token comes within '
    f"{MAX_SLOWDOWN:g} times what the same request takes alone on the engine, and the p99 of the "
    f"request's own answer gaps is within {MAX_DECODE_STEPS:g} steps that only decode (p99 of the "
    "run). Right and down is better. Oracles know the lengths of thoughts and answers: bounds, no "
    "opponents."
)


def write(
    path: Path,
    summary: Summary,
    points: Sequence[Point],
    goodputs: Sequence[Goodput],
    options: str,
) -> str:
    """Write the page at ``path`` and its picture beside it; returns the page.

    Points at which no seed has all arms yet are named as missing.
    """
    played = [point for point in points if summary.seeds(point)]
    date = datetime.now(UTC).date().isoformat()
    cost = load_cost(DEFAULT_COST)
    lines = [
        f"# Published ways to schedule beside ours, {date}",
        "",
        f"{_HOW} The virtual clock is driven by the cost model `{cost.name}` ({cost.provenance}).",
        "",
        f"    python -P scripts/lab/arms_page.py {options}".rstrip(),
        "",
        _seeds_text(summary, played),
        "",
    ]
    if played:
        shown = path.with_suffix(".png")
        picture.draw(shown, summary, played)
        lines += [
            f"![p99 slowdown against requests served well, one point per arm]({shown.name})",
            "",
            _WELL,
            "",
        ]
    for point in played:
        lines += _table(summary, point)
    missing = [_title(point) for point in points if point not in played]
    if missing:
        lines += [f"Not played to the end yet: {'; '.join(missing)}.", ""]
    if played:
        lines += _scales(summary, played)
    if goodputs:
        lines += _goodputs(goodputs)
    if OURS in summary.arms and "srpt" in summary.arms and played:
        lines += targets.section(summary, played, goodputs)
    lines += _arms_section(summary)
    page = "\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return page


def _seeds_text(summary: Summary, points: Sequence[Point]) -> str:
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for point in points:
        by_seeds.setdefault(tuple(summary.seeds(point)), []).append(_title(point))
    words = [
        f"{'; '.join(titles)}: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        for seeds, titles in by_seeds.items()
    ]
    return (
        f"{summary.requests} requests per replay. {'. '.join(words)}. No setting was "
        f"chosen on seeds {UNSEEN_SEEDS[0]} to {UNSEEN_SEEDS[-1]}; `--tune` searches settings on "
        f"seeds {TUNING_SEEDS[0]} to {TUNING_SEEDS[-1]}. Means over seeds; in brackets 95 % "
        "bootstrap intervals over seeds, paired by seed; with one seed there is none."
    )


def _title(point: Point) -> str:
    pool = "short pool" if point.pool == SHORT_POOL else "pool"
    return (
        f"{point.workload}, ρ {point.rho:g} ({point.rate:.2f} requests/s), {pool} of "
        f"{point.pool:,} tokens"
    )


def _table(summary: Summary, point: Point) -> Iterator[str]:
    yield f"## {_title(point)}"
    yield ""
    yield f"| arm | {' | '.join(column.title for column in COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for arm in summary.arms:
        cells = (text(summary.value(point, arm, column), column) for column in COLUMNS)
        name = f"**{label(arm)}**" if arm == OURS else label(arm)
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield (
        f"The longest {LONGEST_SHARE:.0%} are those that think longest. The worst answer gap is of "
        "all seeds."
    )
    yield ""


def _scales(summary: Summary, points: Sequence[Point]) -> Iterator[str]:
    """How the shares change with stricter and laxer limits."""
    limits = [
        (MAX_SLOWDOWN * scale, 1 + (MAX_DECODE_STEPS - 1) * scale) for scale in (0.4, 0.6, 1.0, 2.0)
    ]
    yield "## Stricter and laxer limits"
    yield ""
    yield (
        "Share of requests within both limits, on the slowdown and on the p99 of the own gaps in "
        "decode steps."
    )
    yield ""
    cells = [
        f"{point.workload}, ρ {point.rho:g}: ≤ {slowdown:g}, ≤ {steps:g}"
        for point in points
        for slowdown, steps in limits
    ]
    yield f"| arm | {' | '.join(cells)} |"
    yield "|---" * (len(cells) + 1) + "|"
    for arm in summary.arms:
        shares = (
            f"{summary.share_within(point, arm, *limit):.2f}"
            for point in points
            for limit in limits
        )
        yield f"| {label(arm)} | {' | '.join(shares)} |"
    yield ""


def _goodputs(goodputs: Sequence[Goodput]) -> Iterator[str]:
    yield "## Goodput"
    yield ""
    yield (
        f"The highest rate played, in requests/s, at which {SHARE:.0%} of all requests are served "
        "well; in brackets the lowest rate played at which they are not."
    )
    yield ""
    where = list(dict.fromkeys((each.workload, each.pool) for each in goodputs))
    found = {(each.workload, each.pool, each.arm): each for each in goodputs}
    yield f"| arm | {' | '.join(f'{workload}, {pool:,} tokens' for workload, pool in where)} |"
    yield "|---" * (len(where) + 1) + "|"
    for arm in dict.fromkeys(each.arm for each in goodputs):
        cells = (found[(*place, arm)] for place in where)
        texts = (f"{cell.rate:.2f} ({cell.over:.2f})" for cell in cells)
        yield f"| {label(arm)} | {' | '.join(texts)} |"
    yield ""


def _arms_section(summary: Summary) -> Iterator[str]:
    yield "## The arms"
    yield ""
    yield (
        "Each is a small file in `scripts/lab/arms/` that says where it comes from and in what it "
        "deviates."
    )
    yield ""
    yield "| arm | file | what it does | settings |"
    yield "|---|---|---|---|"
    for arm in summary.arms:
        if arm in (STOCK, OURS):
            continue
        entry = ARMS[arm]
        names = [*entry.grid, *(name for name in entry.settings if name not in entry.grid)]
        values = (
            f"{name} {entry.settings.get(name, getattr(entry.mixin, name))}" for name in names
        )
        file = entry.mixin.__module__.rpartition(".")[2]
        about = (entry.mixin.__doc__ or "").splitlines()[0]
        yield f"| {entry.label} | `{file}.py` | {about} | {', '.join(values)} |"
    yield ""
