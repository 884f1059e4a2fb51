"""What all plots share: colours of arms, titles and borders, PNG with a caption."""

import io
import textwrap
from collections.abc import Iterable
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: its colours differ for colour-blind readers too.
_STYLES = {"stock": ("#D55E00", "o"), "noop": ("#8A8A8A", "s")}
# Of the other arms, in order.
_OTHER_STYLES = (("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"))
_DPI = 130
_CAPTION_WIDTH = 150


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


def to_png(figure: Figure, caption: str) -> bytes:
    """The picture, with a line below it that says how it was obtained."""
    figure.supxlabel(
        textwrap.fill(caption, _CAPTION_WIDTH), fontsize=7, color="#555555", x=0.01, ha="left"
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
