"""What all plots share: colours of arms, titles and borders, PNG with a caption."""

import io
import textwrap
from collections.abc import Callable, Iterable
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

# Okabe and Ito's palette: its colours differ for colour-blind readers too.
_STYLES = {
    "stock": ("#D55E00", "o"),
    "stock-again": ("#F2B28C", "o"),
    "noop": ("#8A8A8A", "s"),
}
# Of the other arms, in order.
_OTHER_STYLES = (("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"))
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


def finish_gap_tail(figure: Figure, axes: Axes, stall_s: float, shortest_ms: float) -> None:
    """Scales and words of a plot of answer gaps in ms against the share that is at least so long.

    Args:
        figure: of the axes.
        axes: the curves are drawn.
        stall_s: from where on a gap is called a stall.
        shortest_ms: where the axis of gaps begins.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Before the limits: it widens them where every gap is shorter.
    axes.axvline(stall_s * 1000, color="#444444", lw=0.9, ls="--")
    axes.text(
        stall_s * 1000, 1.0, " stalls", transform=axes.get_xaxis_transform(), va="top", size=9
    )
    axes.set_xlim(left=shortest_ms)
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
