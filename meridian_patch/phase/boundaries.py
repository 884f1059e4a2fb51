"""Resolved think boundaries of one served model, as token sequences."""

from dataclasses import dataclass

from meridian_patch.config.family import History

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Boundaries:
    """Which token sequences open and end thinking.

    Attributes:
        family: name of the family file, or ``"<parser NAME>"`` when only a parser is known.
        start: sequences of which any one opens thinking.
        end: sequences of which any one ends thinking.
        close: the sequence to force when thinking must be ended.
        history: what the chat template does with earlier turns' thinking.
        tool_call: sequences of which any one opens a tool call.
        probe: what to put behind a thought to see how sure its answer is; empty: it cannot be
            written in tokens.
    """

    family: str
    start: tuple[TokenIds, ...]
    end: tuple[TokenIds, ...]
    close: TokenIds
    history: History = "unverified"
    tool_call: tuple[TokenIds, ...] = ()
    probe: TokenIds = ()
