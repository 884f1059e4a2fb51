"""Entropy behind the trial boundary, and EAT's variance, along thoughts, as PNG."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meridian_patch.bench.exit_trace import TracedThought
from meridian_patch.bench.served.plots import finish_axes, to_png

if TYPE_CHECKING:
    from matplotlib.artist import Artist

_ENTROPY, _VARIANCE = "#0072B2", "#D55E00"
_COLUMNS = 3
# Where a logarithmic axis cannot show nought, in nats squared.
_LEAST_VARIANCE = 1e-6
_NAN = float("nan")


def plot_thoughts(
    thoughts: Sequence[TracedThought],
    caption: str,
    lines: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    dots: Mapping[str, Mapping[str, AbstractSet[int]]] = MappingProxyType({}),
) -> bytes:
    """One panel per thought.

    Args:
        thoughts: at least one.
        caption: how it was obtained.
        lines: further lines: by label, by the thought's name, think tokens.
        dots: probes that are drawn large and joined, the same way.
    """
    columns = min(_COLUMNS, len(thoughts))
    rows = math.ceil(len(thoughts) / columns)
    figure = Figure(figsize=(4.3 * columns, 2.8 * rows + 0.6), layout="constrained")
    panels = iter(figure.subplots(rows, columns, squeeze=False).flat)
    handles: dict[str, Artist] = {}
    for thought, axes in zip(thoughts, panels, strict=False):
        _draw(axes, thought)
        for label, places in lines.items():
            if thought.name in places:
                mark = places[thought.name]
                axes.axvline(mark, color="#009E73", lw=1.6, ls="--", label=label)
        for label, chosen in dots.items():
            _draw_dots(axes, thought, chosen.get(thought.name, frozenset()), label)
        variance = _draw_variance(axes, thought)
        finish_axes(figure, axes, f"{thought.name}, thought {thought.number}")
        for each in (axes, variance):
            found, labels = each.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
    for axes in panels:
        axes.set_visible(False)
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper left", ncols=5, frameon=False
    )
    return to_png(figure, caption)


def _draw(axes: Axes, thought: TracedThought) -> None:
    tokens = [probe["think_tokens"] for probe in thought.probes]
    entropies = [_or_nan(probe["entropy_nats"]) for probe in thought.probes]
    axes.plot(tokens, entropies, "o-", ms=2.5, lw=1, color=_ENTROPY, label="entropy")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("think tokens", fontsize=8)
    axes.set_ylabel("entropy, nats", fontsize=8, color=_ENTROPY)
    if thought.verdict is not None:
        said = thought.verdict
        label = f"verdict: {said['reason']}"
        axes.axvline(said["think_tokens"], color="#CC79A7", lw=1.6, label=label)
    if thought.end is not None:
        axes.axvline(thought.end["think_tokens"], color="#444444", lw=1, ls=":", label="end")


def _draw_dots(axes: Axes, thought: TracedThought, places: AbstractSet[int], label: str) -> None:
    found = [probe for probe in thought.probes if probe["think_tokens"] in places]
    tokens = [probe["think_tokens"] for probe in found]
    entropies = [_or_nan(probe["entropy_nats"]) for probe in found]
    axes.plot(
        tokens, entropies, "D--", ms=6, mfc="none", mew=1.6, lw=1, color="#000000", label=label
    )


def _draw_variance(axes: Axes, thought: TracedThought) -> Axes:
    right = axes.twinx()
    values = [_or_nan(probe["variance_nats2"]) for probe in thought.probes]
    right.plot(
        [probe["think_tokens"] for probe in thought.probes],
        [max(value, _LEAST_VARIANCE) for value in values],
        color=_VARIANCE,
        lw=1.2,
        alpha=0.8,
        label="EAT's variance",
    )
    right.set_yscale("log")
    right.set_ylabel("variance, nats²", fontsize=8, color=_VARIANCE)
    right.spines[["top"]].set_visible(False)
    return right


def _or_nan(value: float | None) -> float:
    return _NAN if value is None else value
