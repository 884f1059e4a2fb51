"""Says of each picture that is saved whether all its words lie within it."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

_TOLERANCE_IN = 0.02


def watch_pictures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the pictures saved from now on that run out of their paper, with by how much."""
    cut: list[str] = []
    save = Figure.savefig

    def savefig(figure: Figure, target: str | Path | Any, **options: Any) -> None:
        save(figure, target, **options)
        drawn = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        over = max(-drawn.x0, -drawn.y0, drawn.x1 - width, drawn.y1 - height)
        if over > _TOLERANCE_IN:
            cut.append(f"{figure.axes[0].get_title(loc='left')}: {over:.2f} inches")

    monkeypatch.setattr(Figure, "savefig", savefig)
    return cut
