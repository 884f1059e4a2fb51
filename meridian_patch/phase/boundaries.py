"""Resolved think boundaries of one served model, as token sequences."""

from dataclasses import dataclass

from meridian_patch.config.family_schema import History

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Boundaries:
    """Which token sequences open and end thinking.

    Attributes:
        family: name of the family file, or ``"<parser NAME>"`` when only a parser is known.
        start: sequences, any of which opens thinking.
        end: sequences, any of which ends thinking.
        implicit_end: those of ``end`` with which the answer begins, such as a tool call's.
        close: the sequence that is forced to end thinking.
        history: what the chat template does with the thinking of earlier turns.
        tool_call: sequences, any of which opens a tool call.
        turn_start: ids that open a turn in a prompt, whose boundaries count behind the last one.
        counts_preamble: whether text that comes before a thought that the model opens itself is
            reasoning, because the server's reasoning parser begins within a thought.
        reopens: whether a start marker behind the end of a thought opens another one; False: it is
            text of the answer to the server's reasoning parser.
        probe: the trial boundary that a probe appends to a thought; empty if the tokenizer cannot
            encode it.
    """

    family: str
    start: tuple[TokenIds, ...]
    end: tuple[TokenIds, ...]
    close: TokenIds
    history: History = "unverified"
    tool_call: tuple[TokenIds, ...] = ()
    implicit_end: tuple[TokenIds, ...] = ()
    turn_start: frozenset[int] = frozenset()
    counts_preamble: bool = False
    reopens: bool = True
    probe: TokenIds = ()
