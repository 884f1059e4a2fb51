"""What plots share: colours of arms, titles and borders, distributions, PNG with a caption."""

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from meridian_patch.bench.figure_table import STALL_S, Floats

# Okabe and Ito's palette: its colours differ for colour-blind readers too.
_STYLES = {
    "stock": ("#D55E00", "o"),
    "stock-again": ("#F2B28C", "o"),
    "noop": ("#8A8A8A", "s"),
}
# Of the other arms, in order.
_OTHER_STYLES = (("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"))
# Where the axis of gaps begins.
_SHORTEST_GAP_MS = 0.5
_DPI = 130
# Letters of the caption that fit into an inch.
_CAPTION_PER_INCH = 15


def arm_styles(arms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each arm; beyond the palette they repeat."""
    others = cycle(_OTHER_STYLES)
    return {arm: _STYLES.get(arm) or next(others) for arm in arms}


def arm_colours(arms: Iterable[str]) -> dict[str, str]:
    """The colours of ``arm_styles``."""
    return {arm: colour for arm, (colour, _) in arm_styles(arms).items()}


def finish_axes(figure: Figure, axes: Axes, title: str) -> None:
    """Title, grid and borders as all plots have them."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(visible=True, color="#E6E6E6", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.set_facecolor("white")


def distributions(
    ttfat_s: Mapping[str, Floats],
    tails: Mapping[str, tuple[Floats, Floats]],
    caption: str,
    *,
    title: str = "",
    is_log: bool = False,
) -> bytes:
    """How soon answers begin, and the tail of the gaps within them, as PNG.

    Args:
        ttfat_s: by arm, TTFAT of each request in seconds.
        tails: by arm, lengths of answer gaps in ms, and the share that is at least so long.
        caption: how they were obtained.
        title: above both; empty: none.
        is_log: the axis of TTFAT is logarithmic.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = arm_colours(ttfat_s)
    for number, arm in enumerate(ttfat_s):
        # Later arms are thinner, so that equal ones do not hide each other.
        style = {"color": colours[arm], "lw": max(1.2, 4.0 - number), "where": "post"}
        waits = np.sort(ttfat_s[arm])
        left.step(waits, np.arange(1, waits.size + 1) / max(1, waits.size), label=arm, **style)
        gaps_ms, shares = tails[arm]
        if gaps_ms.size:
            right.step(gaps_ms, shares, **style)
    if is_log:
        left.set_xscale("log")
        label_log_axis(left.xaxis, plain_number)
    else:
        left.set_xlim(left=0)
    left.set_ylim(0, 1.02)
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.set_xlabel("seconds from the request to its first answer token")
    left.set_ylabel("requests whose answer has begun")
    left.legend(frameon=False, loc="lower right")
    if title:
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    finish_axes(figure, left, "How soon answers begin (TTFAT)")
    _finish_gap_tail(figure, right)
    return to_png(figure, caption)


def _finish_gap_tail(figure: Figure, axes: Axes) -> None:
    """Scales and words of a plot of answer gaps in ms against the share that is as long."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Before the limits: it widens them where every gap is shorter.
    axes.axvline(STALL_S * 1000, color="#444444", lw=0.9, ls="--")
    axes.text(
        STALL_S * 1000, 1.0, " stalls", transform=axes.get_xaxis_transform(), va="top", size=9
    )
    axes.set_xlim(left=_SHORTEST_GAP_MS)
    label_log_axis(axes.xaxis, plain_number)
    label_log_axis(axes.yaxis, one_in)
    axes.set_xlabel("gap between two tokens of an answer (ms)")
    axes.set_ylabel("gaps at least this long")
    finish_axes(figure, axes, "The longest gaps within answers")


def label_log_axis(axis: Axis, words: Callable[[float, int], str]) -> None:
    """Name the whole powers of ten, and no ticks between them."""
    axis.set_major_formatter(FuncFormatter(words))
    axis.set_minor_formatter(NullFormatter())


def plain_number(value: float, _position: int) -> str:
    """A tick as people write it: 0.1, 10, 1,000."""
    return f"{value:,.10g}"


def one_in(share: float, _position: int) -> str:
    """A tick of a share: all, 1 in 10, 1 in 1,000."""
    return "all" if share >= 1 else f"1 in {1 / share:,.0f}"


def to_png(figure: Figure, caption: str) -> bytes:
    """The picture, with a line below it that says how it was obtained."""
    text = textwrap.fill(caption, int(_CAPTION_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(text, fontsize=7, color="#555555", x=0.01, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
