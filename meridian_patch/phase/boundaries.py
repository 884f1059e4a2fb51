"""Resolved think boundaries of one served model, as token sequences."""

from dataclasses import dataclass

from meridian_patch.config.family import History

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Boundaries:
    """Which token sequences open and end thinking.

    Attributes:
        family: name of the family file, or ``"<parser NAME>"`` when only a parser is known.
        start: sequences, any of which opens thinking.
        end: sequences, any of which ends thinking.
        close: the sequence that is forced to end thinking.
        history: what the chat template does with the thinking of earlier turns.
        tool_call: sequences, any of which opens a tool call.
        probe: the trial boundary that a probe appends to a thought; empty if the tokenizer cannot
            encode it.
    """

    family: str
    start: tuple[TokenIds, ...]
    end: tuple[TokenIds, ...]
    close: TokenIds
    history: History = "unverified"
    tool_call: tuple[TokenIds, ...] = ()
    probe: TokenIds = ()
