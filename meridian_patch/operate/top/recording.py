"""Recorded scrapes: a text file of pages, each behind a line that says when it was read."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meridian_patch.operate.scrape import Scrape, ScrapeError, parse

_MARK: Final = re.compile(r"^# meridian scrape at (\d+(?:\.\d+)?) s\n", re.MULTILINE)


def append(path: Path, text: str, at_s: float) -> None:
    """Add a page to a recording.

    Raises:
        ScrapeError: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"# meridian scrape at {at_s:.3f} s\n{text}")
    except OSError as error:
        raise ScrapeError(f"recording {path} cannot be written: {error.strerror}") from error


def read(path: Path) -> Iterator[Scrape]:
    """The scrapes of a recording, the first one first.

    Raises:
        ScrapeError: the file cannot be read, is no recording, holds fewer than two pages, or one
            that is not whole.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScrapeError(f"recording {path} cannot be read: {error}") from error
    _, *parts = _MARK.split(text)
    times, pages = parts[::2], parts[1::2]
    if len(pages) < 2:  # noqa: PLR2004 - a window has two ends
        raise ScrapeError(
            f"recording {path} holds {len(pages)} pages, expected two or more, each behind a line "
            "'# meridian scrape at SECONDS s'; make one with meridian top --record"
        )
    for number, (at_s, page) in enumerate(zip(times, pages, strict=True), start=1):
        try:
            yield parse(page, float(at_s))
        except ScrapeError as error:
            raise ScrapeError(f"recording {path}, page {number}: {error}") from error
