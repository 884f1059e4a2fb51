"""Resolved think boundaries of one served model, as token sequences."""

from dataclasses import dataclass

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Boundaries:
    """Which token sequences open and end thinking.

    Attributes:
        family: name of the family file, or ``"<parser NAME>"`` when only a parser is known.
        start: sequences of which any one opens thinking.
        end: sequences of which any one ends thinking.
        close: the sequence to force when thinking must be ended.
    """

    family: str
    start: tuple[TokenIds, ...]
    end: tuple[TokenIds, ...]
    close: TokenIds
