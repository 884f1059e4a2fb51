"""The plot of a marathon: requests, errors and memory over time, with the faults marked."""

from collections import Counter
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meridian_patch.bench.marathon.run import Result
from meridian_patch.bench.plots import finish_axes, to_png

_GOOD: Final = "#0072B2"
_BAD: Final = "#D55E00"
_WINDOW: Final = "#F0E4C8"
_ROUTER: Final = "#009E73"
# Seconds whose ends are added up into one point.
_BIN_S: Final = 5.0
# Heights of the faults' names in turn, as a share of the axes: those of neighbours would overlap.
_LABEL_ROWS: Final = (1.0, 0.87)
# Names of more faults than this stand upright.
_MOST_LEVEL: Final = 12


def plot_timeline(result: Result, caption: str) -> bytes:
    """PNG with three rows: requests that end per second, those in flight, memory."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    ends, flight, memory = figure.subplots(3, 1, sharex=True)
    for axes in (ends, flight, memory):
        for injected in result.injected:
            axes.axvspan(injected.begin_s, injected.end_s, color=_WINDOW, zorder=0)
    _draw_ends(ends, result)
    _draw_names(ends, result)
    flight.plot(
        [sample.at_s for sample in result.samples],
        [sample.in_flight for sample in result.samples],
        color=_GOOD,
        lw=1,
    )
    flight.set_ylabel("requests")
    finish_axes(figure, flight, "In flight")
    _draw_memory(memory, result)
    memory.set_xlabel("seconds of load")
    finish_axes(figure, memory, "Resident memory: each EngineCore, and the routers")
    finish_axes(figure, ends, "Requests that ended; shaded: windows of faults")
    return to_png(figure, caption.replace("`", ""))


def _draw_names(axes: Axes, result: Result) -> None:
    """What each fault was, above the curves."""
    are_level = len(result.injected) <= _MOST_LEVEL
    for number, injected in enumerate(result.injected):
        kind, strikes = injected.fault.kind, injected.fault.strikes
        axes.text(
            injected.begin_s,
            _LABEL_ROWS[number % len(_LABEL_ROWS)] if are_level else 0.99,
            f"{kind}\n{strikes}" if are_level else f"{kind}, {strikes}",
            transform=axes.get_xaxis_transform(),
            size=7 if are_level else 6,
            rotation=0 if are_level else 90,
            va="top",
        )
    axes.set_ylim(top=(1.35 if are_level else 1.9) * axes.get_ylim()[1])


def _draw_ends(axes: Axes, result: Result) -> None:
    ended = [each for each in result.asked if each.end_s is not None]
    num_bins = int(max((each.end_s or 0.0 for each in ended), default=0.0) // _BIN_S) + 1
    begins = [each * _BIN_S for each in range(num_bins + 1)]
    for outcome, colour in (("ok", _GOOD), ("error", _BAD)):
        counts = Counter(
            int((each.end_s or 0.0) // _BIN_S) for each in ended if each.outcome == outcome
        )
        rates = [counts[each] / _BIN_S for each in range(num_bins)]
        axes.stairs(rates, begins, color=colour, label=outcome, baseline=None)
    axes.set_ylabel("per second")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)


def _draw_memory(axes: Axes, result: Result) -> None:
    lives: dict[str, list[tuple[float, float]]] = {}
    for sample in result.samples:
        for name, mib in sample.core_mib.items():
            lives.setdefault(name, []).append((sample.at_s, mib))
        if sample.router_mib is not None:
            lives.setdefault("routers", []).append((sample.at_s, sample.router_mib))
    for name, life in lives.items():
        colour = _ROUTER if name == "routers" else _GOOD if name.startswith("think") else _BAD
        axes.plot(*zip(*life, strict=True), color=colour, lw=1)
        below = name.startswith("answer")
        axes.annotate(
            name.partition("-")[0], life[-1], size=7, color=colour, va="top" if below else "bottom"
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
