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
_BOTH: Final = "#555555"
_COLOUR_OF: Final = {"think engine": _GOOD, "answer engine": _BAD, "one router": _ROUTER}


def plot_timeline(result: Result, caption: str) -> bytes:
    """PNG with four rows: faults, requests that end per second, those in flight, memory."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    rows = figure.subplots(4, 1, sharex=True, height_ratios=(2, 3, 2, 3))
    faults, ends, flight, memory = rows
    for axes in (ends, flight, memory):
        for injected in result.injected:
            axes.axvspan(injected.begin_s, injected.end_s, color=_WINDOW, zorder=0)
    _draw_faults(faults, result)
    _draw_ends(ends, result)
    flight.plot(
        [sample.at_s for sample in result.samples],
        [sample.in_flight for sample in result.samples],
        color=_GOOD,
        lw=1,
    )
    flight.set_ylabel("requests")
    finish_axes(figure, faults, "Faults and their windows, by whom they strike")
    finish_axes(figure, flight, "In flight")
    _draw_memory(memory, result)
    memory.set_xlabel("seconds of load")
    finish_axes(figure, memory, "Resident memory: each EngineCore, and the routers")
    finish_axes(figure, ends, "Requests that ended; shaded: windows of faults")
    return to_png(figure, caption.replace("`", ""))


def _draw_faults(axes: Axes, result: Result) -> None:
    """A line for each kind, with a bar for each window."""
    kinds = list(dict.fromkeys(injected.fault.kind for injected in result.injected))
    struck: set[str] = set()
    for injected in result.injected:
        strikes = injected.fault.strikes
        axes.barh(
            kinds.index(injected.fault.kind),
            injected.end_s - injected.begin_s,
            left=injected.begin_s,
            color=_COLOUR_OF.get(strikes, _BOTH),
            label=None if strikes in struck else strikes,
        )
        struck.add(strikes)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    if struck:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, frameon=False)


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
    named: set[str] = set()
    for name, life in lives.items():
        colour = _ROUTER if name == "routers" else _GOOD if name.startswith("think") else _BAD
        server = name.partition("-")[0]
        # One name for all lives of a server.
        label = None if server in named else server
        named.add(server)
        axes.plot(*zip(*life, strict=True), color=colour, lw=1, label=label)
    if named:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
