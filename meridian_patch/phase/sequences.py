"""Finds the token sequences with which a model may write a marker string.

A marker that is a vocabulary entry is that one token. Any other marker is several tokens, and a
tokenizer may merge its first and last characters with adjacent text. So it is encoded in several
contexts, and each distinct sequence is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from meridian_patch.phase.boundaries import TokenIds

BEFORE = ("", "\n", " ", ".")
AFTER = ("", "\n", "\n\n", "x")


@dataclass(frozen=True)
class Vocabulary:
    """The operations of a tokenizer that resolution needs.

    Attributes:
        encode: text to ids, without special tokens added around it.
        decode: ids to text, with special tokens written out.
        token_id: id of a vocabulary entry, or None.
        special_ids: ids of special tokens, such as the end of a turn.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    token_id: Callable[[str], int | None]
    special_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class MarkerSequences:
    """How a tokenizer encodes one marker.

    Attributes:
        sequences: distinct token sequences, beginning with that of the bare marker if it has one;
            empty if the marker is merged with adjacent text in every context.
        merged: texts in which the marker is merged with adjacent text.
        bare_ids: the bare marker, encoded.
        bare_text: ``bare_ids``, decoded.
    """

    sequences: tuple[TokenIds, ...]
    merged: tuple[str, ...]
    bare_ids: TokenIds
    bare_text: str


def find_sequences(marker: str, vocabulary: Vocabulary) -> MarkerSequences:
    """All token sequences of ``marker``, in the contexts ``BEFORE`` x ``AFTER``."""
    entry = vocabulary.token_id(marker)
    if entry is not None:
        return MarkerSequences(((entry,),), (), (entry,), marker)
    sequences: dict[TokenIds, None] = {}
    merged = []
    for before, after in product(BEFORE, AFTER):
        ids = vocabulary.encode(before + marker + after)
        window = _window(ids, marker, vocabulary.decode)
        if window and vocabulary.decode(window).strip() == marker.strip():
            sequences[tuple(window)] = None
        elif window:
            merged.append(before + marker + after)
    bare_ids = vocabulary.encode(marker)
    return MarkerSequences(
        tuple(sequences), tuple(merged), tuple(bare_ids), vocabulary.decode(bare_ids)
    )


def _window(ids: list[int], marker: str, decode: Callable[[list[int]], str]) -> list[int]:
    """The shortest run of ids whose text contains the marker; empty if there is none."""
    stop = next((n for n in range(1, len(ids) + 1) if marker in decode(ids[:n])), 0)
    first = 0
    while first + 1 < stop and marker in decode(ids[first + 1 : stop]):
        first += 1
    return ids[first:stop]
